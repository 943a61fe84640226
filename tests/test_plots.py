"""Plots: every guide can be told, whatever it is called and whatever was measured of it."""

from math import isnan

from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import NAMES, Page, make_result, svg_texts

from radq.evaluation.metrics import Estimate
from radq.evaluation.plots import plot_tradeoff
from radq.evaluation.results import NAN

VALUES = st.floats(0.001, 0.999) | st.just(NAN)


@given(st.lists(NAMES, min_size=1, max_size=9, unique=True), st.data())
@settings(max_examples=8, deadline=None)
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
