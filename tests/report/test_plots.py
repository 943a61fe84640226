"""Plots: every guide can be told, whatever it is called and whatever was measured of it."""

import re
from itertools import combinations
from math import dist, isnan

from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import NAMES, Page, make_result, svg_texts

from radq.evaluation.estimates import Estimate
from radq.report.plots import COLOURS, INK, PublishedCurve, choose_colour, plot_by_candidates, plot_tradeoff
from radq.report.results import NAN, Result

VALUES = st.floats(0.001, 0.999) | st.just(NAN)


@given(st.lists(NAMES, min_size=1, max_size=9, unique=True), st.data())
@settings(max_examples=3, deadline=None)
def test_every_guide_is_in_the_plot(guides: list[str], data: st.DataObject) -> None:
    results = []
    for guide in guides:
        for beta in (1.0, 2.0):
            numbers = [data.draw(VALUES) for _ in range(6)]
            attribute, fluency = Estimate(*numbers[:3]), Estimate(*(100 * n for n in numbers[3:]))
            results.append(make_result(guide=guide, beta=beta, metrics={"avg_max": attribute, "perplexity": fluency}))
    plot = plot_tradeoff("tradeoff-all", "all", results, lambda attribute, fluency: [])
    if plot is None:
        assert all(isnan(r.metrics["avg_max"].value) for r in results) or all(
            isnan(r.metrics["perplexity"].value) for r in results
        )
    else:
        texts = Page(plot.inline).texts
        assert all(any(text.startswith(f"{guide}, k=20") for text in texts) for guide in guides)


def test_names_are_left_as_they_are() -> None:
    name = 'id="x" url(#a) href="#b" #1f2329 xmlns="y" <svg>'
    known = {"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(12.0, NAN, NAN)}
    plot = plot_tradeoff("name", "all", [make_result(guide=name, metrics=known)], lambda attribute, fluency: [])
    assert plot is not None
    assert f"{name}, k=20" in Page(plot.inline).texts


def test_perplexity_is_a_multiple_of_the_unguided_one() -> None:
    """Of the unguided cells with the same candidates, on a logarithmic axis."""

    def cell(perplexity: float, **fields: object) -> Result:
        known = {"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(perplexity, NAN, NAN)}
        return make_result(metrics=known, **fields)

    unguided = [cell(p, guide="none", unguided=True, beta=None, top_k=k) for p, k in ((10.0, 20), (20.0, 40))]
    points = [(15.0, 1.0, 20), (25.0, 2.0, 20), (30.0, 1.0, 40), (50.0, 2.0, 40)]
    guided = [cell(perplexity, beta=beta, top_k=k) for perplexity, beta, k in points]
    plot = plot_tradeoff("name", "all", [*unguided, *guided], lambda attribute, fluency: [])
    assert plot is not None
    texts = Page(plot.svg).texts
    assert {"1×", "1.2×", "1.5×", "2×", "2.5×"} <= set(texts)
    assert "perplexity (← more fluent), times the unguided base model's" in texts
    assert not {"20", "30", "50"} & set(texts)
    curves = re.findall(r'<path d="(M [^"]*)" clip-path="[^"]*" style="fill: none;[^"]*#0072b2; [^"]*1.7', plot.svg)
    assert len(curves) == 2
    assert len(set(curves)) == 1  # k=20 and k=40 have the same multiples
    alone = plot_tradeoff("name", "all", guided, lambda attribute, fluency: [])
    assert alone is not None
    assert "perplexity (← more fluent)" in Page(alone.svg).texts


def test_numbers_at_points_do_not_cover_each_other() -> None:
    """Of points at one place the first has its number; others have theirs."""
    places = {1.25: 10.0, 2.25: 10.001, 3.25: 10.002, 44.5: 18.0}
    results = [
        make_result(beta=beta, metrics={"avg_max": Estimate(0.2, NAN, NAN), "perplexity": Estimate(p, NAN, NAN)})
        for beta, p in places.items()
    ]
    plot = plot_tradeoff("name", "all", results, lambda attribute, fluency: [])
    assert plot is not None
    texts = set(Page(plot.svg).texts)
    assert {"1.25", "44.5"} <= texts
    assert not {"2.25", "3.25"} & texts


def test_the_paper_s_curves_keep_the_perplexity_itself() -> None:
    curve = PublishedCurve("RAD-V", 20, "GPT-2-Large", "Perspective", ((10.0, 12.0, 0.3), (50.0, 40.0, 0.2)))
    known = {"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(15.0, NAN, NAN)}
    results = [make_result(metrics=known), make_result(guide="none", unguided=True, beta=None, metrics=known)]
    plot = plot_tradeoff("name", "all", results, lambda attribute, fluency: [curve])
    assert plot is not None
    assert "perplexity (← more fluent)" in Page(plot.svg).texts


def test_twelve_guides_have_colours_of_their_own() -> None:
    """Any two are as far apart in red, green and blue as the two nearest of Okabe and Ito's palette, or nearly."""
    colours = [tuple(int(colour[n : n + 2], 16) for n in (1, 3, 5)) for colour in COLOURS]
    assert len(COLOURS) == 12
    assert min(dist(one, other) for one, other in combinations(colours, 2)) > 60
    guides = [f"guide {n}" for n in range(12)]
    assert [choose_colour(guide, guides) for guide in guides] == list(COLOURS)


def test_wide_ranges_of_perplexity_are_logarithmic() -> None:
    results = [
        make_result(beta=beta, metrics={"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(beta, NAN, NAN)})
        for beta in (12.0, 900.0)
    ]
    plot = plot_tradeoff("name", "all", results, lambda attribute, fluency: [])
    assert plot is not None
    assert {"20", "50", "100", "200", "500"} <= set(Page(plot.svg).texts)


def test_a_guide_without_points_is_in_the_legend() -> None:
    known = {"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(12.0, NAN, NAN)}
    lost = known | {"perplexity": Estimate(NAN, NAN, NAN)}
    results = [make_result(metrics=known), make_result(guide="lost", metrics=lost)]
    plot = plot_tradeoff("name", "all", results, lambda attribute, fluency: [])
    assert plot is not None
    assert "lost, k=20: not measured" in svg_texts(plot.svg)


def test_candidates_have_panels_and_guides_their_colours() -> None:
    known = {"avg_max[judge]": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(12.0, 11.0, 13.0)}
    cells = [("rad-v", 20), ("rad-q", 20), ("rad-q", 40)]  # of rad-v nothing at 40
    results = [make_result(guide=guide, top_k=k, beta=beta, metrics=known) for guide, k in cells for beta in (1.0, 2.0)]
    plot = plot_by_candidates("name", "title", results, "avg_max[judge]")
    assert plot is not None
    texts = Page(plot.svg).texts
    assert [texts.count(text) for text in ("k=20", "k=40", "rad-v", "rad-q")] == [1, 1, 1, 1]
    assert plot.svg.count("stroke: #d55e00; stroke-width: 1.7") == 3  # rad-q: two panels and the legend
    assert plot_by_candidates("name", "title", results, "positive_rate[judge]") is None


def test_ink_and_paper_of_a_file_follow_the_reader() -> None:
    known = {"avg_max": Estimate(0.2, 0.1, 0.3), "perplexity": Estimate(12.0, NAN, NAN)}
    plot = plot_by_candidates("name", "title", [make_result(guide=f"a guide called {INK}", metrics=known)], "avg_max")
    assert plot is not None
    style, drawing = plot.themed.split("</style>", 1)
    assert "prefers-color-scheme:dark" in style
    assert drawing.count(INK) == 1  # its name
    assert "currentColor" in drawing
