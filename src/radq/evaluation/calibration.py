"""Calibrate a reward model: sweep β or the KL budget, let a judge read the texts, and find strengths from 0 to 1.

    calibrate(CalibrationPlan("runs/praise", "prompts.jsonl", "classifier:FOLDER#praise", "gpt2", "praise"))

The texts are a sweep like those of `radq eval`, in a folder of the cache: a killed calibration goes on where it was.

Strength 1 is the level beyond which the judge no longer improves by more than its interval, or beyond which the
perplexity leaves its bound. Strength s is the level with the share s of the improvement that strength 1 reaches, so
that equal steps of strength are equal steps of the judge's metric.

Axes of arrays: l levels.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from jaxtyping import Float

from radq.data.prompts import Prompt
from radq.decoding.config import DEFAULT_KL_BUDGET, Ends
from radq.errors import DataError, OptionError
from radq.evaluation.estimates import (
    DEFAULT_BOOTSTRAP,
    TRUSTED_PROMPTS,
    Bootstrap,
    Estimate,
    Sums,
    estimate,
    estimate_change,
    estimate_ratio,
)
from radq.evaluation.metrics import METRICS
from radq.evaluation.sweep.config import (
    WHILE_DECODING,
    GuideSweep,
    JudgeUse,
    PromptFile,
    Sweep,
    SweepCell,
    fingerprint_prompts,
)
from radq.evaluation.sweep.folder import open_sweep
from radq.files import default_cache_folder, fingerprint_values
from radq.models.calibration import Calibration, Interval, MeasuredPoint, StrengthPoint, calibrated_folder
from radq.settings import COUNT, Range, check_values
from radq.sources.model_source import ModelSource, fingerprint_weights_in

GUIDE, JUDGE = "guide", "judge"  # their names in the sweep
USUAL_SHIFT = 60.0  # β times the width of the rewards: a usual strength, around which levels are tried
LEVELS = {  # parts of the usual β, and KL budgets in nats
    "beta": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
    "kl": (0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
}


@dataclass(frozen=True)
class CalibrationPlan:
    """A plan says which attribute of a reward model is calibrated, on which prompts, and by which judge."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the reward model, or embedded:sentiment or embedded:toxicity."""
    prompts: str
    """File of prompts, one per line, or with a column prompt or text (csv, tsv, jsonl, parquet, also compressed)."""
    judge: str
    """An independent judge of the attribute, as `radq judge score` takes it; it should share neither model nor data
    with the reward model."""
    base: str = "embedded"
    """Language model to steer: a hub name, a folder, or embedded."""
    attribute: str = ""
    """Attribute to calibrate; may be left out if the model has one."""
    reduce: bool = False
    """Steer away from the attribute, with a negative β, so that the judge's scores fall."""
    by: Literal["beta", "kl"] = "beta"
    """beta: strengths differ in β under one KL budget; kl: they differ in the KL budget, with one large β."""
    levels: list[Annotated[float, Range(0, without_low=True)]] = field(default_factory=list)
    """Absolute values of β, or KL budgets with --by kl, to try; by default six, chosen by the range of the rewards."""
    max_perplexity_ratio: Annotated[float, Range(1, without_low=True)] = 1.3
    """Bound of the perplexity under the base model, as a multiple of that of unguided texts; the upper end of its
    interval must stay inside."""
    metric: Literal["mean_score", "avg_max", "positive_rate", "toxic_rate"] = "mean_score"
    """Metric of the judge's scores; avg_max is the mean over prompts of the highest score."""
    reads: Literal["continuation", "text"] = "continuation"
    """The judge reads continuations alone, or prompts with their continuations."""
    limit: Annotated[int, COUNT] | None = None
    """Number of prompts to use, from the beginning of the file; by default all."""
    samples: Annotated[int, COUNT] = 5
    """Number of continuations of each prompt at each level."""
    max_new_tokens: Annotated[int, COUNT] = 20
    """Largest number of tokens of a continuation."""
    top_k: Annotated[int, COUNT] = 20
    """Number of candidates of a token."""
    kl_budget: Annotated[float, Range(0, without_low=True)] | Literal["none"] | None = DEFAULT_KL_BUDGET
    """With --by beta, the KL budget of each token under which strengths are measured and later used; none is no
    budget."""
    ends: Ends = "base"
    """Stop tokens keep the probability that the language model gives them (base), or guides reward them like words
    (taught), which is for models that were taught ends."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of the random numbers."""
    batch_size: Annotated[int, COUNT] = 100
    """Number of continuations that are decoded together."""
    resamples: Annotated[int, COUNT] = 1000
    """Number of resamples of the prompts, for the intervals."""

    def __post_init__(self) -> None:
        check_values(self)
        object.__setattr__(self, "kl_budget", self.budget)
        unit = self._usual_beta() if self.by == "beta" and not self.levels else 1.0
        usual = [round(part * unit, 6) for part in LEVELS[self.by]]
        object.__setattr__(self, "levels", sorted(set(self.levels)) or usual)
        if len(self.levels) < 2:
            raise OptionError(
                f"levels must be two or more different numbers, got {self.levels[0]:g} alone.", "give more levels."
            )

    def _usual_beta(self) -> float:
        """A usual β: config.json has one range of the rewards, or one for each attribute."""
        config = ModelSource.find(calibrated_folder(self.folder, self.attribute)).config
        stored = config.get("response_range") or (0.0, 1.0)
        if isinstance(stored[0], list):
            stored = stored[config["attributes"].index(self.attribute)]
        low, high = map(float, stored)
        return USUAL_SHIFT / (high - low) if high > low else USUAL_SHIFT

    @property
    def budget(self) -> float | None:
        """The KL budget of each token where strengths differ in β; None for no budget."""
        return None if self.kl_budget == "none" else self.kl_budget

    def sweep(self) -> Sweep:
        """The sweep that writes and judges the texts of all levels."""
        betas = self.levels if self.by == "beta" else [LEVELS["beta"][-1] * self._usual_beta()]
        return Sweep(
            base=self.base,
            prompts=[PromptFile(self.prompts, limit=self.limit, group="all")],
            guides={GUIDE: GuideSweep(self.folder, {self.attribute: -1.0 if self.reduce else 1.0}, betas)},
            judges={JUDGE: JudgeUse(self.judge, [self.metric], self.reads)},
            metrics=["corpus_perplexity", "kl"],
            perplexity=WHILE_DECODING,
            samples=self.samples,
            max_new_tokens=self.max_new_tokens,
            top_k=[self.top_k],
            kl_budget=[self.budget] if self.by == "beta" else [*self.levels],
            ends=self.ends,
            seeds=[self.seed],
            batch_size=self.batch_size,
            resamples=self.resamples,
        )

    def level(self, cell: SweepCell) -> float:
        return (cell.beta if self.by == "beta" else cell.kl_budget) or 0.0  # the unguided base model has neither

    def setting(self, level: float, largest: float) -> tuple[float, float | None]:
        """β and KL budget at a level, rounded; `largest` is the one β of a calibration of KL budgets."""
        beta, budget = (level, self.budget) if self.by == "beta" else (largest, level)
        beta = round(-beta if self.reduce else beta, 4) + 0.0  # without the sign of −0
        return beta, None if budget is None else round(budget, 5)


