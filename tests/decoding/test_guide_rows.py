"""Rows with different sets of guides in one engine: each text is that of its own guides alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from baselines import make_guide
from engine_requests import make_request
from families import make_lm, make_readout, make_reward
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.engine import Engine
from radq.decoding.guide_rows import fill_gaps
from radq.guides.base import Advice, Guide
from radq.guides.reward import RewardGuide

SETS = [own for size in range(4) for own in combinations(range(3), size)]  # 8 sets of three guides


def make_guides(kinds: str, folder: Path) -> list[Guide]:
    if kinds == "readouts":
        one = RewardGuide(make_readout("q", folder, num_layers=1).double(), {"nice": 4.0})
        two = RewardGuide(make_readout("q", folder, num_layers=2, width=5).double(), {"nice": 3.0, "rude": -4.0})
        return [one, two, make_guide("gedi", "llama")]
    q, v = (make_reward(kind, folder).double() for kind in "qv")
    return [RewardGuide(q, {"nice": 4.0, "rude": -6.0}), RewardGuide(v, {"rude": 5.0}), make_guide("dexperts", "llama")]


def submit(engine: Engine, number: int, guides: tuple[int, ...]) -> Any:
    return engine.submit(make_request(number, length=3 + number % 7, guides=guides))


@pytest.mark.parametrize(
    ("kinds", "padded"),
    [
        ("readouts", False),
        ("transformers", True),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("readouts", True), ("transformers", False))),
    ],
)
def test_texts_of_eight_sets_are_those_of_each_alone(
    kinds: str, padded: bool, lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go at any step; padded as where steps are captured or compiled, with rows that nobody uses."""
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    lm, guides = make_lm("llama").double(), make_guides(kinds, lm_folders["llama"])
    engine, random = Engine(lm, reduce(add, guides), max_rows=9, compile=padded), np.random.default_rng(1)
    tickets: list[Any] = []
    while len(tickets) < 32 or engine.busy:
        for _ in range(random.integers(0, 5) if len(tickets) < 32 else 0):
            tickets.append(submit(engine, len(tickets), SETS[random.integers(0, 8)]))
        engine.prompt_budget = [100, 3][random.integers(0, 2)]
        engine.step()
    for number, ticket in enumerate(tickets):
        own = [guides[one] for one in ticket.request.guides]
        alone = submit(Engine(lm, reduce(add, own) if own else None), number, tuple(range(len(own))))
        tokens = [token.id for token in alone]
        assert [int(row[0]) for row in ticket.rows] == tokens
        assert ticket.finish_reason == alone.finish_reason
        for row, expected in zip(ticket.rows, alone.rows, strict=True):
            np.testing.assert_allclose(row[:7], expected[:7], rtol=1e-6, atol=1e-6)


def test_a_guide_reads_and_scores_the_rows_that_ask_for_it_alone(lm_folders: dict[str, Path]) -> None:
    lm, guides = make_lm("llama").double(), make_guides("transformers", lm_folders["llama"])
    shapes: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    for number, guide in enumerate(guides):

        def advise(state: Any, candidates: Any, beta: Any, number: int = number, whole: Any = guide.advise) -> Any:
            shapes[number].append(tuple(candidates.shape))
            return whole(state, candidates, beta)

        guide.advise = advise  # pyright: ignore[reportAttributeAccessIssue]
    engine = Engine(lm, reduce(add, guides))
    steerings = {0: 5, 1: None, 3: 3}  # widths of the requests with these numbers
    tickets = {number: submit(engine, number, ((), (0,), (1,))[place]) for place, number in enumerate(steerings)}
    engine.step()
    assert all(len(ticket.rows) == 1 for ticket in tickets.values())
    assert shapes[2] == []
    assert [len(found) for found in shapes.values()] == [1, 1, 0]
    assert shapes[1] == [(1, 3)]  # though another row has the whole vocabulary


@dataclass(frozen=True)
class Lengths:
    """The state of a guide that runs no model: the number of tokens of each text."""

    values: Tensor

    def select(self, rows: Tensor) -> "Lengths":
        return Lengths(self.values[rows])

    @staticmethod
    def join(states: "Sequence[Lengths]") -> "Lengths":
        return Lengths(torch.cat([state.values for state in states]))

    def map_readings(self, change: Any) -> "Lengths":
        return self

    def rewind(self, n: int) -> "Lengths":
        return Lengths(self.values - n)


class LengthGuide(Guide):
    """Wants the token with the number of the text's tokens."""

    readers: Sequence[Any] = ()  # pyright: ignore[reportIncompatibleMethodOverride]
    beta = (50.0,)

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Lengths:
        assert attention_mask is not None
        return Lengths(attention_mask.sum(1))

    def advise(self, state: Lengths, candidates: Tensor, beta: Tensor | None = None) -> Advice:
        return Advice(self.beta_rows(beta, torch.zeros(len(candidates))) * (candidates == state.values[:, None]), state)

    def advance(self, state: Lengths, tokens: Tensor) -> Lengths:
        return Lengths(state.values + 1)


@pytest.mark.parametrize("beside", [False, True])
def test_a_state_without_a_model_ends_with_its_texts(beside: bool, lm_folders: dict[str, Path]) -> None:
    """All texts of the guide leave before the next ones come."""
    guide = LengthGuide() + make_guide("dexperts", "llama") if beside else LengthGuide()
    engine = Engine(make_lm("llama").double(), guide, max_rows=2)
    steering = Steering(None, temperature=0, kl_budget=None)
    for number in (1, 2, 3, 4, 7):
        request = make_request(number, 3, steering=steering, stops=frozenset(), guides=(0,))
        length = len(request.prompt)
        tickets = [engine.submit(request) for _ in range(1 + number % 2)]
        assert [[token.id for token in ticket] for ticket in tickets] == [
            [length, length + 1, length + 2] for _ in tickets
        ]


def test_gaps_are_filled_by_the_last_rows() -> None:
    assert fill_gaps([0, 2, 3, 5]) == [0, 5, 2, 3]
    assert fill_gaps([]) == []
