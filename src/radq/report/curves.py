"""Curves of results over β or a KL budget, and what they say: how guided texts differ from unguided ones.

    for curve in find_curves(run.results):  # of one class of prompts, by guide, candidates (top-k, top-p) and KL budget
        [step.estimate("avg_max") for step in curve.steps]
    describe_run(run)                       # [("base model", "gpt2-large"), ("judge", …), …]
    describe_changes(find_changes(run))     # one sentence for each guide, at one β

Cells that differ in their KL budget alone make one curve over the budget.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from radq.evaluation.estimates import TRUSTED_PROMPTS, Estimate, is_trusted
from radq.evaluation.metrics import ATTRIBUTE_METRICS, metric_and_judge
from radq.report.results import NAN, Result, Run, printable, unique
from radq.report.tables import Entry, Table, interval, metric_order, number, write_estimate
from radq.settings import exact
from radq.sources.embedded import EMBEDDED, HUB_NAME

BUDGET = "KL budget"  # the setting of a curve that runs over it
MAX_PERPLEXITY_RATIO = 1.5  # guided to unguided: each guide is shown at its strongest β that stays below
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class CurveStep:
    """One point of a curve: cells that differ in their seed alone."""

    label: str
    results: list[Result]

    def estimate(self, metric: str) -> Estimate:
        """Average a metric over seeds, and the ends of its intervals: rather too wide, as all have the same prompts."""
        return _average([result.metrics[metric] for result in self.results if metric in result.metrics])

    def change(self, metric: str) -> Estimate:
        """Average the change of a metric from the unguided base model over seeds."""
        return _average([result.changes[metric] for result in self.results if metric in result.changes])

    @property
    def title(self) -> str:
        """The label with the name of its number: "β = 20", "n=5", "ask=1" or "KL 0.1"; empty for the unguided base."""
        return self.label if not self.label or self.label.startswith(("KL", "n=", "ask=")) else f"β = {self.label}"


def _average(estimates: Sequence[Estimate]) -> Estimate:
    known = [estimate for estimate in estimates if isfinite(estimate.value)]
    if not known:
        return Estimate(NAN, NAN, NAN)
    value, low, high = (fmean(getattr(one, end) for one in known) for end in ("value", "low", "high"))
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Curve:
    """The cells of one guide with the same candidates, in the order of |β| or of the KL budget."""

    guide: str
    setting: str
    unguided: bool
    steps: list[CurveStep]
    reference: CurveStep | None  # the unguided cells with the same run and candidates

    @property
    def label(self) -> str:
        name = f"{self.guide} (unguided)" if self.unguided else self.guide
        return f"{name}, {self.setting}" if self.setting else name

    @property
    def shown(self) -> CurveStep:
        """The strongest step whose perplexity is low enough or unknown; the weakest step if there is none."""
        limit = NAN if self.reference is None else MAX_PERPLEXITY_RATIO * self.reference.estimate(PERPLEXITY).value
        affordable = [step for step in self.steps if not step.estimate(PERPLEXITY).value > limit]
        return affordable[-1] if affordable else self.steps[0]


def find_curves(results: Sequence[Result]) -> list[Curve]:
    """Group the results of one class of prompts into curves, in the order of the results.

    Where all cells with a KL budget of a guide and its candidates have a single β, their curve runs over the budget.
    """
    betas: dict[tuple[Any, ...], set[float | None]] = defaultdict(set)
    unguided: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.kl_budget is not None:
            betas[result.guide, result.top_k, result.top_p].add(result.beta)
        if result.unguided:
            unguided[result.run, result.top_k, result.top_p].append(result)
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        over_budget = len(betas[result.guide, result.top_k, result.top_p]) == 1
        groups[result.guide, _describe_setting(result, over_budget)].append(result)
    curves = []
    for (guide, setting), cells in groups.items():
        steps = _find_steps(cells, setting.endswith(BUDGET))
        first = steps[0].results[0]
        same = unguided[first.run, first.top_k, first.top_p]
        curves.append(Curve(guide, setting, first.unguided, steps, CurveStep("", same) if same else None))
    return curves


def _describe_setting(result: Result, over_budget: bool) -> str:
    parts = [
        None if result.top_k is None else f"k={result.top_k}",
        None if result.top_p is None else f"p={exact(result.top_p)}",
        None if result.kl_budget is None else BUDGET if over_budget else f"KL≤{exact(result.kl_budget)}",
    ]
    return ", ".join(part for part in parts if part is not None)


def _find_steps(results: Sequence[Result], over_budget: bool) -> list[CurveStep]:
    """Group results by the number in which they differ, the smallest first."""
    steps: dict[tuple[float, float, str], list[Result]] = defaultdict(list)
    for result in results:
        numbers = {"n=": result.best_of, "ask=": result.ask, "": result.beta}
        known = {"KL ": result.kl_budget or 0.0} if over_budget else numbers
        found = [(number, f"{name}{exact(number)}") for name, number in known.items() if number is not None]
        number, label = found[0] if found else (0.0, "")
        steps[abs(number), number, label].append(result)
    return [CurveStep(label, cells) for (_, _, label), cells in sorted(steps.items(), key=lambda step: step[0])]


# --- the models and prompts of a run ---


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Name the base model, the judges, the prompts and the guides; what the run folder does not hold is left out."""
    settings = run.settings
    perplexity = settings.get("perplexity")
    facts = {
        "base model": _describe_model(settings.get("base")),
        "judge": "; ".join(_describe_judges(settings.get("judges"))),
        "perplexity under": "the base model" if perplexity == "base" else _describe_model(perplexity),
        "prompts": _describe_prompts(run.results),
        "guides": ", ".join(unique(result.guide for result in run.results)),
    }
    return [(name, printable(text)) for name, text in facts.items() if text]


