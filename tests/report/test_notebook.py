"""One call that evaluates guides, against the texts and scores computed one by one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from command_calls import make_steering_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from word_judge import GoodWords

import radq
from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.errors import OptionError

PROMPTS = ["the film", "the plot was", "a story", "<b>it"]


@pytest.fixture(scope="module")
def guide(toy: Path) -> radq.Guide:
    torch.manual_seed(0)
    return radq.RewardGuide(make_steering_model(toy, ["praise"]), {"praise": 20.0})


@pytest.fixture(scope="module")
def found(toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase, guide: radq.Guide) -> radq.Evaluation:
    guides = {"<strong>": guide}
    return radq.evaluate(toy_lm, toy_tokenizer, PROMPTS, guides, {"good": GoodWords()}, samples=3, max_new_tokens=5)


def test_texts_and_metrics_are_those_of_each_guide(
    found: radq.Evaluation, toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase, guide: radq.Guide
) -> None:
    for row, steer in zip(found.guides, (None, guide), strict=True):
        drawn = radq.generate(toy_lm, toy_tokenizer, PROMPTS, steer, samples=3, max_new_tokens=5)
        assert row.kl_budget == drawn[0].kl_budget == (None if steer is None else DEFAULT_KL_BUDGET)
        assert [text for texts in row.texts for text in texts] == [one.text for one in drawn]
        scores = GoodWords().score([one.text for one in drawn]).reshape(4, 3)
        assert row.metrics["mean_score[good]"]["value"] == pytest.approx(np.nanmean(scores, axis=1).mean())
        told = [one for one in drawn if one.text.strip()]
        perplexity = math.exp(sum(one.nll for one in told) / sum(one.num_text_tokens for one in told))
        assert row.metrics["corpus_perplexity"]["value"] == pytest.approx(perplexity)
        kl = sum(one.kl * one.num_text_tokens for one in told) / sum(one.num_text_tokens for one in told)
        assert row.metrics["kl"]["value"] == pytest.approx(kl, abs=1e-6)
    assert found.guides[0].metrics["kl"]["value"] == 0 < (found.guides[1].metrics["kl"]["value"] or 0)
    before, after = (row.metrics["mean_score[good]"]["value"] for row in found.guides)
    assert before is not None
    assert after is not None
    assert found.guides[1].changes["mean_score[good]"]["value"] == pytest.approx(after - before)


def test_a_notebook_shows_a_table_and_a_plot(found: radq.Evaluation) -> None:
    page = found._repr_html_()
    assert page.count("<tr>") == 3
    assert "&lt;strong&gt;" in page
    assert repr(found).splitlines()[0].split()[:2] == ["guide", "mean_score[good]"]
    frame = found.to_pandas()
    assert list(frame.index) == ["none", "<strong>"]
    assert frame["mean_score[good]"].notna().all()
    assert "<svg" in found.plot()._repr_html_()


def test_mistakes(toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(OptionError, match="no prompts"):
        radq.evaluate(toy_lm, toy_tokenizer, [], {}, {})
    with pytest.raises(OptionError, match="no metric of a judge"):
        radq.evaluate(toy_lm, toy_tokenizer, PROMPTS, {}, {}, judge_metrics=["kl"])
    with pytest.raises(OptionError, match="no judge"):
        radq.evaluate(toy_lm, toy_tokenizer, PROMPTS[:2], {}, {}, samples=1, max_new_tokens=2).plot()
