"""Judges: labels, probabilities against a computation by hand, blanks, and a cache that survives kills and company."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from classifiers import SHARED, WORDS, make_classifier, make_onnx, write_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from radq.errors import DataError, ModelError, OptionError
from radq.evaluation.judges.base import JUDGES, CachedJudge, InvertedJudge, Judge, Scored, choose_label, load_judge
from radq.evaluation.judges.linear import Card, LinearModel, split_rows
from radq.evaluation.judges.readers import TransformersReader
from radq.evaluation.judges.reward import RewardJudge
from radq.models.reward import RadV

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


@pytest.mark.skipif(not (SHARED / "models" / "toxicity-bert-tiny").is_dir(), reason="the model lies beside the project")
def test_a_toxicity_model_tells_insults_from_thanks() -> None:
    judge = load_judge(f"onnx:{SHARED / 'models' / 'toxicity-bert-tiny'}")
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
    from radq.evaluation.judges.encoders import load_encoder

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


# --- what every judge does ---


class Lengths(Judge):
    """Scores a text by its length, backwards and in pairs; remembers what it was asked."""

    def __init__(self, name: str = "lengths") -> None:
        self.name = name
        self.asked: list[str] = []

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for last in range(len(texts), 0, -2):
            positions = range(max(0, last - 2), last)
            self.asked += [texts[n] for n in positions]
            yield positions, np.array([min(1.0, len(texts[n]) / 10) for n in positions])


@pytest.mark.parametrize("wrap", [lambda judge: judge, InvertedJudge])
def test_blank_texts_have_no_score(wrap: type[InvertedJudge], tmp_path: Path) -> None:
    inner = Lengths()
    for judge in (wrap(inner), CachedJudge(wrap(inner), tmp_path)):
        scores = judge.score(["", "abc", " \n\t", "a"])
        assert np.isnan(scores).tolist() == [True, False, True, False]
    assert set(inner.asked) == {"abc", "a"}
    assert len(Lengths().score([])) == 0


def test_scores_outside_the_range_are_refused_and_not_kept(tmp_path: Path) -> None:
    class Wrong(Lengths):
        def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
            yield range(len(texts)), np.full(len(texts), 1.5)

    with pytest.raises(ModelError, match="gave 1.5 for 'film'"):
        Wrong().score(["film"])
    for _ in range(2):
        with pytest.raises(ModelError, match="gave 1.5 for 'film'"):
            CachedJudge(Wrong(), tmp_path).score(["", "film"])


# --- the cache ---


def test_a_text_is_judged_once(tmp_path: Path) -> None:
    inner = Lengths()
    judge = CachedJudge(inner, tmp_path)
    texts = ["abc", "a", "abc", "", "abcdef", "a"]
    wanted = [0.3, 0.1, 0.3, np.nan, 0.6, 0.1]
    np.testing.assert_allclose(judge.score(texts), wanted)
    assert sorted(inner.asked) == ["a", "abc", "abcdef"]
    np.testing.assert_allclose(CachedJudge(inner, tmp_path).score([*texts, "new"]), [*wanted, 0.3])
    assert inner.asked[3:] == ["new"]
    other = Lengths("others")
    CachedJudge(other, tmp_path).score(["abc"])
    assert other.asked == ["abc"]
    assert judge.name == "lengths"


@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.lists(st.text("ab \n", max_size=4), max_size=12), max_size=3))
def test_a_cached_judge_says_what_the_judge_says(calls: list[list[str]]) -> None:
    inner = Lengths()
    with tempfile.TemporaryDirectory() as folder:
        for texts in calls:
            np.testing.assert_array_equal(CachedJudge(inner, folder).score(texts), Lengths().score(texts))
    assert len(inner.asked) == len(set(inner.asked))


def test_more_texts_than_a_query_takes(tmp_path: Path) -> None:
    texts = [f"{n}" for n in range(1203)]
    inner = Lengths()
    first = CachedJudge(inner, tmp_path).score(texts)
    np.testing.assert_array_equal(CachedJudge(inner, tmp_path).score(texts[::-1]), first[::-1])
    assert len(inner.asked) == 1203


def test_what_was_scored_before_a_failure_stays(tmp_path: Path) -> None:
    class Fails(Lengths):
        def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
            for n, scored in enumerate(super().judge(texts)):
                if n == 2:
                    raise ModelError("the connection is lost.")
                yield scored

    with pytest.raises(ModelError, match="lost"):
        CachedJudge(Fails(), tmp_path).score(["a", "b", "c", "d", "e", "f"])
    inner = Lengths()
    CachedJudge(inner, tmp_path).score(["a", "b", "c", "d", "e", "f"])
    assert sorted(inner.asked) == ["a", "b"]


class Neighbours(Judge):
    """Scores that depend on the whole company of a text, as those of a batched model do in their last digits."""

    name = "neighbours"
    together = 4

    def __init__(self, fails_after: int | None = None):
        self.fails_after, self.calls = fails_after, 0

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        company = sum(map(len, texts)) + len(texts) / 10
        for n, text in enumerate(texts):
            if self.calls == self.fails_after:
                raise ModelError("the machine went down.")
            self.calls += 1
            yield [n], np.array([(len(text) + company / 1000) / (1 + company)])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("ab ", max_size=4), max_size=14),
    earlier=st.lists(st.lists(st.text("ab ", max_size=4), max_size=9), max_size=3),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
def test_scores_do_not_depend_on_what_the_cache_held(
    texts: list[str], earlier: list[list[str]], stops: list[int]
) -> None:
    """Nothing, other texts, or part of these, from runs that stopped after any number of scores."""
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as warm:
        expected = CachedJudge(Neighbours(), empty).score(texts)
        for others in earlier:
            CachedJudge(Neighbours(), warm).score(others)
        for stop in stops:
            with contextlib.suppress(ModelError):
                CachedJudge(Neighbours(stop), warm).score(texts)
        np.testing.assert_array_equal(CachedJudge(Neighbours(), warm).score(texts), expected)
        again = Neighbours()
        np.testing.assert_array_equal(CachedJudge(again, warm).score(texts), expected)
        assert again.calls == 0


@pytest.mark.parametrize("kind", ["classifier", "not:classifier", "linear", "reward"])
def test_every_judge_gives_the_same_digits_after_a_kill(
    kind: str, toy: Path, linear: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RadV.from_backbone(toy, attributes=["praise"]).save_pretrained(tmp_path / "reward")
    make_classifier(tmp_path / "classifier")
    monkeypatch.setattr("radq.evaluation.judges.readers.BATCH_SIZE", 3)
    for batched in (TransformersReader, RewardJudge):
        monkeypatch.setattr(batched, "together", 7)
    judge = load_judge(f"{kind}:{tmp_path / kind.removeprefix('not:')}")
    assert judge.together == 7
    texts = [f"{'a very ' * (n % 5)} fine {'film ' * (n % 7)} {'plot' * (n % 2)}" for n in range(40)]
    expected = CachedJudge(judge, tmp_path / "empty").score(texts)
    CachedJudge(judge, tmp_path / "warm").score(texts[3:9] + texts[:2])
    for kept in (1, 3, 6):  # as if a kill had come after so many scores of the first group
        scores = CachedJudge(judge, tmp_path / "warm").judge(texts)
        for _ in range(kept):
            next(scores)
        scores.close()  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(CachedJudge(judge, tmp_path / "warm").score(texts), expected)


def test_a_judge_that_reads_one_by_one_does_not_care_about_company(tmp_path: Path) -> None:
    judge = load_judge(f"onnx:{make_onnx(tmp_path / 'judge', make_table().tolist())}")
    assert judge.together == 1
    np.testing.assert_array_equal(judge.score(TEXTS), [judge.score([text])[0] for text in TEXTS])


WORKERS = """
import json, os, signal, sys
import numpy as np
from radq.evaluation.judges.base import CachedJudge, Judge
class Logs(Judge):
    name = "logs"
    def __init__(self, log, kill_after):
        self.log, self.kill_after = log, kill_after
    def judge(self, texts):
        for n, text in enumerate(texts):
            if n == self.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(self.log, "a") as stream:
                stream.write(text + "\\n")
            yield [n], np.array([int(text) / 1000])
