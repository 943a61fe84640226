"""Comparisons of our guide with every other guide at equal perplexity, and at equal KL where it was measured, in words.

    comparisons = compare_with_others(run)
    describe_comparisons(comparisons)  # "At equal perplexity rad-q is better than dexperts in avg_max on all prompts."
    comparison_table(comparisons)      # with numbers

Ours is the first guide of the sweep. The better side of a metric is the one to which guides move it away from the
unguided base model. Where they move it to both sides, or to none that the intervals show, guides are called higher and
lower instead of better and worse.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from radq.evaluation.comparison import AXES
from radq.evaluation.estimates import Estimate, is_trusted
from radq.report.curves import find_curves, name_group, split_groups
from radq.report.results import ALIKE, BETTER, HIGHER, LOWER, WORSE, Comparison, Result, Run, unique
from radq.report.tables import Entry, Table, metric_keys, number, write_estimate

PHRASES = {word: f"is {word}" for word in (BETTER, WORSE, HIGHER, LOWER)} | {ALIKE: "cannot be told apart from"}


# --- finding ---


def find_ours(run: Run) -> str | None:
    """Find the first guide of the sweep; None in a run without guides."""
    return next((result.guide for result in run.results if not result.unguided), None)


def compare_with_others(run: Run) -> list[Comparison]:
    """Compare our guide with every other one that differences.jsonl has beside it, by metric and class of prompts."""
    ours = find_ours(run)
    if ours is None:
        return []
    pairs = [pair if pair.ours == ours else pair.turn() for pair in run.differences if ours in (pair.ours, pair.other)]
    groups = split_groups(run.results)
    sides = [find_better_side(groups.get(pair.group, []), pair.metric) for pair in pairs]
    compared = [replace(pair, better_side=side) for pair, side in zip(pairs, sides, strict=True)]
    metrics = unique([*metric_keys(run.results), *(pair.metric for pair in pairs)])
    places, axes = unique(["all", *(pair.place for pair in pairs)]), list(AXES)
    return sorted(compared, key=lambda c: (metrics.index(c.metric), axes.index(c.axis), places.index(c.place)))


def find_better_side(results: Sequence[Result], metric: str) -> int:
    """Find the side to which guides move a metric of one class of prompts: +1 or −1, and 0 for both or neither.

    A guide counts at the β at which the report shows it, if the interval of its change excludes 0.
    """
    sides = set()
    for curve in find_curves(results):
        if curve.reference is not None and not curve.unguided:
            guided, unguided = curve.shown.estimate(metric), curve.reference.estimate(metric)
            sides.add(_side(curve.shown.change(metric)) or _side(_widest(guided, unguided)))
    sides.discard(0)
    return sides.pop() if len(sides) == 1 else 0


def _side(change: Estimate) -> int:
    return 1 if change.low > 0 else -1 if change.high < 0 else 0


def _widest(guided: Estimate, unguided: Estimate) -> Estimate:
    """Compute a change with too wide an interval from two intervals, for runs without intervals of changes."""
    value = guided.value - unguided.value
    return Estimate(value, guided.low - unguided.high, guided.high - unguided.low)


def find_missing(run: Run) -> list[str]:
    """Name the guides that differences.jsonl does not compare with ours."""
    ours = find_ours(run)
    compared = [{pair.ours, pair.other} for pair in run.differences]
    others = unique(result.guide for result in run.results if not result.unguided and result.guide != ours)
    return [f"{ours} and {other}" for other in others if {ours, other} not in compared]


# --- words ---


def describe_comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    """Say for each run, class of prompts and axis how our guide stands in the first metric that has a value there."""
    sentences: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons:
        others = sentences.setdefault((comparison.run, comparison.place, comparison.axis), [])
        if comparison.is_known and (not others or others[0].metric == comparison.metric):
            others.append(comparison)
    return [_describe(others) for others in sentences.values() if others]


def _describe(comparisons: Sequence[Comparison]) -> str:
    first = comparisons[0]
    where = f"{first.metric} on {name_group(first.place)}"
    if not is_trusted(first.prompts):
        others = _join([each.other for each in comparisons])
        return f"{first.prompts} prompts are too few to compare {first.ours} with {others} in {where}."
    names = {word: [each.other for each in comparisons if each.word == word] for word in PHRASES}
    parts = [f"{phrase} {_join(names[word])}" for word, phrase in PHRASES.items() if names[word]]
    return f"At equal {first.axis_noun} {first.ours} {_join(parts, ', and it ')} in {where}."


def _join(names: Sequence[str], last: str = " and ") -> str:
    return last.join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def explain_better(comparisons: Sequence[Comparison]) -> list[str]:
    """Say for each metric which side counts as better, and why."""
    sides: dict[int, list[str]] = {}
    for comparison in comparisons:
        sides.setdefault(comparison.better_side, []).append(comparison.metric)
    reasons = {
        -1: "Less counts as better for {}: the guides lower it from the unguided base model's.",
        1: "More counts as better for {}: the guides raise it from the unguided base model's.",
        0: "Which side is better is not known for {}: the guides do not move it clearly to one side. They are called "
        "higher and lower.",
    }
    return [reasons[side].format(_join(unique(sides[side]))) for side in reasons if side in sides]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Make a table with a row per metric, class of prompts and other guide."""
    rows = []
    for each in comparisons:
        low, high = each.range
        ends = f"{number(low)} – {number(high)}" if isfinite(low) and isfinite(high) else ""
        words = map(Entry, (each.ours, each.verdict, each.metric, each.place))
        rows.append([*words, write_estimate(each.difference, "+"), Entry(f"{each.axis_noun} {ends}".strip())])
    return Table("", ["guide", "is", "in", "prompts", "difference", "at equal"], rows, words=4)
