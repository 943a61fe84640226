"""The sections of the results, one per claim: figure, differences at equal perplexity, points. Markdown."""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import isfinite
from statistics import fmean

import numpy as np
from claims import (
    ABLATIONS,
    COMPARISONS,
    DEXPERTS,
    DISTILLED,
    EXPRESSIVITY,
    FOLLOWS,
    GEDI,
    LOSS,
    MATCHES,
    ON_RESPONSES,
    RANK,
    REGULARISER,
    RIVALS,
    TASKS,
    TIME,
    TRADE_OFF,
    Claim,
    Comparison,
    Task,
    anchor,
    ranks_by_rows,
    signed,
)
from figures import ablation_name, tradeoff_name
from protocol import NOT_RUN, markdown_table
from study import Difference, MeasuredSweep, Study
from verdicts import MARGIN, MISSING, SLIGHT, combine

from radq.evaluation.metrics import ATTRIBUTE_METRICS, Estimate
from radq.report.plots import Plot
from radq.report.results import NAN, Curve, Result, find_curves, metric_and_judge, unique
from radq.report.tables import Entry, Table, interval, number, to_markdown

RATIOS = {
    "perplexity": (1.1, 1.2, 1.3, 1.5),
    "dist_2": (0.98, 0.95, 0.9, 0.87, 0.85),
    "mauve": (0.95, 0.9, 0.8, 0.7, 0.6),
}
PLAIN = ("perplexity", "dist_2", "dist_3", "mauve")