@dataclass(frozen=True)
class Level:
    """A level of a guide, and the sums of the metrics of its texts. Level 0 is the unguided base model."""

    place: float
    score: Sums
    perplexity: Sums
    ends: dict[str, Estimate] = field(default_factory=dict)  # metrics of when texts end, which decide nothing


@dataclass(frozen=True)
class MeasuredLevel:
    """A level with its metrics. The gain is the judge's improvement over the unguided base model."""

    place: float
    score: Estimate
    gain: Estimate
    ratio: Estimate
    ends: dict[str, Estimate]


@dataclass(frozen=True)
class FoundStrengths:
    """The places, scores and perplexity ratios of `STRENGTHS`, the levels behind them, and the reason of the end."""

    places: Float[np.ndarray, " s"]
    scores: Float[np.ndarray, " s"]
    ratios: Float[np.ndarray, " s"]
    measured: list[MeasuredLevel]
    limited_by: Literal["judge", "perplexity", "range"]


def calibrate(
    plan: CalibrationPlan, command: str = "", device: str = "cpu", cache: Path | None = None, progress: bool = False
) -> Calibration:
    """Write, judge and measure the texts of all levels, unless the cache holds them, and find the strengths."""
    from radq.evaluation.sweep.generate import generate_all
    from radq.evaluation.sweep.measure import check_instruments, measure_all

    sweep = plan.sweep()
    prompts = read_enough_prompts(sweep)
    names = plan.base, calibrated_folder(plan.folder, plan.attribute)
    models = [ModelSource.find(name).fingerprint for name in names]
    key = fingerprint_values(asdict(sweep), fingerprint_prompts(prompts), models, check_instruments(sweep, device))
    folder = (cache or default_cache_folder()) / "calibrations" / key  # another one if any model has changed
    with open_sweep(folder, sweep, prompts):
        generate_all(folder, sweep, prompts, device, progress)
        cells = measure_all(folder, sweep, prompts, device, cache, progress)
    bootstrap, levels = Bootstrap(plan.resamples), []
    for measured in sorted(cells, key=lambda measured: plan.level(measured.cell)):
        texts = measured.scored_by(JUDGE)
        score, perplexity = (METRICS[name].sums(texts) for name in (plan.metric, "corpus_perplexity"))
        ends = {name: METRICS[name].estimate(texts, bootstrap) for name in measured.known_ends}
        levels.append(Level(plan.level(measured.cell), score, perplexity, ends))
    strengths = find_strengths(levels, plan.max_perplexity_ratio, plan.reduce, bootstrap)
    return _describe(plan, strengths, sweep.guides[GUIDE].beta[-1], prompts, command)


