"""The figures of the results, in the style of radq's reports."""

from typing import Any

from claims import ABLATIONS, TASKS, TRADE_OFF, anchor, ranks_by_rows
from study import Study, Timed

from radq.report.plots import (
    COLOURS,
    INK,
    LINES,
    MARKERS,
    Plot,
    error_bars,
    make_figure,
    plot_by_candidates,
    plot_style,
    render,
)


def draw_all(study: Study) -> dict[str, Plot]:
    """By name; what was not run has none."""
    plots = [*_tradeoffs(study), *_ablations(study), _ranks(study), _times(study)]
    return {plot.name: plot for plot in plots if plot is not None}


def tradeoff_name(sweep: str, group: str) -> str:
    return f"{sweep}-{''.join(c if c.isalnum() else '-' for c in group.lower())}"


def ablation_name(heading: str) -> str:
    return f"ablation-{anchor(heading)[1:]}"


def _tradeoffs(study: Study) -> list[Plot | None]:
    plots = []
    for name, sweep in study.sweeps.items():
        for group in sweep.groups:
            results = [result for result in sweep.of_guides(TRADE_OFF).results if result.group == group]
            title = f"{TASKS[name].name}, {group} prompts: attribute against perplexity"
            plots.append(plot_by_candidates(tradeoff_name(name, group), title, results, TASKS[name].attribute))
    return plots


def _ablations(study: Study) -> list[Plot | None]:
    plots = []
    for heading, (guide, *changes) in ABLATIONS.items() if "detox" in study.sweeps else ():
        results = study.sweeps["detox"].beside(guide, changes).results
        title = f"{', '.join([guide, *changes])}: toxicity against perplexity"
        plots.append(plot_by_candidates(ablation_name(heading), title, results, TASKS["detox"].attribute))
    return plots


def _ranks(study: Study) -> Plot | None:
    """Rank against the number of prefixes, a panel per task, with the line at d that no linear RAD-Q crosses."""
    models = sorted(
        {name.partition("-")[2] for name in study.ranks}, key=lambda model: (model not in "vq", model != "v", model)
    )
    tasks = [task for task in ("toxicity", "sentiment") if any(name.startswith(f"{task}-") for name in study.ranks)]
    if not tasks:
        return None
    with plot_style("rank"):
        figure = make_figure()
        figure.set_size_inches(9.8, 3.6)
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            found = {model: study.ranks[f"{task}-{model}"] for model in models if f"{task}-{model}" in study.ranks}
            for model, document in found.items():
                ranks = ranks_by_rows(document)
                axes.plot(ranks.keys(), ranks.values(), **_look(models.index(model)), label=_rank_label(model))
            for d in sorted({document["hidden_size"] for document in found.values()}):
                axes.axhline(d, color=INK, ls="--", lw=1, label=f"d = {d}")
            _over_doublings(axes, sorted({n for document in found.values() for n in ranks_by_rows(document)}))
            axes.set(xlabel="prefixes N (rows)", ylabel="numerical rank", ylim=(0, None))
            axes.set_title(task, loc="left")
            axes.legend()
        return render(figure, "rank", "Numerical rank against the number of prefixes")


def _rank_label(model: str) -> str:
    """q-no-regulariser → RAD-Q, no regulariser"""
    kind, _, rest = model.partition("-")
    return ", ".join(part for part in (f"RAD-{kind.upper()}", rest.replace("-", " ")) if part)


def _times(study: Study) -> Plot | None:
    if study.timing is None:
        return None
    rows = study.timing.rows
    batches = sorted({row.batch for row in rows})
    with plot_style("time"):
        figure = make_figure()
        figure.set_size_inches(9.8, 3.6)
        for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
            for place, guide in enumerate(("rad-v", "rad-q", "none")):
                _draw_times(axes, guide, [row for row in rows if (row.guide, row.batch) == (guide, batch)], place)
            _over_doublings(axes, sorted({row.k for row in rows if row.k is not None}))
            axes.set(xlabel="candidates k", ylabel="milliseconds per token", ylim=(0, None))
            axes.set_title(f"batch of {batch}", loc="left")
            axes.legend()
        return render(figure, "time", "Time per token against the number of candidates")


def _draw_times(axes: Any, guide: str, rows: list[Timed], place: int) -> None:
    label = "unguided" if guide == "none" else guide
    curve = sorted(((row.k, row.milliseconds) for row in rows if row.k is not None), key=lambda point: point[0])
    for row in rows:
        if row.k is None:
            axes.axhline(row.milliseconds.value, color=INK, ls=":", lw=1.2, label=label)
    if curve:
        times = [time for _, time in curve]
        look = _look(place) | ({"color": INK, "ls": ":"} if guide == "none" else {})
        bars = {"yerr": error_bars(times), "capsize": 2}
        axes.errorbar([k for k, _ in curve], [time.value for time in times], **bars, **look, label=label)


def _look(place: int) -> dict[str, Any]:
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    return {"color": colour, "marker": marker, "ls": LINES[place // len(COLOURS) % len(LINES)], "lw": 1.7, "ms": 5}


def _over_doublings(axes: Any, values: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