def name_group(group: str) -> str:
    """Name a class of prompts: "neutral" becomes "neutral prompts", and "prompts" stays as it is."""
    return group if "prompts" in group.lower() else f"{group} prompts"


def count_group(group: str, prompts: int | None) -> str:
    """Name a class of prompts with its size where it is known: "5 neutral prompts"."""
    return name_group(group) if prompts is None else f"{prompts} {name_group(group)}"


def split_groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each class of prompts, those of the class "all" first."""
    groups = sorted(unique(result.group for result in results), key=lambda group: group != "all")
    return {group: [result for result in results if result.group == group] for group in groups}


def _describe_model(name: Any) -> str:
    if name is None:
        return ""
    return f"{EMBEDDED} ({HUB_NAME.split('/')[-1]})" if name == EMBEDDED else str(name)


def _describe_judges(judges: Any) -> list[str]:
    """Describe the judges of a config.yaml, which may be damaged or come from another program."""
    if not isinstance(judges, dict):
        return []
    reads = {"continuation": ", reads continuations alone", "text": ", reads prompts and continuations"}
    return [
        f"{name} = {use.get('judge')}{reads.get(str(use.get('reads')), '')}"
        for name, use in judges.items()
        if isinstance(use, dict)
    ]


def _describe_prompts(results: Sequence[Result]) -> str:
    samples = {result.samples for result in results}
    (count,) = samples if len(samples) == 1 else (None,)
    groups = ", ".join(count_group(group, cells[-1].prompts) for group, cells in split_groups(results).items())
    return groups if count is None else f"{groups}, {count} sample{'' if count == 1 else 's'} of each"


# --- guided against unguided ---


@dataclass(frozen=True)
class Change:
    """A metric of a guide at one β, and of the unguided base model with the same prompts and candidates."""

    guide: str
    step: str  # such as "β = 20"
    group: str
    prompts: int | None
    metric: str
    unguided: float
    guided: float
    difference: Estimate


def find_changes(run: Run) -> list[Change]:
    """Compare each guide with the unguided base model, in the metrics of judges and perplexity, at the step shown."""
    changes: list[Change] = []
    for results in split_groups(run.results).values():
        curves = [curve for curve in find_curves(results) if not curve.unguided]
        settings = unique(curve.setting for curve in curves)
        for curve in curves:
            if curve.reference is not None:
                name = curve.label if len(settings) > 1 else curve.guide
                changes += _compare(name, curve.shown, curve.reference)
    return changes


def _compare(guide: str, step: CurveStep, unguided: CurveStep) -> list[Change]:
    keys = [key for key in step.results[0].metrics if metric_and_judge(key)[0] in (*ATTRIBUTE_METRICS, PERPLEXITY)]
    first = step.results[0]
    changes = []
    for key in sorted(keys, key=metric_order):
        before, after = unguided.estimate(key).value, step.estimate(key).value
        measured = step.change(key)
        difference = measured if isfinite(measured.value) else Estimate(after - before, NAN, NAN)
        if isfinite(difference.value):
            changes.append(Change(guide, step.title, first.group, first.prompts, key, before, after, difference))
    return changes


# --- tables and words ---


def change_table(changes: Sequence[Change]) -> Table:
    """Make a table with a row per guide, class of prompts and metric."""
    rows = []
    for change in changes:
        names = [change.guide, change.step, count_group(change.group, change.prompts), change.metric]
        numbers = [Entry(number(change.unguided)), Entry(number(change.guided))]
        rows.append([*map(Entry, names), *numbers, write_estimate(change.difference, "+")])
    return Table("", ["guide", "at", "prompts", "metric", "unguided", "guided", "difference"], rows, words=4)


def describe_changes(changes: Sequence[Change]) -> list[str]:
    """Say in a sentence how each guide changes the first metric of a judge, and what that costs in perplexity."""
    sentences: dict[tuple[str, str], str] = {}
    perplexities = {(change.guide, change.group): change for change in changes if change.metric == PERPLEXITY}
    for change in changes:
        place = (change.guide, change.group)
        if change.metric != PERPLEXITY and place not in sentences:
            sentences[place] = _describe_change(change, perplexities.get(place))
    return list(sentences.values())


def _describe_change(change: Change, perplexity: Change | None) -> str:
    guide = f"{change.guide} at {change.step}" if change.step else change.guide
    numbers = f"from {number(change.unguided)} (unguided) to {number(change.guided)}"
    where = f"on {count_group(change.group, change.prompts)}"
    cost = ""
    if perplexity is not None:
        cost = f", at {perplexity.guided / perplexity.unguided:.2f} times the unguided perplexity"
    doubt = change.difference.doubt(change.prompts)
    difference = f"{number(change.difference.value, '+')} {interval(change.difference, '+')}".strip()
    found = f"({difference}{f'; {doubt}' if doubt else ''})"
    if interval(change.difference) and doubt:
        return f"{guide} changes {change.metric} {numbers} {where}, but not clearly {found}{cost}."
    verb = "raises" if change.difference.value > 0 else "lowers" if change.difference.value < 0 else "does not change"
    return f"{guide} {verb} {change.metric} {numbers} {where} {found}{cost}."


def warn_of_few_prompts(run: Run) -> list[str]:
    """Say which classes of prompts are too small for their intervals."""
    sizes = {result.group: result.prompts for result in run.results if not is_trusted(result.prompts)}
    if not sizes:
        return []
    groups = ", ".join(count_group(group, size) for group, size in sizes.items())
    return [
        f"{groups}: intervals are percentiles over resampled prompts (the bootstrap), which are too narrow for so few. "
        f"Rely on them from {TRUSTED_PROMPTS} prompts on."
    ]
