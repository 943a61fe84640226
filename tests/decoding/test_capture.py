"""Captured steps on a GPU give the texts of steps that run one operation after the other."""

import warnings
from typing import Any

import pytest
import torch
from baselines import make_guide
from engine_requests import make_any_guide, make_request
from families import make_lm
from gpu import on_gpu
from torch import nn

from radq.decoding.capture import Captures, is_watched
from radq.decoding.engine import Engine
from radq.guides.base import Advice, Guide
from radq.guides.meter import Meter


def test_a_hook_turns_captures_off_and_one_line_says_so() -> None:
    lm: Any = make_lm("gpt2")
    assert not is_watched(lm)
    assert Captures([lm], None, on=True).on
    handle = lm.transformer.h[0].register_forward_hook(lambda *_: None)
    assert is_watched(lm)
    with pytest.warns(UserWarning, match="a forward hook of .* must be called in each; remove it"):
        assert not Captures([lm], None, on=True).on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Captures([lm], None, on=False).on
    handle.remove()
    assert not is_watched(lm)


def test_the_hooks_of_a_meter_do_not() -> None:
    with Meter(make_guide("dexperts")) as meter:
        assert not any(is_watched(reader.model) for reader in meter.readers)


def test_a_meter_counts_repeated_steps() -> None:
    meter = Meter(make_guide("dexperts"))
    before = meter.counts
    meter.steps, meter.tokens, meter.continuations.calls, meter.continuations.tokens = 1, 8, 1, 16
    counted = meter.take_back(before)
    assert meter.counts == before
    meter.add(counted, 0.5)  # half of the rows are in use
    assert meter.counts == (1, 4, 1, 8)


class Counting(Guide):
    """A guide of somebody else, which counts its steps."""

    beta = ()
    readers = ()
    steps = 0

    def start(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return None

    def advise(self, state: Any, candidates: Any, beta: Any = None) -> Advice:
        self.steps += 1
        return Advice(torch.zeros(candidates.shape), state)

    def advance(self, state: Any, tokens: Any) -> Any:
        return state


def test_guides_that_do_not_say_so_are_not_captured() -> None:
    """Python does not run in a captured step, so a guide that counts would count wrong."""
    lm, counting, own = make_lm("gpt2"), Counting(), make_guide("dexperts")
    for guide in (counting, own + counting, Meter(counting)):
        with pytest.warns(UserWarning, match="does not say by `capturable = True`"):
            assert not Captures([lm], guide, on=True).on
    for guide in (own, own + own, Meter(own)):
        assert Captures([lm], guide, on=True).on


def test_models_on_several_devices_are_not_captured() -> None:
    lm: Any = make_lm("gpt2")
    assert Captures([lm, make_lm("llama")], None, on=True).on
    lm.transformer.h[0].to("meta")
    assert not Captures([lm], None, on=True).on


def test_nothing_is_captured_without_a_gpu() -> None:
    assert not Engine(make_lm("gpt2")).decoder.captures.on


@on_gpu
@pytest.mark.parametrize("name", ["none", "q", "v", "dexperts", "gedi", "sum"])
def test_captured_steps_give_the_same_texts(name: str, lm_folders: Any) -> None:
    lm, guide = make_lm("llama").double().cuda(), make_any_guide(name, lm_folders)
    for part in getattr(guide, "guides", [guide]):
        for reader in () if part is None else part.readers:
            reader.model.cuda()
        if isinstance(getattr(part, "model", None), nn.Module):
            part.model.cuda()
    texts = []
    for captures in (False, True):
        engine = Engine(lm, guide, captures=captures)
        tickets = [engine.submit(make_request(number, length=12)) for number in range(20)]
        for _ in engine.run():
            pass
        texts.append([[row[0] for row in ticket.rows] for ticket in tickets])
    assert texts[0] == texts[1]