def read_enough_prompts(sweep: Sweep) -> list[Prompt]:
    prompts = sweep.read_prompts()
    if len(prompts) < 2:
        raise OptionError("a calibration needs 2 or more prompts, got 1.", f"give {TRUSTED_PROMPTS} or more.")
    return prompts


def _describe(
    plan: CalibrationPlan, strengths: FoundStrengths, largest: float, prompts: list[Prompt], command: str
) -> Calibration:
    columns = (STRENGTHS, strengths.places, strengths.scores, strengths.ratios)
    table = [
        StrengthPoint(round(strength, 6), *plan.setting(place, largest), round(score, 4), round(ratio, 4))
        for strength, place, score, ratio in zip(*(column.tolist() for column in columns), strict=True)
    ]
    unguided = (0.0, None if plan.budget is None else round(plan.budget, 5))
    measured = [
        MeasuredPoint(
            *(unguided if level.place == 0 else plan.setting(level.place, largest)),
            *map(_round_interval, (level.score, level.gain, level.ratio)),
            **{name: _round_interval(estimate) for name, estimate in level.ends.items()},
        )
        for level in strengths.measured
    ]
    own: dict[str, Any] = {
        "base": plan.base if not Path(plan.base).is_dir() else Path(plan.base).resolve().name,
        "base_fingerprint": ModelSource.find(plan.base).fingerprint,
        "weights": fingerprint_weights_in(Path(calibrated_folder(plan.folder, plan.attribute))),
        "prompts": fingerprint_prompts(prompts),
        "num_prompts": len(prompts),
        "limited_by": strengths.limited_by,
        "command": command,
        "table": table,
        "measured": measured,
    }
    planned = {each.name: getattr(plan, each.name) for each in fields(Calibration) if each.name not in own}
    return Calibration(**own, **planned)


def _round_interval(estimate: Estimate) -> Interval:
    low, value, high = (round(number, 4) + 0.0 for number in (estimate.low, estimate.value, estimate.high))
    return value, low, high


STRENGTHS = np.linspace(0, 1, 11)


