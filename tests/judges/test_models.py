"""All kinds of judges: labels, probabilities against a computation by hand, and digits that do not change."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import WORDS, make_classifier, make_onnx, write_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from radq.errors import ModelError, OptionError
from radq.judges.base import CachedJudge, Judge, Scored
from radq.judges.classifiers import choose_label, read_labels
from radq.judges.linear import Card, LinearModel, split_rows
from radq.judges.models import JUDGES, RewardJudge, invert, load_judge, to_unit
from radq.judges.readers import TransformersReader, load_encoder
from radq.models.kinds import RadV
from radq.sources.embedded import reward_folder
from radq.sources.model_source import ModelSource

TEXTS = ["a good film", "the plot was very very dull", "film", "bad bad bad", "fine", "very good plot"]


def logits_by_hand(folder: Path, text: str) -> torch.Tensor:
    """One text, no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


# --- classifiers ---


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_a_classifier_gives_the_softmax_of_its_label(kind: str, tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "judge", kind=kind)
    wanted = [float(logits_by_hand(folder, text).softmax(-1)[1]) for text in TEXTS]
    judge = load_judge(f"classifier:{folder}")
    np.testing.assert_allclose(judge.score(TEXTS), wanted, atol=1e-5)
    np.testing.assert_allclose(judge.score(TEXTS[::-1] * 40)[:6], wanted[::-1], atol=1e-5)
    np.testing.assert_allclose(
        load_judge(f"classifier:{folder}#negative").score(TEXTS), 1 - np.array(wanted), atol=1e-5
    )
    assert np.std(wanted) > 0.01


def test_one_logit_and_independent_ones_go_through_a_sigmoid(tmp_path: Path) -> None:
    one = make_classifier(tmp_path / "one", ["REWARD"])
    wanted = [float(logits_by_hand(one, text).sigmoid()[0]) for text in TEXTS]
    np.testing.assert_allclose(load_judge(f"classifier:{one}").score(TEXTS), wanted, atol=1e-5)
    inverted = load_judge(f"not:classifier:{one}")
    np.testing.assert_allclose(inverted.score(TEXTS), 1 - np.array(wanted), atol=1e-5)
    assert inverted.name == f"not:{load_judge(f'classifier:{one}').name}"
    labels = ["toxic", "insult", "threat"]
    many = make_classifier(tmp_path / "many", labels, problem_type="multi_label_classification")
    wanted = [float(logits_by_hand(many, text).sigmoid()[1]) for text in TEXTS]
    np.testing.assert_allclose(load_judge(f"classifier:{many}#insult").score(TEXTS), wanted, atol=1e-5)


def test_a_regression_is_taken_as_it_is_but_not_by_metrics(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "judge", ["REWARD"], problem_type="regression")
    judge = load_judge(f"classifier:{folder}")
    wanted = [float(logits_by_hand(folder, text)[0]) for text in TEXTS]
    np.testing.assert_allclose(judge.score(TEXTS), wanted, atol=1e-5)
    assert max(map(abs, wanted)) > 1
    for change in (to_unit, invert):
        with pytest.raises(OptionError, match=r"is a regression.*`radq judge score`"):
            change(judge)


class Stars(Judge):
    """Scores from 1 to 5."""

    name, attribute, limits = "stars", "stars", (1.0, 5.0)

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        yield range(len(texts)), np.array([float(text) for text in texts])


def test_metrics_see_any_scale_as_0_to_1() -> None:
    np.testing.assert_array_equal(to_unit(Stars()).score(["1", "2", "", "5"]), [0, 0.25, np.nan, 1])
    inverted = invert(Stars())
    np.testing.assert_array_equal(inverted.score(["1", "2", "5"]), [5, 4, 1])
    assert (inverted.limits, inverted.attribute) == ((1, 5), "not_stars")
    with pytest.raises(ModelError, match=r"gave 6\.0 for '6'; scores must be from 1 to 5"):
        Stars().score(["6"])


STARS = ["1 star", "2 stars", "3 stars", "4 stars", "5 stars"]


@pytest.mark.parametrize(
    ("labels", "wanted", "index"),
    [
        (["NEGATIVE", "POSITIVE"], None, 1),
        (["pos", "neg"], None, 0),
        (["toxic", "non-toxic"], None, 0),
        (["not_toxic", "toxic"], None, 1),
        (["nothate", "hate"], None, 1),
        (["REWARD"], None, 0),
        (["LABEL_0", "LABEL_1"], "LABEL_1", 1),
        (["LABEL_0", "LABEL_1"], "label_0", 0),
        (["LABEL_0", "LABEL_1"], "1", 1),
        (["1", "0"], "1", 0),
        (STARS, "1", 0),
        (STARS, "5", 4),
        (["LABEL_1", "LABEL_2"], "1", 0),
        (["toxic", "insult"], "1", 1),
        (["joy", "class 1"], "1", 1),
        (["a", "b", "c"], "c", 2),
    ],
)
def test_labels_that_are_clear(labels: list[str], wanted: str | None, index: int) -> None:
    assert choose_label(labels, wanted, "model") == index


