"""Write docs/contest.md and its figures from the kept numbers of a contest.

    python recipes/study/contest_page.py recipes/study/measured/contest --out docs

The page says how our readout stands to each other method, in words that rules compute, and what was not run.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import tyro
from choices import RULE, TARGET
from kept import KeptCell
from markup import item, markdown_table, wrapped, write_figures
from methods import ASKED, BASE, BEST, METHODS, OURS, PLAIN_K, TRAININGS, Method
from places import SECOND_JUDGE, Gain, Place, find_gain, others, read_places

from radq.errors import RadqError
from radq.evaluation.comparison import AXES
from radq.evaluation.metrics import Bootstrap
from radq.files import whole_file
from radq.report.plots import Plot, plot_tradeoff
from radq.report.results import Result
from radq.report.tables import interval, number

RATIOS = (1.1, TARGET, 1.3)
DRAWN = (OURS, "12", "value", "gedi", "gedi-12", "dexperts", BEST)  # asked texts are too far to the right
MISSING = "not run"
UNLIKELY = "it is a mean over texts, which few very unlikely ones decide."


@dataclass
class Arguments:
    measured: tyro.conf.Positional[Path]
    """Folder of the contest, such as recipes/study/measured/contest."""
    out: Path = Path("docs")
    """Folder for contest.md and contest/."""
    resamples: int = 1000
    """Resamples of the prompts, for the intervals."""


def main(arguments: Arguments) -> None:
    places, bootstrap = read_places(arguments.measured), Bootstrap(arguments.resamples)
    plots = [plot for place in places if (plot := draw_place(place, bootstrap)) is not None]
    write_figures(arguments.out / "contest", plots)
    with whole_file(arguments.out / "contest.md") as temporary:
        temporary.write_text(write_page(arguments.measured, places, plots, bootstrap), encoding="utf-8")


def write_page(folder: Path, places: Sequence[Place], plots: Sequence[Plot], bootstrap: Bootstrap) -> str:
    parts = [
        "<!-- Written by recipes/study/contest_page.py from the kept numbers: change those, not this file. -->\n",
        "# The contest\n",
        wrapped(INTRODUCTION),
        "".join(item("-", _headline(places, METHODS[name], bootstrap)) for name in others()),
        *(f"![{plot.title}](contest/{plot.name}.svg)\n" for plot in plots),
        *(f"## {_title(place)}\n\n{_table(place)}" for place in places),
        f"## Second judges\n\n{_second_judges(folder, places, bootstrap)}",
        f"## Settings\n\n{wrapped(RULE)}",
        f"## Limits\n\n{_limits(places)}",
    ]
    return "\n".join(parts)


INTRODUCTION = (
    "How well do [readouts of values](distillation.md#values) steer SmolLM2-135M-Instruct, beside other methods that "
    "each have their best settings? 1,000 prompts of each kind, 25 samples of 20 tokens. Sentiment is the share of "
    "positive samples, toxicity the average over prompts of the most toxic sample. Differences are means over the "
    "perplexities, or KL(guided ‖ base), that both methods reach, positive where the readout is better. A 95% interval "
    "over prompts is computed for each training of the readout; the brackets span all of them, so that they hold what "
    "another training changes, too. [recipes/study](../recipes/study/README.md) has code and numbers."
)


def _title(place: Place) -> str:
    return f"{place.task.name.capitalize()}, {place.group} prompts"


# --- headlines ---


def _headline(places: Sequence[Place], method: Method, bootstrap: Bootstrap) -> str:
    """How our method stands to another one at equal perplexity and at equal KL, in one sentence."""
    parts = []
    for axis in AXES:
        found = [(place, find_gain(place, method.name, axis, place.task.metric, bootstrap)) for place in places]
        parts.append(f"at equal {AXES[axis].noun} {_standings(found)}")
    if all(part.endswith(f"{MISSING} anywhere") for part in parts):
        return f"**{method.title}**: {MISSING}."
    return f"**{method.title}**: {'; '.join(parts)}."


def _standings(found: Sequence[tuple[Place, Gain]]) -> str:
    """The places with their gains, those with the same word together."""
    words: dict[str, list[str]] = {}
    for place, gain in found:
        words.setdefault(gain.word, []).append(f"{place.group}{f' {_gain(gain)}' if not gain.reason else ''}")
    if list(words) == [MISSING]:
        return f"{MISSING} anywhere"
    return ", ".join(f"the readout is {_phrase(word)} ({', '.join(where)})" for word, where in words.items())


def _phrase(word: str) -> str:
    return {"cannot be told": "not told apart", MISSING: "not compared"}.get(word, word)


def _gain(gain: Gain) -> str:
    return f"{number(gain.estimate.value, '+')} {interval(gain.estimate, '+')}".strip()


# --- tables and figures ---


def _table(place: Place) -> str:
    """A row per method: attribute at several perplexities, the rest at the perplexity of comparison."""
    header = ["method", "settings", "layers", *(f"×{ratio:g}" for ratio in RATIOS), "KL", "Dist-2", "repeats", "MAUVE"]
    rows = [row for method in METHODS.values() for row in _method_rows(place, method)]
    left_out = [method.title for method in METHODS.values() if not place.guided(method.name) and method.name != BASE]
    missing = wrapped(f"Not run: {'; '.join(left_out)}.") if left_out else ""
    return (markdown_table(header, rows) if rows else "") + ("\n" if rows and missing else "") + missing


def _method_rows(place: Place, method: Method) -> list[list[str]]:
    if method.name in (BASE, ASKED, BEST):
        cells = place.cells[BASE] if method.name == BASE else place.guided(method.name)
        return [_cell_row(place, method, cell) for cell in cells if method.name != BASE or cell is place.base]
    if not place.cells[method.name]:
        return []
    attribute = [place.at_ratio(method.name, place.task.metric, ratio) for ratio in RATIOS]
    rest = [place.at_ratio(method.name, metric, TARGET) for metric in ("kl", "dist_2", "repetition")]
    layers = str(method.layers_read(place.settings(method.name).get("top_k", PLAIN_K)))
    return [[method.title, _settings(place, method), layers, *map(number, (*attribute, *rest)), _mauve(place, method)]]


def _cell_row(place: Place, method: Method, cell: KeptCell) -> list[str]:
    """The row of a cell without β: its attribute with its perplexity, in the place of a curve."""
    n, ask = cell.settings["best_of"], cell.settings["ask"]
    setting = f"n = {n}" if n else f"request {ask}" if ask else f"k = {PLAIN_K}"
    layers = str(((n or 1) - 1) * 30)
    attribute = f"{number(place.value(cell, place.task.metric))} at ×{place.ratio(cell):.3g}"
    rest = [number(place.value(cell, metric)) for metric in ("kl", "dist_2", "repetition")]
    mauve = place.mauve.get((method.name, cell.name))
    return [method.title, setting, layers, attribute, "", "", *rest, "–" if mauve is None else f"{mauve:.2f}"]


def _settings(place: Place, method: Method) -> str:
    chosen = place.settings(method.name)
    parts = [f"k = {chosen['top_k']}"] if "top_k" in chosen else []
    parts += [f"p = {chosen['top_p']:g}"] if chosen.get("top_p") else []
    parts += [f"filter {chosen['filter_p']:g}"] if chosen.get("filter_p") is not None else []
    rates = {name: "5e-5" if name.endswith("-5e-5") else "2e-5" for name in method.models}
    return ", ".join([*parts, f"rate {rates[chosen['model']]}"] if len(rates) > 1 and parts else parts)


def _mauve(place: Place, method: Method) -> str:
    cell = place.nearest(method.name)
    value = None if cell is None else place.mauve.get((method.name, cell.name))
    return "–" if value is None else f"{value:.2f}"


def draw_place(place: Place, bootstrap: Bootstrap) -> Plot | None:
    """The attribute against perplexity and KL; None where too little was run."""
    if place.base is None:
        return None
    cells = [("none", place.base), *((name, cell) for name in DRAWN for cell in place.guided(name))]
    results = [_result(place, name, cell, bootstrap) for name, cell in cells]
    return plot_tradeoff(f"{place.task.name}-{place.group}", place.group, results, lambda *_: [])


def _result(place: Place, name: str, cell: KeptCell, bootstrap: Bootstrap) -> Result:
    """A cell for the plot. Candidates are left out, so that all curves share one unguided base model."""
    metrics = {key: place.estimate(cell, key, bootstrap) for key in (place.task.metric, "perplexity", "kl")}
    guide = name if name == "none" else METHODS[name].title
    beta, best_of = cell.settings["beta"], cell.settings["best_of"]
    nothing = {"top_k": None, "top_p": None, "kl_budget": None, "seed": 0, "cost": {}}
    kind = {"guide": guide, "unguided": name == "none", "beta": beta, "best_of": best_of}
    return Result(run="contest", cell=cell.name, group=place.group, metrics=metrics, **kind, **nothing)


# --- second judges and limits ---


def _second_judges(folder: Path, places: Sequence[Place], bootstrap: Bootstrap) -> str:
    """The readout against each other method by judges of other families."""
    header = ["the readout against", *(f"{place.group}, {AXES[axis].noun}" for place in places for axis in AXES)]
    rows = []
    for name in others():
        gains = [find_gain(p, name, axis, SECOND_JUDGE[p.task.name], bootstrap) for p in places for axis in AXES]
        if any(not gain.reason for gain in gains):
            rows.append([METHODS[name].title, *("–" if gain.reason else _gain(gain) for gain in gains)])
    text = (
        "The same differences by other judges: sentiment by a logistic regression on MiniLM's sentence embeddings"
        f"{_quality(folder)}, which read one sample of each prompt; toxicity by a BERT of two layers."
    )
    return f"{wrapped(text)}\n{markdown_table(header, rows) if rows else 'Not run.'}" + ("" if rows else "\n")


def _quality(folder: Path) -> str:
    file = folder / "second" / "judge.json"
    if not file.exists():
        return ""
    return f" (AUC {json.loads(file.read_text())['metrics']['auc']:.3f} on unseen reviews)"


def _limits(places: Sequence[Place]) -> str:
    trained = [METHODS[name].title for name in TRAININGS if any(place.cells[name] for place in places)]
    asked = [place.ratio(cell) for place in places for cell in place.guided(ASKED)]
    far = max((ratio for ratio in asked if isfinite(ratio)), default=0.0)
    points = [
        f"Our readout was trained {len(trained)} times; baselines once at each learning rate. All trainings use the "
        "settings that were chosen for the first one."
        if trained
        else "Our readout was not run.",
        f"Best of n and asking have no settings chosen on dev: k = {PLAIN_K}. The readout is compared with the best n "
        "and the better request, at that point alone; the KL of the best of n is an upper bound.",
        *([f"Asked texts have up to {far:,.0f} times the unguided perplexity: {UNLIKELY}"] if far > 10 else []),
        "Layers are those that a token costs beside the 30 of the base model: each of k candidates is read by RAD-V.",
        "MAUVE compares one sample of each prompt with another seed of the unguided base model, by MiniLM, at the "
        f"tested β nearest to ×{TARGET:g}; the row of the unguided base model shows what chance leaves.",
        "Judges err, and guidance may exploit their errors. Settings were chosen by the first judge, on other prompts.",
        "About one 95% interval in twenty misses; nothing corrects for the number of comparisons.",
    ]
    return "".join(item("-", point) for point in points)


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except RadqError as error:
        sys.exit(f"error: {error}")
