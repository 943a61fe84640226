"""Calibrations with round numbers: of an attribute that is reduced, and of KL budgets."""

from dataclasses import replace

from radq.models.calibration import Calibration, StrengthPoint

TABLE = [StrengthPoint(0.0, 0.0, 0.5, 0.2, 1.0), StrengthPoint(0.5, -10.0, 0.5, 0.4, 1.1)]
PRAISE = Calibration(
    attribute="praise",
    base="toy",
    base_fingerprint="x",
    by="beta",
    reduce=True,
    judge="linear:judge",
    metric="mean_score",
    reads="text",
    prompts="0",
    num_prompts=30,
    samples=5,
    max_new_tokens=20,
    top_k=20,
    seed=0,
    max_perplexity_ratio=1.3,
    limited_by="judge",
    command="radq calibrate",
    table=[*TABLE, StrengthPoint(1.0, -30.0, 0.5, 0.6, 1.3)],
    measured=[],
)
BUDGETS = [StrengthPoint(0.0, 100.0, 0.0, 0.2, 1.0), StrengthPoint(1.0, 100.0, 0.8, 0.6, 1.3)]
BY_KL = replace(PRAISE, attribute="calm", by="kl", reduce=False, table=BUDGETS)
