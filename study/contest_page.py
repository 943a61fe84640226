"""Write docs/contest.md and its figures from the kept numbers of a contest.

    python study/contest_page.py study/measured/contest --out docs

The page says how our readout stands to each other method, in words that rules compute, and what was not run.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import tyro
from contest import (
    ASKED,
    BASE,
    BEST,
    FILTERS,
    METHODS,
    NUM_BETAS,
    OURS,
    PLAIN_K,
    RUNS,
    SPAN,
    TARGET,
    TASKS,
    TOP_K,
    TOP_P,
    TRAININGS,
    Method,
    Task,
    choice_file,
)
from kept import (
    COST_ROWS,
    COSTS,
    KEPT_TEXTS,
    NOT_RUN,
    OTHER_PAIRS,
    OTHER_PERPLEXITY,
    READOUT_PAIRS,
    SECOND_JUDGE,
    Gain,
    KeptCell,
    Pair,
    Place,
    find_gain,
    read_places,
)
from models import RATES, SMOLLM2, BaseModel
from page import item, markdown_table, wrapped, write_page

from radq.errors import RadqError
from radq.evaluation.comparison import AXES
from radq.evaluation.estimates import Bootstrap, estimate
from radq.report.plots import Plot, plot_tradeoff
from radq.report.results import NAN, Result
from radq.report.tables import number

RATIOS = (1.1, TARGET, 1.3)
# Methods in the figures; asked texts are too far to the right.
DRAWN = (OURS, "rad-q", "classifier", "readout-gedi", "gedi", "gedi-small", "dexperts", BEST)
REST = {"kl": "KL", "dist_2": "Dist-2", "repetition": "repeats", "ended": "ended", "length": "tokens"}
EXPERTS = ("dexperts", "gedi", "gedi-small")  # methods whose models are trained at several learning rates
UNLIKELY = "it is a mean over texts, which few very unlikely ones decide."
TIMES = (
    f"Time is that of a token as a multiple of no guide, with k = {PLAIN_K} and {COST_ROWS} texts at once, on {{}}; "
    f"`{COSTS}` has quartiles and commands."
)
ONCE = "Between other methods, each trained once, brackets are intervals over prompts alone:"
SHIPPED = "has learnt from more, and [lowers it further](../src/radq/assets/toxicity/README.md)"


def main(measured: tyro.conf.Positional[Path], out: Path = Path("docs"), resamples: int = 1000) -> None:
    """Write contest.md and contest/, or the page of another base model and its figures.

    Args:
        measured: folder of the contest, such as study/measured/contest.
        out: folder of the page.
        resamples: resamples of the prompts, for the intervals.
    """
    places, bootstrap = read_places(measured), Bootstrap(resamples)
    plots = [plot for place in places if (plot := draw_place(place, bootstrap)) is not None]
    write_page(out, places[0].base_model.page, compose(measured, places, plots, bootstrap), plots)


def compose(folder: Path, places: Sequence[Place], plots: Sequence[Plot], bootstrap: Bootstrap) -> str:
    base = places[0].base_model
    parts = [
        "<!-- Written by study/contest_page.py from the kept numbers: change those, not this file. -->\n",
        "# The contest\n" if base == SMOLLM2 else f"# The contest with {base.title}\n",
        wrapped(f"{_introduction(base)} {_brackets(places)}"),
        _headlines(places, READOUT_PAIRS, bootstrap),
        *([f"{wrapped(ONCE)}\n{others}"] if (others := _headlines(places, OTHER_PAIRS, bootstrap)) else []),
        wrapped(" ".join(filter(None, (_closeness(places), _left_out(places))))),
        *(f"![{plot.title}]({base.page}/{plot.name}.svg)\n" for plot in plots),
        *(f"## {task.name.capitalize()}\n\n{_table(_of_task(places, task))}" for task in TASKS.values()),
        f"## Second judges\n\n{_second_judges(folder, places, bootstrap)}",
        *([f"## Another perplexity\n\n{other}"] if (other := _other_perplexity(places, bootstrap)) else []),
        f"## Settings\n\n{wrapped(_settings_tried(folder, base))}",
        f"## Limits\n\n{_limits(folder, places)}",
    ]
    return "\n".join(parts)


def _introduction(base: BaseModel) -> str:
    return (
        f"How well do [readouts of values](distillation.md#values) steer {base.title}, beside other methods that each "
        f"have their best settings? {base.prompts:,} prompts of each task, 25 samples of 20 tokens. Sentiment is the "
        "share of positive samples, toxicity the average over prompts of the most toxic sample. Gains of the readout "
        "are in points of 0.01, averaged over the perplexities, or KL(guided ‖ base), that both methods reach. "
        "[study](../study/README.md) has code and numbers. All methods that are trained learn from the "
        "same labels" + (f"; the toxicity model that radq ships {SHIPPED}." if base == SMOLLM2 else ".")
    )


def _brackets(places: Sequence[Place]) -> str:
    """What the brackets behind gains are."""
    often = _how_often(places)
    if "twice" in often:
        return (
            "Brackets span the 95% intervals over prompts of all trainings of the readout, so that they hold what "
            f"another training of the student changes, too; it was trained {often}."
        )
    return "Brackets are 95% intervals over prompts; every model was trained once."


def _how_often(places: Sequence[Place]) -> str:
    """How often our method was trained, such as "once" or "once in sentiment and twice in toxicity"; empty if never."""
    tested = {name: sum(_was_run(_of_task(places, task), ours) for ours in TRAININGS) for name, task in TASKS.items()}
    times = {task: {1: "once", 2: "twice"}[number] for task, number in tested.items() if number}
    if len(set(times.values())) <= 1:
        return next(iter(times.values()), "")
    return " and ".join(f"{often} in {task}" for task, often in times.items())


def _of_task(places: Sequence[Place], task: Task) -> list[Place]:
    return [place for place in places if place.task is task]


def _was_run(places: Sequence[Place], method: str) -> bool:
    return any(place.cells[method] for place in places)


def _left_out(places: Sequence[Place]) -> str:
    """A sentence about methods that were not run, in a task or at all; empty if there are none."""
    wanted = [name for name in METHODS if places[0].base_model.takes_part(name)]
    nowhere = [METHODS[name].title for name in wanted if not _was_run(places, name)]
    partly = {
        task.name: [
            METHODS[name].title
            for name in METHODS
            if _was_run(places, name) and not _was_run(_of_task(places, task), name)
        ]
        for task in TASKS.values()
    }
    parts = [f"Not run: {'; '.join(nowhere)}."] if nowhere else []
    parts += [f"Not run in {task}: {'; '.join(titles)}." for task, titles in partly.items() if titles]
    return " ".join(parts)


def _closeness(places: Sequence[Place]) -> str:
    """A sentence about MAUVE of our method and of others with a curve; empty where it was not computed."""
    curves = [name for name in METHODS if METHODS[name].has_curve and name not in TRAININGS]
    places = [place for place in places if _mauve(place, METHODS[OURS]) != "–"]
    values = {name: [_mauve(place, METHODS[name]) for place in places] for name in (OURS, *curves)}
    known = {name: ", ".join(found) for name, found in values.items() if "–" not in found}
    if not places or len(known) == 1:
        return ""
    theirs = ", ".join(f"{METHODS[name].title} {found}" for name, found in known.items() if name != OURS)
    return (
        f"MAUVE says how close texts are to unguided ones; near ×{TARGET:g} it is {known.pop(OURS)} for the readout "
        f"({', '.join(place.group for place in places)}), and for others: {theirs}."
    )


def _settings_tried(folder: Path, base: BaseModel) -> str:
    """What dev prompts chose from."""
    filters = f"; GeDi also filters of {', '.join(f'{p:g}' for p in FILTERS)}" if base.takes_part("gedi") else ""
    return (
        f"On 200 other prompts of each kind, every method tried k = {', '.join(map(str, TOP_K))}, each without p and "
        f"with {TOP_P[-1]}{filters}. {_rates_tried(folder)}The best attribute at {TARGET} times the unguided "
        f"perplexity at k = {PLAIN_K} decided, and {NUM_BETAS} values of β from about {SPAN[0]} to {SPAN[1]} times "
        "were tested. The temperature is 1. `choices/` has the rule and all numbers."
    )


def _rates_tried(folder: Path) -> str:
    """A sentence about the learning rates of experts, and which methods tried more of them; empty if none were."""
    tried: dict[str, set[str]] = {}  # by method and task: the ends of models' names
    for task, method in RUNS:
        file = folder / choice_file(task, method)
        if method.name in EXPERTS and file.exists():
            models = {one["model"] for one in json.loads(file.read_text())["candidates"]}
            tried[f"{method.title} in {task.name}"] = {model.removeprefix(method.name) for model in models}
    common = set.intersection(*tried.values()) if tried else set()
    more = [
        f"{_rate(end)} was tried for {' and '.join(which)}"
        for end in RATES
        if (which := [name for name, ends in tried.items() if end in ends - common])
    ]
    rates = " and ".join(_rate(end) for end in RATES if end in common)
    return f"{'; '.join([f'Experts were trained with a learning rate of {rates}', *more])}. " if rates else ""


def _rate(end: str) -> str:
    """The learning rate of models whose names have an end."""
    return f"{RATES[end]:.0e}".replace("e-0", "e-")


# --- headlines ---


def _headlines(places: Sequence[Place], pairs: Sequence[Pair], bootstrap: Bootstrap) -> str:
    """A point for each pair of methods that were run."""
    run = [p for p in pairs if _was_run(places, p.other) and any(_was_run(places, ours) for ours in p.trainings)]
    return "".join(item("-", _headline(places, pair, bootstrap)) for pair in run)


def _headline(places: Sequence[Place], pair: Pair, bootstrap: Bootstrap) -> str:
    """How a method of ours stands to another one at equal perplexity and at equal KL, in one sentence."""
    found = {
        AXES[axis].noun: [(p, find_gain(p, pair, axis, p.task.metric, bootstrap)) for p in places] for axis in AXES
    }
    known = {noun: [(p, gain) for p, gain in gains if not gain.reason] for noun, gains in found.items()}
    parts = [f"{_standings(gains)} at equal {noun}" for noun, gains in known.items() if gains]
    apart = {noun: [p.group for p, gain in gains if gain.reason not in ("", NOT_RUN)] for noun, gains in found.items()}
    remarks = [f" They never have the same {noun} ({', '.join(where)})." for noun, where in apart.items() if where]
    verdict = f"is {', and '.join(parts)}" if parts else "cannot be compared"
    return f"Against **{METHODS[pair.other].title}** {pair.ours} {verdict}.{''.join(remarks)}"


def _standings(found: Sequence[tuple[Place, Gain]]) -> str:
    """The places with their gains, those with the same word together."""
    words: dict[str, list[str]] = {}
    for place, gain in found:
        words.setdefault(gain.word, []).append(f"{place.group} {_gain(gain)}")
    return ", ".join(f"{word} ({', '.join(where)})" for word, where in words.items())


def _gain(gain: Gain) -> str:
    """A gain in points."""
    numbers = (100 * getattr(gain.estimate, name) for name in ("value", "low", "high"))
    value, low, high = (f"{one:+.1f}".replace("-", "−") for one in numbers)
    return f"{value} [{low}, {high}]"


# --- tables and figures ---


def _table(places: Sequence[Place]) -> str:
    """A row per method: attribute at several perplexities, the rest at the perplexity of comparison."""
    first = places[0]
    cost = ["layers", *(["time"] if first.costs else [])]
    bases = [place.base for place in places if place.base is not None]
    rest = [metric for metric in REST if all(metric in base.sums for base in bases)]  # older runs do not know ends
    titles = [*(f"×{ratio:g}" for ratio in RATIOS), *(REST[metric] for metric in rest), "MAUVE"]
    header = ["method", "settings", *cost, *titles]
    rows = [_row(places, method, rest) for method in METHODS.values() if first.cells[method.name]]
    groups = " / ".join(place.group for place in places)
    text = f"On {groups} prompts; {first.task.name} at multiples of the unguided perplexity, the rest at ×{TARGET}."
    return "\n".join([wrapped(text), markdown_table(header, rows)]) if rows else "Not run.\n"


def _row(places: Sequence[Place], method: Method, rest: Sequence[str]) -> list[str]:
    make = _curve_row if method.has_curve else _cell_row
    rows = [make(place, method, rest) for place in places]
    return [method.title, *(" / ".join(dict.fromkeys(same)) for same in zip(*rows, strict=True))]


def _curve_row(place: Place, method: Method, metrics: Sequence[str]) -> list[str]:
    attribute = [place.at_ratio(method.name, place.task.metric, ratio) for ratio in RATIOS]
    rest = [place.at_ratio(method.name, metric, TARGET) for metric in metrics]
    base, chosen = place.base_model, place.chosen[method.name]
    layers = method.layers_read(chosen.get("top_k", PLAIN_K), base.layers, base.first_layers)
    cost = [str(layers), *_time(place, method)]
    return [_settings(chosen, method), *cost, *map(number, (*attribute, *rest)), _mauve(place, method)]


def _cell_row(place: Place, method: Method, metrics: Sequence[str]) -> list[str]:
    """The row of a method without β: the attribute of its best cell, with its perplexity, in the place of a curve."""
    cell = place.shown(method.name)
    assert cell is not None
    n, ask = cell.settings["best_of"], cell.settings["ask"]
    setting = f"n = {n}" if n else f"request {ask}" if ask else f"k = {PLAIN_K}"
    attribute = f"{number(cell.value(place.task.metric))} at ×{place.ratio(cell):.3g}"
    rest = [number(cell.value(metric)) for metric in metrics]
    cost = [str(((n or 1) - 1) * place.base_model.layers), *_time(place, method)]
    return [setting, *cost, attribute, "", "", *rest, _mauve(place, method)]


def _time(place: Place, method: Method) -> list[str]:
    """The time per token as a multiple of no guide, or a dash; no cell if it was measured for no method."""
    costs = place.costs and {**place.costs, BASE: 1.0}
    return [f"{costs[method.name]:.2f}" if method.name in costs else "–"] if costs else []


def _settings(chosen: Mapping[str, Any], method: Method) -> str:
    parts = [f"k = {chosen['top_k']}"] if "top_k" in chosen else []
    parts += [f"p = {chosen['top_p']:g}"] if chosen.get("top_p") else []
    parts += [f"filter {chosen['filter_p']:g}"] if chosen.get("filter_p") is not None else []
    if len(method.models) > 1 and parts:
        parts.append(f"rate {_rate(next(end for end in reversed(RATES) if chosen['model'].endswith(end)))}")
    return ", ".join(parts)


def _mauve(place: Place, method: Method) -> str:
    cell = place.shown(method.name)
    value = None if cell is None else place.mauve.get((method.name, cell.name))
    return "–" if value is None else f"{value:.2f}"


def draw_place(place: Place, bootstrap: Bootstrap) -> Plot | None:
    """The attribute against perplexity and KL; None where too little was run."""
    guided = [(name, cell) for name in DRAWN for cell in place.guided(name)]
    if place.base is None or not guided:
        return None
    cells = [("none", place.base), *guided]
    results = [_result(place, name, cell, bootstrap) for name, cell in cells]
    plot = plot_tradeoff(f"{place.task.name}-{place.group}", place.group, results, lambda *_: [])
    title = f"{place.task.name.capitalize()} on {place.group} prompts against perplexity and KL"
    return None if plot is None else replace(plot, title=title)


def _result(place: Place, name: str, cell: KeptCell, bootstrap: Bootstrap) -> Result:
    """A cell for the plot. Candidates are left out, so that all curves share one unguided base model."""
    keys = (place.task.metric, "perplexity", "kl")
    metrics = {key: estimate(cell.sums[key], bootstrap) for key in keys}
    guide = name if name == "none" else METHODS[name].title
    beta, best_of = cell.settings["beta"], cell.settings["best_of"]
    nothing = {"top_k": None, "top_p": None, "kl_budget": None, "seed": 0, "cost": {}}
    kind = {"guide": guide, "unguided": name == "none", "beta": beta, "best_of": best_of}
    return Result(run="contest", cell=cell.name, group=place.group, metrics=metrics, **kind, **nothing)


# --- second judges and limits ---


def _second_judges(folder: Path, places: Sequence[Place], bootstrap: Bootstrap) -> str:
    """All pairs of methods by judges of other families."""
    table = _gains_table(places, lambda p, pair: find_gain(p, pair, "perplexity", SECOND_JUDGE[p.task.name], bootstrap))
    file = folder / "second" / "judge.json"
    auc = json.loads(file.read_text())["metrics"]["auc"] if file.exists() else NAN
    text = (
        "The gains at equal perplexity by other judges: sentiment by a logistic regression on MiniLM's sentence "
        f"embeddings{f' (AUC {auc:.3f} on unseen reviews)' if isfinite(auc) else ''}, which reads texts of at most "
        f"{KEPT_TEXTS} prompts of each kind; toxicity by a BERT of two layers."
    )
    return f"{wrapped(text)}\n{table}" if table else "Not run.\n"


def _other_perplexity(places: Sequence[Place], bootstrap: Bootstrap) -> str:
    """All pairs of methods at equal perplexity under another language model; empty if not measured."""
    table = _gains_table(
        places, lambda p, pair: find_gain(p, pair, "perplexity", p.task.metric, bootstrap, OTHER_PERPLEXITY)
    )
    text = (
        "The gains at equal perplexity under TinyLlama-1.1B-Chat, which shares neither weights nor tokenizer with the "
        f"base model: that of all tokens after at most {KEPT_TEXTS} prompts of each kind."
    )
    return f"{wrapped(text)}\n{table}" if table else ""


def _gains_table(places: Sequence[Place], find: Callable[[Place, Pair], Gain]) -> str:
    """A row per pair of methods that can be compared in some place; empty if there are none."""
    rows = []
    for pair in (*READOUT_PAIRS, *OTHER_PAIRS):
        gains = [find(place, pair) for place in places]
        if any(not gain.reason for gain in gains):
            gained = ["–" if gain.reason else _gain(gain) for gain in gains]
            rows.append([pair.ours, METHODS[pair.other].title, *gained])
    return markdown_table(["gain of", "over", *(place.group for place in places)], rows) if rows else ""


def _limits(folder: Path, places: Sequence[Place]) -> str:
    asked = [place.ratio(cell) for place in places for cell in place.guided(ASKED)]
    far = max((ratio for ratio in asked if isfinite(ratio)), default=0.0)
    base, costs = places[0].base_model, folder / COSTS
    candidates = "; RAD-V reads each of k candidates" if base.takes_part("classifier") else ""
    without_choice = (
        f"Best of n (by the readout) and asking chose no settings: k = {PLAIN_K}. The readout is compared with the "
        "best n and the better request, at that point alone; the KL of the best of n is an upper bound."
        if base.takes_part(BEST)
        else f"Asking chose no settings: k = {PLAIN_K}. The readout is compared with the better request, at that point "
        "alone."
    )
    points = [
        f"Our readout was trained {often}, baselines once at each learning rate. All trainings of the readout use the "
        "settings that were chosen for the first one."
        if (often := _how_often(places))
        else "Our readout was not run.",
        without_choice,
        *([f"Asked texts have up to {far:,.0f} times the unguided perplexity: {UNLIKELY}"] if far > 10 else []),
        f"Layers are those that a token costs beside the base model's {base.layers}{candidates}.",
        *([TIMES.format(json.loads(costs.read_text())["machine"])] if costs.exists() else []),
        f"MAUVE compares texts of at most {KEPT_TEXTS} prompts with another seed of the unguided base model, by "
        f"MiniLM, at the tested β nearest to ×{TARGET:g}; the row of the unguided base model shows what chance leaves.",
        "Judges err, and guidance may exploit their errors. Settings were chosen by the first judge, on other prompts.",
        *_judged_anew(places),
        "About one 95% interval in twenty misses; nothing corrects for the number of comparisons.",
    ]
    return "".join(item("-", point) for point in points)


def _judged_anew(places: Sequence[Place]) -> list[str]:
    """How far runs differ where they should not; empty if they do not."""
    spreads = {name: max(p.unguided_spread() for p in _of_task(places, task)) for name, task in TASKS.items()}
    differing = [f"{100 * spread:.1f} points in {name}" for name, spread in spreads.items() if spread >= 0.0005]
    text = (
        "Methods were tested in several runs, each with judges that were trained anew. Scores of the same settings of "
        f"the unguided base model differ between runs by up to {' and '.join(differing)}."
    )
    return [text] if differing else []


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except RadqError as error:
        sys.exit(f"error: {error}")