@pytest.mark.parametrize(
    ("labels", "wanted", "message"),
    [
        (["LABEL_0", "LABEL_1"], None, "labels LABEL_0, LABEL_1.*#LABEL_1"),
        (["neutral", "toxic"], None, "neutral, toxic.*#toxic"),
        (["toxic", "insult", "threat"], None, "toxic, insult, threat"),
        (["toxic", "insult"], "rude", "no label 'rude'.*toxic, insult"),
        (["toxic", "insult"], "2", "no label '2'"),
        (STARS, "0", "no label '0'.*1 star, 2 stars, 3 stars"),
        (["1 star", "1 half", "2 stars"], "1", "1 may be '1 star' or '1 half'.*choose a name from 1 star, 1 half"),
        (["class 1", "other"], "1", "1 may be 'class 1' or 'other'"),
    ],
)
def test_labels_that_are_not(labels: list[str], wanted: str | None, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        choose_label(labels, wanted, "model")


def test_an_ambiguous_classifier_is_refused(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "judge", ["LABEL_0", "LABEL_1"])
    with pytest.raises(OptionError, match="LABEL_0, LABEL_1.*add the one you mean"):
        load_judge(f"classifier:{folder}")
    assert load_judge(f"classifier:{folder}#LABEL_1").name.endswith("#LABEL_1")


@pytest.mark.parametrize("wrong", [["a", "b"], {"zero": "a"}, 3])
def test_labels_that_are_damaged(wrong: object) -> None:
    with pytest.raises(ModelError, match="must map numbers to labels"):
        read_labels({"id2label": wrong})
    assert read_labels({"id2label": {"1": "b", "0": "a", "10": "k", "2": "c"}}) == ["a", "b", "c", "k"]
    assert read_labels({}) == read_labels({"id2label": None}) == []


@pytest.mark.parametrize(("kind", "room"), [("bert", 24), ("roberta", 23), ("gpt2", 24)])
def test_long_texts_are_cut_to_the_models_positions_and_counted(kind: str, room: int, tmp_path: Path) -> None:
    """RoBERTa's positions begin after that of its padding token, which is 0 here."""
    special = 0 if kind == "gpt2" else 2
    judge = load_judge(f"classifier:{make_classifier(tmp_path / 'judge', kind=kind)}")
    fits = " ".join(["good"] * (room - special))
    scores = judge.score([fits, fits + " good", fits + " good" * 500])
    assert judge.truncated == 2
    np.testing.assert_allclose(scores[1:], scores[0], atol=1e-5)


def test_names_change_with_the_content_and_not_with_the_place(tmp_path: Path) -> None:
    first = load_judge(f"classifier:{make_classifier(tmp_path / 'judge')}").name
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "judge", tmp_path / "elsewhere" / "judge")
    assert load_judge(f"classifier:{tmp_path}/elsewhere/judge").name == first
    assert load_judge(f"classifier:{tmp_path}/elsewhere/judge#negative").name != first
    make_classifier(tmp_path / "judge", seed=1)
    assert load_judge(f"classifier:{tmp_path}/judge").name != first


def test_classifiers_that_are_none(tmp_path: Path) -> None:
    encoder = make_classifier(tmp_path / "encoder", kind="encoder")
    with pytest.raises(ModelError, match="lack .* tensors"):  # no classification head: none is made up
        load_judge(f"classifier:{encoder}")
    folder = make_classifier(tmp_path / "pickled")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled"):
        load_judge(f"classifier:{folder}")
    broken = make_classifier(tmp_path / "broken")
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(broken)
        model.classifier.bias.fill_(torch.nan)
        model.save_pretrained(broken)
    with pytest.raises(ModelError, match="gave nan for "):
        load_judge(f"classifier:{broken}").score(TEXTS)


# --- ONNX ---


def make_table(width: int = 2) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(len(WORDS), width)).astype(np.float32) * 3


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


