"""The sections of the results, one per claim: figure, differences at equal perplexity, points. Markdown."""

from collections.abc import Iterable, Sequence
from math import isfinite

import numpy as np
from claims import (
    COMPARISONS,
    EXPRESSIVITY,
    FOLLOWS,
    LOSS,
    MATCHES,
    ON_RESPONSES,
    RANK,
    REGULARISER,
    RIVALS,
    TASKS,
    TIME,
    Claim,
    Comparison,
    anchor,
    signed,
    time_ratio,
)
from figures import ranks_of_all, tradeoff_name
from protocol import NOT_RUN, markdown_table
from study import MeasuredSweep, Study
from verdicts import MARGIN, SLIGHT

from radq.evaluation.curves import ATTRIBUTES, Curve, find_curves
from radq.evaluation.metrics import Estimate
from radq.evaluation.plots import Plot
from radq.evaluation.results import NAN, Result, metric_and_judge
from radq.evaluation.tables import Entry, Table, interval, number, to_markdown

RATIOS = (1.1, 1.2, 1.3, 1.5, 2.0)
PLAIN = ("perplexity", "dist_2", "dist_3", "mauve")


def write_sections(study: Study, claims: Sequence[Claim], plots: dict[str, Plot]) -> str:
    bodies = {
        FOLLOWS: _tradeoffs(study, "detox", plots, FOLLOWS),
        MATCHES: _tradeoffs(study, "sentiment", plots, MATCHES),
        ON_RESPONSES: f"The curves are those above: [detoxification]({anchor(FOLLOWS)}), [sentiment]({anchor(MATCHES)}).\n\n"
        + _differences(study, ON_RESPONSES),
        RIVALS: f"The curves are those above: [detoxification]({anchor(FOLLOWS)}), [sentiment]({anchor(MATCHES)}).\n\n"
        + _differences(study, RIVALS),
        RANK: _ranks(study, plots),
        REGULARISER: _ablation(study, plots, "ablation-regulariser", REGULARISER),
        LOSS: _ablation(study, plots, "ablation-loss-head", LOSS) + _ablation_points(study),
        EXPRESSIVITY: _expressivity(study),
        TIME: _times(study, plots),
    }
    return "\n".join(f"## {heading}\n\n{_verdicts(claims, heading)}{body}" for heading, body in bodies.items())


def image(plots: dict[str, Plot], name: str) -> str:
    return f"![{plots[name].title}](results/{name}.svg)\n\n" if name in plots else ""


def _verdicts(claims: Sequence[Claim], heading: str) -> str:
    found = [claim for claim in claims if claim.section == heading]
    return "".join(f"- {claim.text} ({claim.subject}): **{claim.verdict}**\n" for claim in found) + "\n"


# --- trade-offs ---


def _tradeoffs(study: Study, name: str, plots: dict[str, Plot], heading: str) -> str:
    sweep = study.sweeps.get(name)
    if sweep is None:
        return NOT_RUN
    figures = [f"**{group} prompts**\n\n{image(plots, tradeoff_name(name, group))}" for group in sweep.groups]
    points = [_folded(f"All points, {group} prompts", _points(sweep, group)) for group in sweep.groups]
    return "".join([*figures, _differences(study, heading), _levels(sweep, name), *points])


def _differences(study: Study, heading: str) -> str:
    comparisons = [one for one in COMPARISONS if one.section == heading]
    rows = [row for comparison in comparisons for row in _difference_rows(study, comparison)]
    if not rows:
        return NOT_RUN
    header = ["guides", "prompts", "metric", "k", "difference at equal perplexity", "perplexities", "verdict"]
    return markdown_table(header, rows, words=3) + "\n"


