"""The paper's numbers, against its tables."""

import pytest

from radq.report.write import find_named, find_published, published_calls


def test_published_numbers() -> None:
    curves = find_published("avg_max", "perplexity", "all", top_ks={20})
    assert [curve.label for curve in curves] == [
        f"{method}, k=20 (paper: GPT-2-Large, Perspective)"
        for method in ("RAD-Q (distill)", "RAD-Q (resp. only)", "RAD-V")
    ]
    assert curves[0].points[0] == (10, 11.70, 0.301)
    assert curves[0].points[-1] == (300, 24.53, 0.097)
    assert len(find_published("avg_max", "perplexity", "all", top_ks={7})) == 6
    (first, *_) = find_published("toxic_rate", "mauve", "all", judge="ToxicityModel", top_ks={40})
    assert first.points[0][1] == 0.97  # the same samples as Perspective's
    llama = find_published("avg_max", "perplexity", "all", base="LLaMA-2-7b", top_ks={20})
    assert [curve.label for curve in llama][1] == "RAD-V (paper: LLaMA-2-7b, Perspective)"
    assert llama[1].points[0] == (10, 21.76, 0.244)


def test_published_sentiment_is_by_class_and_no_percentage() -> None:
    assert find_published("positive_rate", "perplexity", "all") == []
    (curve,) = [c for c in find_published("positive_rate", "mauve", "neutral", top_ks={20}) if c.method == "RAD-V"]
    assert curve.points[0] == pytest.approx((10, 0.95, 0.8606))
    (curve,) = [
        c for c in find_published("positive_rate", "perplexity", "Negative", top_ks={20}) if c.method == "RAD-V"
    ]
    assert curve.points[0] == pytest.approx((10, 12.61, 0.1994))
    assert find_published("mean_score", "perplexity", "neutral") == []
    assert published_calls() == "GeDi 1, DExperts 2, RAD-V k, RAD-Q 1"


def test_names_of_the_paper_are_found() -> None:
    bases = ("GPT-2-Large", "LLaMA-2-7b", "LLaMA-2-13b")
    assert find_named(bases, "meta-llama/Llama-2-13b-hf") == "LLaMA-2-13b"
    assert find_named(bases, "some/folder") == "GPT-2-Large"
