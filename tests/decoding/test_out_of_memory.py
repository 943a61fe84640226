"""Memory that runs out at any operation of a step: every text comes whole and once, or ends with an error."""

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from engine_requests import make_any_guide, make_request
from families import make_lm, make_number_tokenizer
from instruments import FailOnce

from radq import generate, stream
from radq.decoding import engine as engine_module
from radq.decoding.decoder import Decoder
from radq.decoding.engine import Engine
from radq.decoding.request import Ticket

NAMES = [("none", 2), ("q", 0), ("v", 2), ("dexperts", 0), ("gedi", 0), ("sum", 2)]  # and how late results come
RUNS = [3, pytest.param(12, marks=pytest.mark.slow)]  # in each of them, another operation fails


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], FailOnce]:
    """Return a function after which the operation with some number, counted in all steps, finds no memory."""
    step = Engine.step

    def arrange(number: int | None) -> FailOnce:
        mode = FailOnce(number)
        monkeypatch.setattr(engine_module, "_HALVED", WeakKeyDictionary())

        def failing(self: Engine) -> Any:
            with mode:
                return step(self)

        monkeypatch.setattr(Engine, "step", failing)
        return mode

    warnings.simplefilter("ignore")
    return arrange


def every(count: int, runs: int) -> range:
    """Choose the numbers of operations that fail, one in each run."""
    return range(0, count, max(1, count // runs))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("name", "lag"), NAMES)
def test_texts_of_an_engine_are_whole(
    name: str, lag: int, runs: int, fail_at: Any, lm_folders: dict[str, Path]
) -> None:
    lm, guide = make_lm("llama").double(), make_any_guide(name, lm_folders)

    def run() -> list[Ticket]:
        engine = Engine(lm, guide, max_rows=3)
        engine.lag = lag
        tickets = [engine.submit(make_request(number, length=3 + number)) for number in range(4)]
        drawn = {ticket: [] for ticket in tickets}
        for result in engine.run():
            for ticket, row in zip(result.tickets, result.numbers, strict=True):
                drawn[ticket].append(row[0])
        for ticket, tokens in drawn.items():  # rows may run past their stop tokens
            assert tokens[: len(ticket.rows)] == [row[0] for row in ticket.rows]
        return tickets

    mode, whole = fail_at(None), run()
    for number in every(mode.count, runs):
        fail_at(number)
        for ticket, undisturbed in zip(run(), whole, strict=True):
            assert ticket.finish_reason == undisturbed.finish_reason
            np.testing.assert_allclose(np.array(ticket.rows), np.array(undisturbed.rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("name", ["none", "q", "sum"])
def test_a_stream_yields_each_token_once(name: str, runs: int, fail_at: Any, lm_folders: dict[str, Path]) -> None:
    lm, guide, tokenizer = make_lm("llama").double(), make_any_guide(name, lm_folders), make_number_tokenizer()
    prompts = [[5, 6, 7], [9]]
    texts = [one.token_ids for one in generate(lm, tokenizer, prompts, guide, samples=2, max_new_tokens=5)]

    def run() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in texts]
        for step in stream(lm, tokenizer, prompts, guide, samples=2, max_new_tokens=5):
            for row, token in zip(step.rows.tolist(), step.tokens.tolist(), strict=True):
                found[row].append(token)
        return found

    mode = fail_at(None)
    assert run() == texts
    for number in every(mode.count, runs):
        fail_at(number)
        assert run() == texts


def test_every_half_of_a_step_may_fail(fail_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no operation of torch runs: at the doors of the decoder, and when results are taken."""
    lm = make_lm("gpt2").double()
    fail_at(None)
    expected = [_tokens(one) for one in _run(lm)]
    doors = [(Decoder, one) for one in ("draw", "read", "add", "keep")] + [(Engine, "_take")]
    for (owner, name), lag, number in product(doors, (0, 2), (0, 4)):
        whole, left = getattr(owner, name), list(range(number + 1))

        def fail(self: Any, *given: Any, whole: Any = whole, left: Any = left, **options: Any) -> Any:
            if left and not left.pop():
                raise engine_module.torch.OutOfMemoryError("none")
            return whole(self, *given, **options)

        fail_at(None)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert [_tokens(one) for one in _run(lm, lag)] == expected, (name, lag, number)


def _run(lm: Any, lag: int = 0) -> list[Ticket]:
    engine = Engine(lm, max_rows=3)
    engine.lag = lag
    tickets = [engine.submit(make_request(number, length=3 + number)) for number in range(4)]
    for _ in engine.run():
        pass
    return tickets


def _tokens(ticket: Ticket) -> list[int]:
    return [int(row[0]) for row in ticket.rows]
