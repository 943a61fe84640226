"""What a name stands for is found once in a command, and handed down; another call sees what has changed."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from radq.cli import main
from radq.models.kinds import RadQ
from radq.sources import model_source
from radq.sources.model_source import ModelSource


def count_calls(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, argument: int = 0) -> list[str]:
    """A list of one argument of all calls of a function from now on."""
    original, calls = getattr(place, name), []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(args[argument]))
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, note)
    return calls


def test_a_generation_resolves_its_base_once_and_loads_one_tokenizer(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readout = RadQ.from_base(toy, ["praise"])
    readout.tokenizer = None  # as those that radq brings along, whose tokenizer is that of their base model
    readout.save_pretrained(tmp_path / "praise")
    sources = count_calls(monkeypatch, ModelSource, "__init__", argument=1)
    asked = count_calls(monkeypatch, model_source, "require_source")
    adapters = count_calls(monkeypatch, model_source, "find_adapter")
    tokenizers = count_calls(monkeypatch, AutoTokenizer, "from_pretrained")
    guide = f"{tmp_path / 'praise'}:praise=3"
    assert main(["generate", "--base", str(toy), "--guide", guide, "--prompt", "the film was", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generations"][0]["text"]
    for calls in (sources, asked, adapters, tokenizers):
        assert calls.count(str(toy)) == 1
    assert len(tokenizers) == 1


def test_a_source_is_passed_where_a_name_may_be_passed(toy: Path) -> None:
    source = ModelSource.find(toy)
    assert ModelSource.find(source) is source
    assert ModelSource.find(source, revision="main") is not source
    assert RadQ.from_backbone(source, ["praise"]).tokenizer is source.tokenizer


def test_a_later_call_sees_a_folder_that_has_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    before = ModelSource.find(tmp_path)
    assert before.config == {"model_type": "gpt2"}
    first = before.fingerprint
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert ModelSource.find(str(tmp_path)).config == {"model_type": "llama"}
    assert ModelSource.find(tmp_path).fingerprint != first