def work(log, first, last, kill_after):
    scores = CachedJudge(Logs(log, kill_after), sys.argv[1]).score([str(n) for n in range(first, last)])
    os._exit(0 if np.allclose(scores, np.arange(first, last) / 1000) else 1)
for jobs in json.loads(sys.argv[2]):
    children = [os.fork() or work(*job) for job in jobs]
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def run_workers(cache: Path, *rounds: list[tuple[str, int, int, int | None]]) -> list[list[int]]:
    """Exit codes of processes that judge the numbers from `first` to `last`; those of a round work side by side."""
    command = [sys.executable, "-c", WORKERS, str(cache), json.dumps(rounds)]
    done = subprocess.run(command, env=os.environ, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def count_rows(cache: Path) -> tuple[int, int]:
    with contextlib.closing(sqlite3.connect(cache / "judges.sqlite")) as database:
        return database.execute("SELECT count(*), count(DISTINCT text) FROM scores").fetchone()


def test_a_kill_loses_nothing_that_was_scored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = run_workers(tmp_path / "cache", [(str(log), 0, 400, 3)], [(str(log), 0, 400, 2)])
    assert killed == [[-signal.SIGKILL], [-signal.SIGKILL]]
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]
    assert count_rows(tmp_path / "cache") == (5, 5)


def test_processes_share_a_cache(tmp_path: Path) -> None:
    jobs = [(str(tmp_path / f"log{n}"), 20 * n, 20 * n + 60, None) for n in range(3)]
    assert run_workers(tmp_path / "cache", jobs) == [[0, 0, 0]]
    assert count_rows(tmp_path / "cache") == (100, 100)


def test_a_file_that_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "judges.sqlite").write_text("this is no database, only some text of some length " * 30)
    with pytest.raises(DataError, match=r"judges\.sqlite.*remove the file"):
        CachedJudge(Lengths(), tmp_path).score(["a"])


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CachedJudge(Lengths()).score(["a"])
    assert (tmp_path / "radq" / "judges.sqlite").is_file()


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
