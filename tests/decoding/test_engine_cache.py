"""Engines are kept for the next call only as long as nothing changes that a captured step depends on."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_lm, make_number_tokenizer, make_reward
from peft import LoraConfig, get_peft_model

from radq import generate
from radq.decoding.capture import describe
from radq.decoding.engine import KEPT, MOST_KEPT, Engine, keep_engine, take_engine
from radq.guides.meter import Meter
from radq.guides.reward import RewardGuide


def change_weights(lm: Any) -> None:
    with torch.no_grad():
        next(lm.parameters()).mul_(2)


def replace_weights(lm: Any) -> None:
    parameter = next(lm.parameters())
    parameter.data = parameter.data.clone()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": change_weights,
    "other weights": replace_weights,
    "dtype": lambda lm: lm.double(),
    "training": lambda lm: lm.train(),
    "hook": lambda lm: lm.register_forward_hook(lambda *_: None),
    "configuration": lambda lm: setattr(lm.config, "sliding_window", 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_change_of_a_model_is_noticed(change: Callable[[Any], Any]) -> None:
    lm = make_lm("llama")
    before = describe(lm)
    assert describe(lm) == before
    change(lm)
    assert describe(lm) != before


def test_adapters_that_are_turned_off_are_noticed() -> None:
    lm: Any = get_peft_model(make_lm("llama"), LoraConfig(target_modules=["q_proj"]))
    before = describe(lm)
    with lm.disable_adapter():
        assert describe(lm) != before
    assert describe(lm) == before


def test_changes_of_a_guide_are_noticed(lm_folders: dict[str, Path]) -> None:
    guide = RewardGuide(make_reward("q", lm_folders["llama"]), {"nice": 1.0})
    before = describe(guide)
    guide.clamp = False
    assert describe(guide) != before
    guide.clamp = True
    assert describe(guide) == before
    with torch.no_grad():
        guide.model.head.weight.add_(1)  # pyright: ignore
    assert describe(guide) != before


GUIDE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda model: change_weights(model.head),
    "other weights": lambda model: replace_weights(model.head),
    "dtype": lambda model: model.half(),
}


@pytest.mark.parametrize("change", GUIDE_CHANGES.values(), ids=GUIDE_CHANGES)
@pytest.mark.parametrize("part", [0, 1])
def test_changes_of_the_parts_of_a_sum_are_noticed(
    change: Callable[[Any], Any], part: int, lm_folders: dict[str, Path]
) -> None:
    guides = [RewardGuide(make_reward("q", lm_folders["llama"]), {"nice": 1.0}) for _ in range(2)]
    both = guides[0] + guides[1]
    before = describe(both), describe(Meter(both))
    assert before == (describe(both), describe(Meter(both)))
    change(guides[part].model)
    assert describe(both) != before[0]
    assert describe(Meter(both)) != before[1]


def test_an_engine_is_used_again_until_something_changes() -> None:
    """With compile=True, since without a GPU nothing else is worth keeping; nothing is compiled before a step."""
    lm = make_lm("llama")
    engine = take_engine(lm, None, None, compile=True)
    keep_engine(engine)
    assert take_engine(lm, None, None) is not engine
    assert take_engine(lm, None, 3, compile=True) is not engine
    assert take_engine(lm, None, None, compile=True) is engine
    assert take_engine(lm, None, None, compile=True) is not engine  # another caller has it
    keep_engine(engine)
    change_weights(lm)
    assert take_engine(lm, None, None, compile=True) is not engine


def test_engines_that_need_much_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm("llama")
    sizes = {3: 2**30, 4: 2**30, 5: 2**30, 6: 2**32}  # by batch size
    monkeypatch.setattr(Engine, "nbytes", property(lambda engine: sizes[engine.max_rows]))
    engines = [Engine(lm, max_rows=size, compile=True) for size in (3, 4, 5)]
    engines[0].decoder._done = torch.zeros(7)
    for engine in engines:
        keep_engine(engine)
    assert not engines[0].decoder.capacity  # its memory is free, though somebody still holds the engine
    assert [engine.max_rows for engine in vars(lm)[KEPT]] == [4, 5]
    keep_engine(Engine(lm, max_rows=6, compile=True))
    assert not vars(lm)[KEPT]


def test_copies_of_a_model_have_no_engines(tmp_path: Path) -> None:
    lm = make_lm("llama")
    keep_engine(take_engine(lm, None, None, compile=True))
    assert vars(lm)[KEPT]
    assert not vars(copy.deepcopy(lm))[KEPT]
    for _ in range(MOST_KEPT + 2):
        keep_engine(Engine(lm, compile=True))
    assert len(vars(lm)[KEPT]) == MOST_KEPT
    lm.save_pretrained(tmp_path)


@pytest.mark.slow
def test_compiled_models_give_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled to plain operations of torch, since a machine may have no compiler."""
    compile_, graphs = torch.compile, []

    def note_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward, **_: compile_(forward, backend=note_graph, dynamic=False))
    lm, tokenizer = make_lm("gpt2").double(), make_number_tokenizer()
    options: dict[str, Any] = {"samples": 2, "max_new_tokens": 6}
    plain = generate(lm, tokenizer, ["5 9", "11"], **options)
    for _ in range(2):  # the second time with the engine that was kept
        found = generate(lm, tokenizer, ["5 9", "11"], compile=True, **options)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert graphs  # something was compiled


def test_what_a_meter_counts_does_not_make_another_engine(lm_folders: dict[str, Path]) -> None:
    """A sweep calls with one metered guide and many strengths."""
    lm, guide = make_lm("llama"), RewardGuide(make_reward("q", lm_folders["llama"]), {"nice": 1.0})
    with Meter(guide) as meter:
        engine = take_engine(lm, meter, None, compile=True)
        keep_engine(engine)
        meter.steps += 3
        assert take_engine(lm, meter, None, compile=True) is engine
