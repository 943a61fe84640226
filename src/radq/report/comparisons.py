"""Comparisons of our guide with every other guide at equal perplexity, and at equal KL where it was measured, in words.

    comparisons = compare_with_others(run)
    describe_comparisons(comparisons)  # "At equal perplexity rad-q is better than dexperts in avg_max on all prompts."
    comparison_table(comparisons)      # with numbers

Ours is the first guide of the sweep. The better side of a metric is the one to which guides move it away from the
unguided base model. Where they move it to both sides, or to none that the intervals show, guides are called higher and
lower instead of better and worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from radq.evaluation.comparison import AXES
from radq.evaluation.estimates import Estimate
from radq.report.curves import find_curves, find_unguided
from radq.report.results import GuideDifference, Result, Run, unique
from radq.report.summary import choose_step, find_doubt, is_trusted, name_group, order_groups
from radq.report.tables import Entry, Table, interval, metric_keys, number

BETTER, WORSE, HIGHER, LOWER = "better than", "worse than", "higher than", "lower than"
ALIKE, UNKNOWN = "not told apart from", "not compared with"
PHRASES = {word: f"is {word}" for word in (BETTER, WORSE, HIGHER, LOWER)} | {ALIKE: "cannot be told apart from"}


@dataclass(frozen=True)
class Comparison:
    """A metric of our guide minus that of another one, at equal perplexity or at equal KL."""

    run: str
    ours: str
    other: str
    metric: str
    place: str  # the class of prompts, with candidates and seed where a run has several
    difference: Estimate
    range: tuple[float, float]  # of perplexity or KL, reached by both guides
    prompts: int | None
    better_side: int  # +1 where more of the metric is better, −1 where less is, 0 where that is not known
    reason: str  # why the guides cannot be compared, where they cannot
    axis: str = "perplexity"  # or "kl"

    @property
    def axis_noun(self) -> str:
        return AXES[self.axis].noun

    @property
    def is_known(self) -> bool:
        return isfinite(self.difference.value)

    @property
    def doubt(self) -> str:
        """The reason why the difference decides nothing; empty where it decides."""
        return find_doubt(self.difference, self.prompts)

    @property
    def word(self) -> str:
        """The words that say how our guide stands to the other one."""
        if not self.is_known:
            return UNKNOWN
        if self.doubt:
            return ALIKE
        side = 1 if self.difference.low > 0 else -1
        if not self.better_side:
            return HIGHER if side > 0 else LOWER
        return BETTER if side == self.better_side else WORSE

    @property
    def verdict(self) -> str:
        """The words with the other guide's name, and the reason where nothing was decided."""
        why = self.doubt if self.is_known else self.reason or "the run gives no reason"
        return f"{self.word} {self.other}{f': {why}' if why else ''}"


# --- finding ---


def find_ours(run: Run) -> str | None:
    """Find the first guide of the sweep; None in a run without guides."""
    return next((result.guide for result in run.results if not result.unguided), None)


def compare_with_others(run: Run) -> list[Comparison]:
    """Compare our guide with every other one that differences.jsonl has beside it, by metric and class of prompts."""
    ours = find_ours(run)
    if ours is None:
        return []
    found = [_compare(run, ours, pair) for pair in run.differences if ours in (pair.first, pair.second)]
    metrics = unique([*metric_keys(run.results), *(one.metric for one in found)])
    places = order_groups(unique(one.place for one in found))
    axes = list(AXES)
    return sorted(found, key=lambda one: (metrics.index(one.metric), axes.index(one.axis), places.index(one.place)))


def _compare(run: Run, ours: str, pair: GuideDifference) -> Comparison:
    turned = ours == pair.second
    difference = Estimate(-pair.value, -pair.high, -pair.low) if turned else Estimate(pair.value, pair.low, pair.high)
    return Comparison(
        run=run.name,
        ours=ours,
        other=pair.first if turned else pair.second,
        metric=pair.metric,
        place=pair.group + pair.setting,
        difference=difference,
        range=pair.range,
        prompts=pair.prompts,
        better_side=find_better_side([result for result in run.results if result.group == pair.group], pair.metric),
        reason=pair.reason,
        axis=pair.axis,
    )


def find_better_side(results: Sequence[Result], metric: str) -> int:
    """Find the side to which guides move a metric of one class of prompts: +1 or −1, and 0 for both or neither.

    A guide counts at the β at which the report shows it, if the interval of its change excludes 0.
    """
    sides = set()
    for curve in find_curves(results):
        unguided = None if curve.unguided else find_unguided(results, curve)
        if unguided is not None:
            step = choose_step(curve, unguided)
            sides.add(_side(step.change(metric)) or _side(_widest(step.estimate(metric), unguided.estimate(metric))))
    sides.discard(0)
    return sides.pop() if len(sides) == 1 else 0


def _side(change: Estimate) -> int:
    return 1 if change.low > 0 else -1 if change.high < 0 else 0


def _widest(guided: Estimate, unguided: Estimate) -> Estimate:
    """Compute a change from the ends of two intervals, for runs without intervals of changes.

    The interval of the result is too wide rather than too narrow.
    """
    value = guided.value - unguided.value
    return Estimate(value, guided.low - unguided.high, guided.high - unguided.low)


def find_missing(run: Run) -> list[str]:
    """Name the guides that differences.jsonl does not compare with ours."""
    ours = find_ours(run)
    compared = [{pair.first, pair.second} for pair in run.differences]
    others = unique(result.guide for result in run.results if not result.unguided and result.guide != ours)
    return [f"{ours} and {other}" for other in others if {ours, other} not in compared]


# --- words ---


def describe_comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    """Say how our guide stands, in a sentence for each run, class of prompts and axis.

    The sentence is about the first metric that has a value there.
    """
    found: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in comparisons:
        here = found.setdefault((one.run, one.place, one.axis), [])
        if one.is_known and (not here or here[0].metric == one.metric):
            here.append(one)
    return [_describe(here) for here in found.values() if here]


def _describe(comparisons: Sequence[Comparison]) -> str:
    first = comparisons[0]
    where = f"{first.metric} on {name_group(first.place)}"
    if not is_trusted(first.prompts):
        others = _join([one.other for one in comparisons])
        return f"{first.prompts} prompts are too few to compare {first.ours} with {others} in {where}."
    names = {word: [one.other for one in comparisons if one.word == word] for word in PHRASES}
    parts = [f"{phrase} {_join(names[word])}" for word, phrase in PHRASES.items() if names[word]]
    return f"At equal {first.axis_noun} {first.ours} {_join(parts, ', and it ')} in {where}."


def _join(names: Sequence[str], last: str = " and ") -> str:
    return last.join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def explain_better(comparisons: Sequence[Comparison]) -> list[str]:
    """Say for each metric which side counts as better, and why."""
    sides: dict[int, list[str]] = {}
    for one in comparisons:
        sides.setdefault(one.better_side, []).append(one.metric)
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
    for one in comparisons:
        low, high = one.range
        ends = f"{number(low)} – {number(high)}" if isfinite(low) and isfinite(high) else ""
        common = f"{one.axis_noun} {ends}".strip()
        difference = Entry(number(one.difference.value, "+"), interval(one.difference, "+"))
        rows.append([*map(Entry, (one.ours, one.verdict, one.metric, one.place)), difference, Entry(common)])
    return Table("", ["guide", "is", "in", "prompts", "difference", "at equal"], rows, words=4)
