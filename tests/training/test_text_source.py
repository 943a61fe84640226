"""Classifiers as teachers: scores against direct computations, labels, targets, candidates, resuming and mistakes."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from classifiers import WORDS, make_classifier, make_onnx, make_wordpiece_classifier, write_config
from command_runs import fails
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kills import run_and_kill
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training_runs import changed, losses, weights
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from radq.cli import main
from radq.data.dataset import load_data
from radq.data.examples import DataColumns
from radq.errors import OptionError
from radq.judges.base import CachedJudge
from radq.judges.models import load_classifier, load_judge
from radq.judges.readers import TransformersReader
from radq.models.kinds import RadV
from radq.models.reward import RewardModel
from radq.toy import make_reviews
from radq.training.candidate_agreement import UNUSED, MarkedPrefix, score_places
from radq.training.candidates import CandidateSet
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train
from radq.training.teacher import RewardSource, Teacher, TextSource, fill_blanks
from radq.training.token_cache import cache_targets, target_ranges

BASE: dict[str, Any] = {
    "num_prefixes": 6,
    "prefix_tokens": 5,
    "prefix_positions": 2,
    "candidates": 4,
    "prompt_tokens": 3,
}


class Direct:
    """Scores one text at a time, without padding, by transformers alone."""

    def __init__(self, folder: Path, link: str = "softmax"):
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
        self.tokenizer, self.link = AutoTokenizer.from_pretrained(folder), link

    @torch.no_grad()
    def __call__(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, truncation=True, max_length=24).input_ids
        logits = self.model(torch.tensor([ids])).logits[0]
        links = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "identity": logits}
        return links[self.link].numpy()


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "reviews.csv"
    pandas.DataFrame(make_reviews(60), columns=["text", "praise"]).to_csv(file, index=False)
    return file


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return make_wordpiece_classifier(tmp_path / "classifier")


@pytest.fixture
def distilled(settings: RewardTrainingConfig, classifier: Path) -> RewardTrainingConfig:
    return changed(settings, labels="", teacher_classifier=str(classifier))


def make_source(folder: Path, tokenizer: PreTrainedTokenizerBase, name: str = "", **options: Any) -> TextSource:
    return TextSource(load_classifier(f"{folder}{name}"), tokenizer, cache=folder.parent / "cache", **options)


# --- scores ---


@pytest.mark.parametrize(
    ("labels", "options", "link", "chosen"),
    [
        (("negative", "positive"), {}, "softmax", ":positive"),
        (("a", "b", "c"), {}, "softmax", ":c=third,a"),
        (("a", "b", "c"), {"problem_type": "multi_label_classification"}, "sigmoid", ":b,c"),
        (("REWARD",), {}, "sigmoid", ""),
        (("REWARD",), {"problem_type": "regression"}, "identity", ""),
        (("a", "b"), {"problem_type": "regression"}, "identity", ":0,1=second"),
    ],
)
def test_rewards_are_the_scores_of_decoded_texts(
    labels: tuple[str, ...],
    options: dict[str, str],
    link: str,
    chosen: str,
    tmp_path: Path,
    toy_tokenizer: PreTrainedTokenizerBase,
) -> None:
    folder = make_wordpiece_classifier(tmp_path / "judge", labels, **options)
    direct = Direct(folder, link)
    teacher = Teacher([[make_source(folder, toy_tokenizer, chosen)]])
    columns = [labels.index(name) if name in labels else int(name) for name in _names(chosen, labels)]
    texts = ["the film was good .", "this plot is very dull and bad"]
    rows = toy_tokenizer(texts, add_special_tokens=False).input_ids
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    rewards = teacher.token_rewards(ids, mask)
    for n, row in enumerate(rows):
        wanted = [direct(toy_tokenizer.decode(row[: end + 1]))[columns] for end in range(len(row))]
        np.testing.assert_allclose(rewards[n, : len(row)], wanted, atol=2e-5)
        assert not rewards[n, len(row) :].any()
    candidates = torch.tensor([[5, 9, 12], [7, 30, 3]])
    found = teacher.candidate_rewards(ids.flip(1), mask.flip(1), candidates)  # a mask may stand on either side
    for n, row in enumerate(rows):
        texts = [toy_tokenizer.decode([*row[::-1], token]) for token in candidates[n].tolist()]
        np.testing.assert_allclose(found[n], [direct(text)[columns] for text in texts], atol=2e-5)
    assert rewards.std() > 0.01
    assert teacher.ranges == (None if link == "identity" else [(0.0, 1.0)] * len(columns))


def _names(chosen: str, labels: tuple[str, ...]) -> list[str]:
    return [part.partition("=")[0] for part in chosen[1:].split(",")] if chosen else list(labels[:1])


def test_several_labels_take_one_forward(
    tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_wordpiece_classifier(tmp_path / "judge", ["a", "b", "c"])
    source = make_source(folder, toy_tokenizer, ":a,b=second,c")
    assert source.attributes == ["a", "second", "c"]
    read, counts = TransformersReader.read, []

    def counting(self: TransformersReader, texts: Any) -> Any:
        counts.append(len(texts))
        return read(self, texts)

    monkeypatch.setattr(TransformersReader, "read", counting)
    texts = ["the film", "a plot", "the film"]
    scores = source.score_texts(texts)
    assert counts == [2]
    np.testing.assert_allclose(scores.sum(1), 1)
    np.testing.assert_array_equal(source.score_texts(texts), scores)
    assert counts == [2]
    assert source.num_texts == 3


def test_an_onnx_classifier_teaches(tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    table = np.random.default_rng(0).normal(size=(len(WORDS), 2)).astype(np.float32) * 3
    folder = make_onnx(tmp_path / "judge", table.tolist())
    with pytest.raises(OptionError, match=r"2 outputs without names.*:1=toxicity"):
        load_classifier(str(folder))
    source = make_source(folder, toy_tokenizer, ":1=praise")
    assert source.attributes == ["praise"]
    ids = torch.tensor([toy_tokenizer("the film was good", add_special_tokens=False).input_ids])
    rewards = source.token_rewards(ids, torch.ones_like(ids))
    numbers = {word: n for n, word in enumerate(WORDS)}
    for end, words in enumerate(["the", "the film", "the film was", "the film was good"]):
        logits = table[[2, *(numbers[word] for word in words.split()), 3]].mean(0)
        assert rewards[0, end, 0].item() == pytest.approx(1 / (1 + np.exp(logits[0] - logits[1])), rel=1e-5)
    write_config(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    with pytest.raises(OptionError, match="LABEL_0, LABEL_1.*such as :LABEL_1"):
        load_classifier(str(folder))


def test_any_judge_teaches(toy: Path, tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    folder = make_classifier(tmp_path / "judge")
    for name, attribute in ((f"not:classifier:{folder}#positive", "not_positive"), (f"classifier:{folder}=fun", "fun")):
        (judge,) = load_classifier(name)
        assert judge.attribute == attribute
        np.testing.assert_array_equal(judge.score(["film"]), load_judge(name.partition("=")[0]).score(["film"]))


def test_characters_that_are_not_complete_are_not_read() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    source = TextSource([], tokenizer)
    ids = tokenizer("nö→").input_ids
    assert source._decode([ids[:end] for end in range(1, 7)]) == ["n", "n", "nö", "nö", "nö", "nö→"]


@given(arrays(np.float64, (3, 4, 2), elements=st.floats(0, 1) | st.just(float("nan"))))
def test_blank_texts_change_nothing(scores: np.ndarray) -> None:
    filled = fill_blanks(scores)
    known = ~np.isnan(scores)
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[known], scores[known])
    for row, column in np.argwhere(known.any(1)):
        values = scores[row, :, column]
        np.testing.assert_allclose(filled[row, :, column].mean(), np.nanmean(values))


def test_prefixes_without_their_prompts(classifier: Path, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    direct = Direct(classifier)
    ids = toy_tokenizer("the film was very good", add_special_tokens=False).input_ids
    candidates = np.array([[[5, 9], [7, UNUSED]]], np.int32)
    prefix = MarkedPrefix(ids, [2, 4], prompt_length=2)
    for continuation in (False, True):
        teacher = Teacher([[make_source(classifier, toy_tokenizer, reads_continuations=continuation)]])
        targets = score_places(teacher, [prefix], candidates)
        first = 2 if continuation else 0
        for p, place in enumerate(prefix.places):
            for k, token in enumerate(candidates[0, p].tolist()):
                text = toy_tokenizer.decode([*ids[first:place], max(token, 0)])
                wanted = 0 if token == UNUSED else direct(text)[1]
                assert targets[0, p, k, 0] == pytest.approx(wanted, abs=2e-5)


def test_a_classifier_keeps_its_precision(classifier: Path, toy: Path, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    """Reward models teach in the precision of training, which is that of half as many bits on most GPUs."""
    reads_texts = Teacher([[make_source(classifier, toy_tokenizer)]])
    reads_tokens = Teacher([[RewardSource(RadV.from_backbone(toy, attributes=["praise"]))]])
    for teacher, half in ((reads_texts, False), (reads_tokens, True)):
        with teacher.computing_in("bfloat16"):
            assert torch.is_autocast_enabled("cpu") == half


@pytest.mark.parametrize("continuation", [False, True])
def test_texts_without_their_prompts(
    continuation: bool, classifier: Path, tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [("the film", "was very good ."), ("", "this plot is bad"), ("this story", "felt dull")]
    pandas.DataFrame(rows, columns=["prompt", "text"]).to_csv(tmp_path / "rows.csv", index=False)
    data = load_data([tmp_path / "rows.csv"], toy_tokenizer, DataColumns(prompt="prompt"), 64, tmp_path / "tokens")
    source = make_source(classifier, toy_tokenizer, reads_continuations=continuation)
    direct = Direct(classifier)
    read = [text if continuation else f"{prompt} {text}".strip() for prompt, text in rows]
    np.testing.assert_allclose(source.score_data(data)[:, 0], [direct(text)[1] for text in read], atol=2e-5)
    cache_targets(tmp_path / "targets", data, Teacher([[source]]), source.fingerprint, "float32", False)
    stored = data.stored["targets"](np.arange(len(rows)))  # (3, t, 1)
    wanted = []
    for n, (prompt, _) in enumerate(rows):
        ids = data.token_ids[data.offsets[n] : data.offsets[n + 1]].tolist()
        first = len(prompt.split())
        start = first if continuation else 0
        wanted += [direct(toy_tokenizer.decode(ids[start : end + 1]))[1] for end in range(first, len(ids))]
        targets = stored[n, first : len(ids), 0]
        np.testing.assert_allclose(targets, wanted[-len(targets) :], atol=2e-5)
    assert target_ranges(data)[0] == pytest.approx((min(wanted), max(wanted)), abs=2e-5)


# --- runs ---


def test_scores_of_texts_are_labels(
    distilled: RewardTrainingConfig, classifier: Path, reviews: Path, tmp_path: Path
) -> None:
    """The run is that of `radq train` on a table with these scores."""
    config = changed(distilled, eval_share=0.1)
    metrics = train(config)
    frame = pandas.read_csv(reviews)
    direct = Direct(classifier)
    frame["positive"] = [direct(text)[1] for text in frame["text"]]
    frame.to_csv(tmp_path / "scored.csv", index=False)
    again = changed(config, teacher_classifier="", data=[str(tmp_path / "scored.csv")], labels="positive")
    again = changed(again, out=str(tmp_path / "labels"))
    wanted = train(again)
    np.testing.assert_allclose(losses(config.out), losses(again.out), rtol=1e-4)
    assert metrics["eval_spearman_positive"] == pytest.approx(wanted["eval_spearman_positive"], abs=1e-3)
    assert metrics["teacher_texts_per_second"] > 0
    model = RewardModel.from_pretrained(config.out)
    assert model.config.attributes == ["positive"]
    assert model.config.response_range == [0.0, 1.0]
    assert model.config.label_scales is None


def test_a_value_model_and_cross_entropy_are_possible(distilled: RewardTrainingConfig) -> None:
    train(changed(distilled, kind="v", loss="ce", max_steps=2))
    assert RewardModel.from_pretrained(distilled.out).config.loss == "ce"


def test_scores_of_a_regression_set_the_range(settings: RewardTrainingConfig, tmp_path: Path, reviews: Path) -> None:
    folder = make_wordpiece_classifier(tmp_path / "judge", ["REWARD"], problem_type="regression")
    direct = Direct(folder, "identity")
    scores = [float(direct(text)[0]) for text in pandas.read_csv(reviews)["text"]]
    config = changed(settings, labels="", teacher_classifier=f"{folder}:0=joy", max_steps=2)
    train(config)
    low, high = RewardModel.from_pretrained(config.out).config.response_range
    assert (low, high) == pytest.approx((min(scores), max(scores)), abs=1e-4)
    prefixes = changed(config, teacher_scores="prefixes", out=str(tmp_path / "prefixes"))
    train(prefixes)
    wider = RewardModel.from_pretrained(prefixes.out).config.response_range
    assert wider[0] <= low + 1e-4
    assert wider[1] >= high - 1e-4
    both = changed(config, base=config.backbone, out=str(tmp_path / "base"), **BASE)
    train(both)
    wider = RewardModel.from_pretrained(both.out).config.response_range
    assert wider[0] <= low
    assert wider[1] >= high


def test_scores_of_prefixes_are_targets_of_tokens(
    distilled: RewardTrainingConfig, classifier: Path, reviews: Path, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    config = changed(distilled, teacher_scores="prefixes", labels="praise", max_steps=3, eval_share=0.1)
    config = changed(config, teacher_classifier=f"{classifier}:positive=praise")
    metrics = train(config)
    assert metrics["eval_distillation_mse"] > 0
    assert "eval_spearman_praise" in metrics
    data = load_data([str(reviews)], toy_tokenizer, DataColumns(labels=["praise"]), 512, config.cache)
    (file,) = (Path(config.out) / "targets").glob("*/*")  # of the rows to train on, and of those to evaluate on
    targets = np.fromfile(file, np.float32)
    direct = Direct(classifier)
    for row in (0, 5, 47):
        ids = data.token_ids[data.offsets[row] : data.offsets[row + 1]].tolist()
        wanted = [direct(toy_tokenizer.decode(ids[: end + 1]))[1] for end in range(len(ids))]
        np.testing.assert_allclose(targets[data.offsets[row] : data.offsets[row + 1]], wanted, atol=2e-5)


@pytest.mark.parametrize("scores", ["texts", "prefixes"])
def test_candidates_of_a_base(
    scores: Any, distilled: RewardTrainingConfig, classifier: Path, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    config = changed(distilled, teacher_scores=scores, base=distilled.backbone, max_steps=3, rounds=2, **BASE)
    metrics = train(config)
    assert -1 <= metrics["eval_candidate_correlation"] <= 1
    assert metrics["teacher_texts_per_second"] > 0
    direct = Direct(classifier)
    (file,) = (Path(config.out) / "candidates").glob("*round-1*")
    with np.load(file) as stored:
        found = CandidateSet(**stored)
    checked = 0
    for n in range(len(found)):
        for p, place in enumerate(found.positions[n].tolist()):
            prefix = found.input_ids[n, :place].tolist()
            for k, token in enumerate(found.candidates[n, p].tolist()):
                text = toy_tokenizer.decode([*prefix, token], skip_special_tokens=True)
                if token != UNUSED and text.strip():
                    assert found.targets[n, p, k, 0] == pytest.approx(direct(text)[1], abs=2e-5)
                    checked += 1
    assert checked > 20


def test_a_run_that_is_killed_while_it_scores_goes_on(
    distilled: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TransformersReader, "group_size", 40)
    argv = ["distill", "--teacher-classifier", distilled.teacher_classifier, "--teacher-scores", "prefixes", "--json"]
    argv += ["--data", *distilled.data, "--backbone", distilled.backbone, "--cache", str(distilled.cache)]
    argv += ["--max-steps", "3", "--batch-size", "16", "--learning-rate", "1e-3"]
    killed, whole = [*argv, "--out", str(tmp_path / "killed")], [*argv, "--out", str(tmp_path / "whole")]
    run_and_kill("radq.judges.base:CachedJudge._store", 3, killed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no checkpoint yet
        run_and_kill("radq.training.reward:cache_targets", 2, [*killed, "--resume"])
    stores: list[int] = []
    store = CachedJudge._store

    def counting(self: CachedJudge, database: Any, keys: Any, scores: Any) -> None:
        stores.append(len(keys))
        store(self, database, keys, scores)

    monkeypatch.setattr(CachedJudge, "_store", counting)
    with pytest.warns(UserWarning, match="no checkpoint to go on from"):
        assert main([*killed, "--resume"]) == 0
    assert not stores
    capsys.readouterr()
    shutil.rmtree(distilled.cache or "")
    assert main(whole) == 0
    assert sum(stores) > 300
    for name, tensor in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(tmp_path / "killed")[name], tensor, rtol=0, atol=0)


def test_the_folder_of_a_classifier_may_move(distilled: RewardTrainingConfig, tmp_path: Path) -> None:
    config = changed(distilled, max_steps=2, save_steps=1)
    train(config)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "classifier", tmp_path / "elsewhere" / "classifier")
    moved = changed(config, teacher_classifier=str(tmp_path / "elsewhere" / "classifier"))
    train(moved, resume=True)
    make_wordpiece_classifier(tmp_path / "elsewhere" / "classifier", seed=3)
    with pytest.raises(OptionError, match="the contents of data; the contents of teacher_classifier changed"):
        train(moved, resume=True)


# --- the command ---


def test_the_command_says_how_fast_the_teacher_was(
    distilled: RewardTrainingConfig, classifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["distill", "--data", *distilled.data, "--backbone", distilled.backbone, "--cache", str(distilled.cache)]
    argv += ["--out", distilled.out, "--max-steps", "2", "--teacher-classifier", f"{classifier}:positive=praise"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["teacher_texts_per_second"] > 0
    assert main([*argv, "--overwrite"]) == 0
    assert ":praise=20" in capsys.readouterr().out
    ambiguous = make_wordpiece_classifier(classifier.parent / "ambiguous", ["LABEL_0", "LABEL_1"])
    error = fails(capsys, *argv, "--overwrite", "--teacher-classifier", str(ambiguous))
    assert "has the labels LABEL_0, LABEL_1" in error
    assert "hint: add the one you mean, such as :LABEL_1." in error