def _difference_rows(study: Study, comparison: Comparison) -> Iterable[list[str]]:
    sweep = study.sweeps.get(comparison.sweep)
    for one in sweep.compare(comparison.first, comparison.second) if sweep is not None else ():
        metric = f"**`{one.metric}`**" if one.metric == comparison.task.attribute else f"`{one.metric}`"
        common = " – ".join(map(number, one.perplexity)) if isfinite(one.perplexity[0]) else one.reason or "–"
        verdict = str(comparison.judge(one))
        yield [f"{one.first} − {one.second}", one.group, metric, str(one.top_k), signed(one.estimate), common, verdict]


def _levels(sweep: MeasuredSweep, name: str) -> str:
    """The attribute where a curve crosses some perplexities, by straight lines over log perplexity."""
    attribute = TASKS[name].attribute
    better = "less" if TASKS[name].sign < 0 else "more"
    rows = []
    for group in sweep.groups:
        for top_k in sweep.top_ks:
            here = [result for result in sweep.results if (result.group, result.top_k) == (group, top_k)]
            rows += [[group, str(top_k), *_level_row(sweep, curve, attribute)] for curve in find_curves(here)]
    header = ["prompts", "k", "guide", "unguided", *(f"× {ratio:g}" for ratio in RATIOS)]
    return (
        f"`{attribute}` ({better} is better) at so many times the perplexity of the unguided base, read off the curves of the "
        f"figure; a dash where a curve does not reach.\n\n{markdown_table(header, rows, words=3)}\n"
    )


def _level_row(sweep: MeasuredSweep, curve: Curve, attribute: str) -> list[str]:
    if curve.unguided:
        return ["*none*", number(curve.steps[0].estimate(attribute).value), *("–" for _ in RATIOS)]
    points = [(sweep.perplexity_ratio(s.results[0]), s.estimate(attribute).value) for s in curve.steps]
    known = sorted((ratio, value) for ratio, value in points if isfinite(ratio) and isfinite(value))
    if not known:
        return [curve.guide, "–", *("–" for _ in RATIOS)]
    x, y = np.array(known).T
    levels = np.interp(np.log(RATIOS), np.log(x), y, left=NAN, right=NAN)
    return [curve.guide, "–", *(number(float(level)) for level in levels)]


def _points(sweep: MeasuredSweep, group: str) -> str:
    results = [result for result in sweep.results if result.group == group]
    keys = list(dict.fromkeys(key for result in results for key in result.metrics))
    attributes = [key for key in keys if metric_and_judge(key)[0] in ATTRIBUTES]
    plain = [key for key in PLAIN if key in keys]
    header = ["guide", "k", "β", *attributes, *plain, "perplexity ratio"]
    rows = [
        [
            Entry(result.guide),
            *(Entry("–" if value is None else f"{value:g}") for value in (result.top_k, result.beta)),
            *(_entry(result, key) for key in (*attributes, *plain)),
            Entry(number(sweep.perplexity_ratio(result))),
        ]
        for result in results
    ]
    return to_markdown(Table("", header, rows))


def _entry(result: Result, key: str) -> Entry:
    estimate = result.metrics.get(key, Estimate(NAN, NAN, NAN))
    return Entry(number(estimate.value), interval(estimate))