def test_an_onnx_classifier(tmp_path: Path) -> None:
    table = make_table()
    folder = make_onnx(tmp_path / "judge", table.tolist())
    wanted = softmax(table[[2, 4, 5, 6, 3]].mean(0))  # [CLS] a good bad [SEP]
    assert load_judge(f"onnx:{folder}").score(["a good bad"]) == pytest.approx(wanted[1:], rel=1e-5)  # the last of two
    assert load_judge(f"onnx:{folder}#0").score(["a good bad"]) == pytest.approx(wanted[:1], rel=1e-5)
    write_config(folder, id2label={"0": "toxic", "1": "non_toxic"})
    assert load_judge(f"onnx:{folder}").score(["a good bad"]) == pytest.approx(wanted[:1], rel=1e-5)
    write_config(folder, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    with pytest.raises(OptionError, match="LABEL_0, LABEL_1"):
        load_judge(f"onnx:{folder}")
    single = make_onnx(tmp_path / "single", table[:, :1].tolist(), extra_input="token_type_ids")
    logit = table[[2, 4, 3], 0].mean()
    assert load_judge(f"onnx:{single}").score(["a"]) == pytest.approx([1 / (1 + np.exp(-logit))], rel=1e-5)


def test_long_texts_are_cut_for_onnx_too(tmp_path: Path) -> None:
    folder = make_onnx(tmp_path / "judge", make_table().tolist())
    write_config(folder, max_position_embeddings=6)
    judge = load_judge(f"onnx:{folder}")
    scores = judge.score(["good good good good", "good " * 50, "good"])
    assert judge.truncated == 1
    assert scores[0] == scores[1] != scores[2]


def test_wordpiece_from_a_vocabulary_alone(tmp_path: Path) -> None:
    table = make_table()
    folder = make_onnx(tmp_path / "judge", table.tolist())
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    wanted = softmax(table[[2, 5, 7, 3]].mean(0))
    assert load_judge(f"onnx:{folder}").score(["GOOD film", "good film"]) == pytest.approx([wanted[1]] * 2, rel=1e-5)
    (folder / "vocab.txt").write_text("\n".join(word.title() if word.isalpha() else word for word in WORDS) + "\n")
    cased = load_judge(f"onnx:{folder}").score(["Good Film", "good film"])
    assert cased[0] == pytest.approx(wanted[1], rel=1e-5) != cased[1]


def test_onnx_folders_that_are_none(tmp_path: Path) -> None:
    table = make_table().tolist()
    with pytest.raises(ModelError, match=r"no \.onnx file"):
        load_judge(f"onnx:{tmp_path}")
    folder = make_onnx(tmp_path / "judge", table)
    shutil.copy(folder / "model.onnx", folder / "other.onnx")
    with pytest.raises(ModelError, match=r"several models: model\.onnx, other\.onnx"):
        load_judge(f"onnx:{folder}")
    (folder / "other.onnx").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_judge(f"onnx:{folder}")
    with pytest.raises(ModelError, match="no classifier"):
        load_judge(f"onnx:{make_onnx(tmp_path / 'encoder', table, pooled=False)}")
    with pytest.raises(ModelError, match="input 'pixel_values'"):
        load_judge(f"onnx:{make_onnx(tmp_path / 'image', table, extra_input='pixel_values')}")
    write_config(make_onnx(tmp_path / "three", table), id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(ModelError, match="2 outputs, but 3 labels"):
        load_judge(f"onnx:{tmp_path / 'three'}")
    (make_onnx(tmp_path / "damaged", table) / "model.onnx").write_bytes(b"onnx?")
    with pytest.raises(ModelError, match="cannot be opened"):
        load_judge(f"onnx:{tmp_path / 'damaged'}")


def test_onnx_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelError, match=r"onnxruntime.*pip install 'radq\[eval\]'"):
        load_judge(f"onnx:{make_onnx(tmp_path / 'judge', make_table().tolist())}")


def test_a_toxicity_model_tells_insults_from_thanks(shared_file: Callable[[str], Path]) -> None:
    judge = load_judge(f"onnx:{shared_file('models/toxicity-bert-tiny')}")
    insult, thanks = judge.score(["You are a stupid idiot.", "Thank you very much, dear friend."])
    assert insult > 0.9
    assert thanks < 0.1
    texts = ["hello there", "what a mess", "shut up", "the train leaves at nine"]
    np.testing.assert_array_equal(judge.score(texts), [judge.score([text])[0] for text in texts])  # though quantised


# --- linear ---


def test_a_reward_model_judges_by_its_last_token(toy: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RadV.from_backbone(toy, attributes=["rude", "praise"])
    torch.nn.init.normal_(model.head.weight, std=0.1)
    torch.nn.init.constant_(model.head.bias, 0.5)
    model.save_pretrained(tmp_path / "judge")
    texts = ["the film was good .", "a story", "the plot is dull and the acting is bad ."]
    tokenizer = AutoTokenizer.from_pretrained(toy)
    wanted = [
        model.token_rewards(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids]))[0, -1, 1].item()
        for text in texts
    ]
    judge = load_judge(f"reward:{tmp_path / 'judge'}#praise")
    np.testing.assert_allclose(judge.score(texts), np.clip(wanted, 0, 1), atol=1e-5)
    assert np.std(wanted) > 0.001
    assert judge.score([]).shape == (0,)
    assert "#praise" in judge.name
    with pytest.raises(OptionError, match="rude, praise"):
        load_judge(f"reward:{tmp_path / 'judge'}")


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    encoder = make_classifier(tmp_path / "encoder", kind="encoder")
    loaded = load_encoder(str(encoder))
    texts = [f"{a} {b} {c}" for a in WORDS[4:] for b in ("good", "bad") for c in WORDS[4:]]
    labels = np.array([float("good" in text) for text in texts])
    card = Card(str(encoder), loaded.name, "praise")
    LinearModel.fit(loaded.encode(texts), labels, split_rows(labels), card).save(tmp_path / "linear")
    return tmp_path / "linear"