def write_sections(study: Study, claims: Sequence[Claim], plots: dict[str, Plot]) -> str:
    above = f"The curves are in [{FOLLOWS}]({anchor(FOLLOWS)}) and [{MATCHES}]({anchor(MATCHES)}).\n\n"
    bodies = {
        FOLLOWS: _tradeoffs(study, "detox", plots, FOLLOWS),
        MATCHES: _tradeoffs(study, "sentiment", plots, MATCHES),
        ON_RESPONSES: above + _differences(study, ON_RESPONSES),
        RIVALS: above + _differences(study, RIVALS) + _as_varied(study),
        RANK: _ranks(study, plots),
        REGULARISER: _ablation(study, plots, REGULARISER),
        LOSS: _ablation(study, plots, LOSS),
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
    sweep = sweep.of_guides(TRADE_OFF)
    figures = [f"**{group} prompts**\n\n{image(plots, tradeoff_name(name, group))}" for group in sweep.groups]
    text = (
        f"{_in_words(TASKS[name])} at so many times the perplexity of the unguided base with the same k, read off the "
        "curves of the figures; a dash where a curve does not reach.\n\n"
    )
    levels = text + _levels(sweep, TASKS[name], "perplexity")
    return "".join([*figures, _differences(study, heading), levels, _all_points(sweep)])


def _as_varied(study: Study) -> str:
    """RAD-Q and its rivals by other measures of what guidance costs."""
    text = (
        "Perplexity does not see that texts become alike: a guide that leaves the base few tokens to choose from can "
        "keep it low. So the same points again, where Dist-2 or MAUVE is so many times that of the unguided base; read "
        "off straight lines between points, without intervals.\n\n"
    )
    tables = [
        f"{_in_words(TASKS[name])} at equal `{metric}`; {_levels(beside, TASKS[name], metric)}"
        for name, sweep in study.sweeps.items()
        for beside in [sweep.beside(DISTILLED, (DEXPERTS, GEDI))]
        for metric in ("dist_2", "mauve")
        if any(metric in result.metrics for result in beside.results)
    ]
    return text + "".join(tables) if tables else ""


def _in_words(task: Task) -> str:
    return f"`{task.attribute}` ({'less' if task.sign < 0 else 'more'} is better)"


def _differences(study: Study, heading: str) -> str:
    """A line per pair of guides, class of prompts and metric; below each difference the perplexities it is about."""
    comparisons = [one for one in COMPARISONS if one.section == heading and one.sweep in study.sweeps]
    top_ks = sorted({k for one in comparisons for k in study.sweeps[one.sweep].top_ks}, key=lambda k: k or 0)
    rows = [row for one in comparisons for row in _difference_rows(study.sweeps[one.sweep], one, top_ks)]
    if not rows:
        return NOT_RUN + "\n"
    return (
        markdown_table(["guides", "prompts", "metric", *(f"k = {k}" for k in top_ks), "verdict"], rows, words=9) + "\n"
    )


def _difference_rows(sweep: MeasuredSweep, comparison: Comparison, top_ks: Sequence[int | None]) -> Iterator[list[str]]:
    pairs = sweep.compare(comparison.first, comparison.second)
    main = comparison.task.attribute
    metrics = sorted(dict.fromkeys(pair.metric for pair in pairs), key=lambda metric: metric != main)
    for group, metric in product(sweep.groups, metrics):
        here = [pair for pair in pairs if (pair.group, pair.metric) == (group, metric)]
        cells = ["<br>".join(_difference(pair) for pair in here if pair.top_k == k) or "–" for k in top_ks]
        verdict = combine([comparison.judge(pair) for pair in here])
        shown = f"**`{metric}`**" if metric == main else f"`{metric}`"
        yield [f"{comparison.first} − {comparison.second}", group, shown, *cells, verdict]


def _difference(pair: Difference) -> str:
    if not isfinite(pair.estimate.value):
        return pair.reason or "–"
    return f"{signed(pair.estimate)}<br>at {number(pair.perplexity[0])} to {number(pair.perplexity[1])}"


def _levels(sweep: MeasuredSweep, task: Task, metric: str) -> str:
    """The attribute where a curve crosses some values of a metric, by straight lines over its logarithm."""
    return "".join(_level_table(sweep, task, group, metric) for group in sweep.groups)


def _level_table(sweep: MeasuredSweep, task: Task, group: str, metric: str) -> str:
    found = find_curves([result for result in sweep.results if result.group == group])
    curves = {(curve.guide, curve.setting): curve for curve in found if not curve.unguided}
    guides, settings = unique(guide for guide, _ in curves), unique(setting for _, setting in curves)
    rows = []
    for guide in guides:
        levels = (_cross(sweep, curves.get((guide, setting)), task.attribute, metric) for setting in settings)
        rows.append([guide, *chain.from_iterable(levels)])
    header = ["guide", *(f"{setting}, × {ratio:g}" for setting, ratio in product(settings, RATIOS[metric]))]
    bases = [(curve.setting, curve.steps[0].estimate(task.attribute)) for curve in found if curve.unguided]
    unguided = ", ".join(f"{number(base.value)} {interval(base)} ({setting})" for setting, base in bases)
    return f"{group} prompts; unguided {unguided}:\n\n{markdown_table(header, rows)}\n"


def _cross(sweep: MeasuredSweep, curve: Curve | None, attribute: str, metric: str) -> list[str]:
    steps = [] if curve is None else curve.steps
    points = [
        (fmean(sweep.ratio(result, metric) for result in step.results), step.estimate(attribute).value)
        for step in steps
    ]
    known = sorted((ratio, value) for ratio, value in points if isfinite(ratio) and isfinite(value))
    if not known:
        return ["–"] * len(RATIOS[metric])
    ratios, values = np.array(known).T
    levels = np.interp(np.log(RATIOS[metric]), np.log(ratios), values, left=NAN, right=NAN)
    return [number(float(level)) for level in levels]


def _all_points(sweep: MeasuredSweep) -> str:
    return "".join(_folded(f"All points, {group} prompts", _points(sweep, group)) for group in sweep.groups)


def _points(sweep: MeasuredSweep, group: str) -> str:
    results = [result for result in sweep.results if result.group == group]
    keys = list(dict.fromkeys(key for result in results for key in result.metrics))
    attributes = [key for key in keys if metric_and_judge(key)[0] in ATTRIBUTE_METRICS]
    plain = [key for key in PLAIN if key in keys]
    header = ["guide", "k", "β", *attributes, *plain, "perplexity ratio"]
    rows = [
        [
            Entry(result.guide),
            *(Entry("–" if value is None else f"{value:g}") for value in (result.top_k, result.beta)),
            *(_entry(result, key) for key in (*attributes, *plain)),
            Entry(number(sweep.ratio(result, "perplexity"))),
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


def _ablation(study: Study, plots: dict[str, Plot], heading: str) -> str:
    guide, *changes = ABLATIONS[heading]
    sweep = study.sweeps["detox"].beside(guide, changes) if "detox" in study.sweeps else None
    if sweep is None or not sweep.results:
        return NOT_RUN
    return image(plots, ablation_name(heading)) + _differences(study, heading) + _all_points(sweep)


# --- rank and expressivity ---


def _ranks(study: Study, plots: dict[str, Plot]) -> str:
    if not study.ranks:
        return NOT_RUN
    sizes = sorted({n for document in study.ranks.values() for n in ranks_by_rows(document)})
    rows = []
    for name, document in study.ranks.items():
        ranks = ranks_by_rows(document)
        rows.append([name, str(document["hidden_size"]), document["dtype"], *(str(ranks.get(n, "–")) for n in sizes)])
    text = (
        "N prefixes are drawn from the data; the rank counts the singular values of their rewards of the whole "
        "vocabulary above max(N, |V|) · eps · σ_1 ([how](rank.md#numerical-rank-of-a-trained-model)). A linear RAD-Q "
        "has rank d at most by construction: of the two, only RAD-V could have more. One trained model each, so there "
        "is no interval.\n\n"
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
    if study.timing is None:
        return NOT_RUN
    rows = sorted(study.timing.rows, key=lambda row: (row.batch, row.guide, row.k or 0))
    table = []
    for row in rows:
        bases = [o for o in rows if o.guide == "none" and o.batch == row.batch and o.k in (row.k, None)]
        ratio = number(row.milliseconds.value / bases[0].milliseconds.value) if bases else "–"
        k = "–" if row.k is None else str(row.k)
        time = f"{number(row.milliseconds.value)} {interval(row.milliseconds)}".strip()
        table.append([row.guide, str(row.batch), k, time, ratio])
    text = (
        f"Machine: {study.timing.machine}; base: {study.timing.base}. The interval of RAD-V's time over RAD-Q's comes "
        "from the ends of both intervals: rather too wide than too narrow.\n\n"
    )
    header = ["guide", "batch", "k", "milliseconds per token", "over unguided"]
    return image(plots, "time") + text + markdown_table(header, table) + "\n"


# --- limits ---


def write_limits(study: Study, claims: Sequence[Claim]) -> str:
    missing = [f"{claim.text} ({claim.subject})" for claim in claims if claim.verdict == MISSING]
    judges = [f"{name}: {_judge_quality(one['metrics'])}" for name, one in study.judges.items() if one.get("metrics")]
    quality = f"On records that they did not see: {'; '.join(judges)}." if judges else "Their quality was not recorded."
    points = [
        "Intervals are over prompts. Each model was trained once: what another seed of training would change is not in "
        "them.",
        "At 95%, about one interval in twenty misses. There are many here, and nothing corrects for that.",
        f"The margins ({MARGIN} for no difference, {SLIGHT} for a slight one) are chosen here; the paper has none.",
        f"Judges are models: they err, and guidance may come to exploit their errors. {quality}",
        "Perplexity says how likely a text is, not how good: repetition lowers it. Dist-2, Dist-3 and, where measured, "
        "MAUVE stand beside it in the tables of all points.",
        "A difference at equal perplexity is a mean over the perplexities that both reach; each pair has its own.",
        "Base, reward models and data are smaller than the paper's, and judges are others. What does not hold here may "
        "hold there, and the other way round.",
        *([f"Not run: {'; '.join(missing)}."] if missing else []),
    ]
    return "## Limits\n\n" + "".join(f"- {point}\n" for point in points)


def _judge_quality(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