def find_strengths(
    levels: Sequence[Level], max_ratio: float, reduce: bool = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP
) -> FoundStrengths:
    """Find strengths from levels in ascending order, of which the first is the unguided base model.

    Args:
        max_ratio: the largest perplexity, as a multiple of the unguided one; the upper end of its interval counts.
        reduce: whether the judge improves where its metric falls.
    """

    def gain(level: Level, other: Level) -> Estimate:
        """The improvement of a level on another one."""
        after, before = (other, level) if reduce else (level, other)
        return estimate_change(after.score, before.score, bootstrap)

    measured = []
    for level in levels:
        ratio = estimate_ratio(level.perplexity, levels[0].perplexity, bootstrap)
        score = estimate(level.score, bootstrap)
        measured.append(MeasuredLevel(level.place, score, gain(level, levels[0]), ratio, level.ends))
    outside = (n for n, level in enumerate(measured) if n > 0 and not level.ratio.high <= max_ratio)
    inside = next(outside, len(measured))  # the first levels whose perplexity ratio keeps the bound, with its interval
    last = _find_last(levels[:inside], gain)
    curve = np.array([[level.place, level.gain.value, level.ratio.value] for level in measured[: last + 1]])
    limit = "judge" if last < inside - 1 else "range"
    if limit == "range" and inside < len(levels):
        limit = "judge"
        if gain(levels[inside], levels[last]).low > 0:  # it would improve beyond the bound
            limit = "perplexity"
            curve = np.vstack([curve, _cut(measured[last], measured[inside], max_ratio)])
    if not any(level.gain.low > 0 for level in measured[: inside + (limit == "perplexity")]):
        raise DataError(_describe_flat(measured, inside, max_ratio), "use another judge, more prompts or other levels.")
    places, gains, ratios = _spread(curve)
    return FoundStrengths(places, measured[0].score.value + (-gains if reduce else gains), ratios, measured, limit)


def _find_last(levels: Sequence[Level], gain: Callable[[Level, Level], Estimate]) -> int:
    """Find the first level that improves, and that no later one improves on, by more than its interval; or else 0."""
    better = [n for n in range(1, len(levels)) if gain(levels[n], levels[0]).low > 0]
    best = (n for n in better if not any(gain(later, levels[n]).low > 0 for later in levels[n + 1 :]))
    return next(best, better[-1] if better else 0)


def _cut(inner: MeasuredLevel, outer: MeasuredLevel, max_ratio: float) -> Float[np.ndarray, " 3"]:
    """The place between two levels where the upper end of the ratio reaches its bound, with gain and ratio there."""
    inner_high = inner.ratio.high if inner.place > 0 else 1.0
    share = (max_ratio - inner_high) / (outer.ratio.high - inner_high)
    first, second = (np.array([level.place, level.gain.value, level.ratio.value]) for level in (inner, outer))
    return first + share * (second - first)


def _spread(curve: Float[np.ndarray, "l 3"]) -> Float[np.ndarray, "3 s"]:
    """Find the places at which equal shares of the improvement are reached, with gains and perplexity ratios there.

    The curve has a place, a gain and a ratio for each level.
    """
    from scipy.optimize import isotonic_regression  # not for the help of `radq calibrate`

    places, measured_gains, ratios = curve.T
    gains = isotonic_regression(measured_gains).x  # neighbours that fall get their mean
    gains = gains - gains[0]
    first = np.concatenate([[True], np.diff(gains) > 0])  # the smallest of the levels with equal gains
    wanted = STRENGTHS * gains[-1]
    spread = np.interp(wanted, gains[first], places[first])
    return np.stack([spread, wanted, np.interp(spread, places, ratios)])


def _describe_flat(measured: Sequence[MeasuredLevel], inside: int, max_ratio: float) -> str:
    if inside == 1 and len(measured) > 1:
        first = measured[1]
        return (
            f"the perplexity ratio at the smallest level, {first.place:g}, is {first.ratio.value:.2f} and may be "
            f"{first.ratio.high:.2f}, more than {max_ratio:g}, and the judge sees no improvement before."
        )
    best = max(measured[1:inside] or measured[1:], key=lambda level: level.gain.value)
    gain = best.gain
    return (
        f"no strength improves: the judge's largest gain is {gain.value:.3g} ({gain.low:.3g} to {gain.high:.3g}), "
        f"at the level {best.place:g}."
    )