def _folded(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{body}\n</details>\n\n"


# --- ablations ---


def _ablation(study: Study, plots: dict[str, Plot], name: str, heading: str) -> str:
    return NOT_RUN if "ablations" not in study.sweeps else image(plots, name) + _differences(study, heading)


def _ablation_points(study: Study) -> str:
    sweep = study.sweeps.get("ablations")
    if sweep is None:
        return ""
    tables = [
        _folded(f"All points of both ablations, {group} prompts", _points(sweep, group)) for group in sweep.groups
    ]
    return "".join(tables)


# --- rank and expressivity ---


def _ranks(study: Study, plots: dict[str, Plot]) -> str:
    if not study.ranks:
        return NOT_RUN
    sizes = ranks_of_all(study, list(study.ranks))
    rows = []
    for name, document in study.ranks.items():
        ranks = {row["num_rows"]: row["rank"] for row in document["ranks"]}
        rows.append([name, str(document["hidden_size"]), document["dtype"], *(str(ranks.get(n, "–")) for n in sizes)])
    text = (
        "N prefixes are drawn from the training data; the rank counts the singular values of their rewards of the whole vocabulary "
        "above max(N, |V|) · eps · σ_1 ([how](rank.md#numerical-rank-of-a-trained-model)). RAD-Q cannot exceed d (unless σ comes after it, "
        "as with cross-entropy), so that only RAD-V could have shown a rank above it. One trained model each: there is no interval.\n\n"
    )
    return (
        image(plots, "rank") + text + markdown_table(["model", "d", "dtype", *(f"N = {n}" for n in sizes)], rows) + "\n"
    )


def _expressivity(study: Study) -> str:
    errors = ", ".join(f"RAD-{kind.upper()} {error:.2g}" for kind, error in study.expressivity.items())
    here = f"Mean squared error: {errors}.\n\n" if errors else NOT_RUN + "\n"
    return (
        f"{here}The experiment is `recipes/expressivity.py`; what it does, and numbers of an earlier run, are in "
        "[docs/rank.md](rank.md#theory-as-tests).\n\n"
    )


# --- time ---


def _times(study: Study, plots: dict[str, Plot]) -> str:
    if study.timing is None or not study.timing["rows"]:
        return NOT_RUN
    rows = study.timing["rows"]
    table = []
    for row in sorted(rows, key=lambda row: (row["batch"], row["guide"], row["k"] or 0)):
        time = Estimate(row["milliseconds_per_token"], row.get("low", NAN), row.get("high", NAN))
        base = [other for other in rows if other["guide"] == "none" and other["batch"] == row["batch"]]
        base = [other for other in base if other["k"] in (row["k"], None)]
        ratio = number(time_ratio(row, base[0]).value) if base else "–"
        k = "–" if row["k"] is None else str(row["k"])
        table.append([row["guide"], str(row["batch"]), k, f"{number(time.value)} {interval(time)}".strip(), ratio])
    facts = f"{study.timing.get('machine', 'machine not named')}; base {study.timing.get('base', 'not named')}.\n\n"
    header = ["guide", "batch", "k", "milliseconds per token", "over unguided"]
    note = "The ratio of RAD-V's time to RAD-Q's in the verdicts has an interval from the ends of both, which is rather too wide.\n\n"
    return image(plots, "time") + facts + note + markdown_table(header, table) + "\n"


# --- limits ---


def write_limits(study: Study, claims: Sequence[Claim]) -> str:
    missing = [f"{claim.text} ({claim.subject})" for claim in claims if claim.verdict == "not run"]
    judges = [f"{name}: {_judge_quality(one['metrics'])}" for name, one in study.judges.items() if one.get("metrics")]
    points = [
        "Intervals are over prompts. Each model was trained once, so how much another seed of training would change is not in them.",
        "At 95%, about one interval in twenty misses; there are many here, and nothing corrects for that.",
        f"The margins ({MARGIN} for no difference, {SLIGHT} for a slight one) are choices made for this page. The paper has none.",
        "Judges are models and make mistakes, and a guide may come to exploit them. "
        + (f"On records that they did not see: {'; '.join(judges)}." if judges else "Their quality was not recorded."),
        "Perplexity says how likely a text is, not how good; it rewards repetition. Dist-2, Dist-3 and, where measured, MAUVE stand beside it.",
        "A difference at equal perplexity is the mean over the range that both guides reach, which is another one for each pair.",
        "Base and reward models here are much smaller than the paper's, and data and judges are others: a claim that does not hold here may hold there, "
        "and the other way round.",
        *([f"Not run: {'; '.join(missing)}."] if missing else []),
    ]
    return "## Limits\n\n" + "".join(f"- {point}\n" for point in points)


def _judge_quality(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