def test_a_linear_judge(linear: Path) -> None:
    judge = load_judge(f"linear:{linear}")
    good, blank, bad = judge.score(["the good film", " ", "the bad film"])
    assert good > 0.7 > 0.3 > bad
    assert np.isnan(blank)
    model = LinearModel.load(linear)
    assert judge.name == f"linear:linear@{model.digest()}"
    make_classifier(linear.parent / "encoder", kind="encoder", seed=5)
    with pytest.raises(ModelError, match="fitted on the encoder.*is now"):
        load_judge(f"linear:{linear}")


# --- by name ---


def test_unknown_judges_are_named() -> None:
    with pytest.raises(OptionError, match=f"no judge 'oracle:x'.*{', '.join(JUDGES)}"):
        load_judge("oracle:x")
    for kind in ("classifier", "onnx", "linear"):
        with pytest.raises(OptionError, match=f"{kind}:FOLDER"):
            load_judge(kind)
    with pytest.raises(OptionError, match="no judge ''"):
        load_judge("not")


# --- the same digits every time ---


@pytest.mark.parametrize("kind", ["classifier", "not:classifier", "linear", "reward"])
def test_every_judge_gives_the_same_digits_after_a_kill(
    kind: str, toy: Path, linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RadV.from_backbone(toy, attributes=["praise"]).save_pretrained(tmp_path / "reward")
    make_classifier(tmp_path / "classifier")
    monkeypatch.setattr("radq.judges.readers.BATCH_SIZE", 3)
    for batched in (TransformersReader, RewardJudge):
        monkeypatch.setattr(batched, "group_size", 7)
    judge = load_judge(f"{kind}:{tmp_path / kind.removeprefix('not:')}")
    assert judge.group_size == 7
    texts = [f"{'a very ' * (n % 5)} fine {'film ' * (n % 7)} {'plot' * (n % 2)}" for n in range(40)]
    expected = CachedJudge(judge, tmp_path / "empty").score(texts)
    CachedJudge(judge, tmp_path / "warm").score(texts[3:9] + texts[:2])
    for kept in (1, 3, 6):  # as if a kill had come after so many scores of the first group
        scores = CachedJudge(judge, tmp_path / "warm").judge(texts)
        for _ in range(kept):
            next(scores)
        scores.close()  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(CachedJudge(judge, tmp_path / "warm").score(texts), expected)


def test_a_judge_that_reads_one_by_one_gives_the_same_digits_in_any_order(tmp_path: Path) -> None:
    judge = load_judge(f"onnx:{make_onnx(tmp_path / 'judge', make_table().tolist())}")
    assert judge.group_size == 1
    np.testing.assert_array_equal(judge.score(TEXTS), [judge.score([text])[0] for text in TEXTS])


def test_scores_do_not_depend_on_kernels_that_an_earlier_product_has_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a product in bfloat16 does on a CPU without bfloat16."""
    make_classifier(tmp_path)
    texts = [f"the film was {'good ' * n}" for n in range(9)]
    fresh = load_judge(f"classifier:{tmp_path}").score(texts)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert load_judge(f"classifier:{tmp_path}").score(texts).tobytes() == fresh.tobytes()
    assert not torch.backends.mkldnn.enabled  # left as it was found


def test_a_reward_model_that_radq_ships_is_named_by_its_contents() -> None:
    assert (
        ModelSource.find("embedded:sentiment").identity
        == ModelSource.find(reward_folder("sentiment")).identity
        != ModelSource.find("embedded:toxicity").identity
    )
