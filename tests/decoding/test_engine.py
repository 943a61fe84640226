"""The engine: requests that join and leave are continued as alone, and no step waits for the device."""

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import make_any_guide, make_request
from families import VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from instruments import CountWaiting
from transformers import RepetitionPenaltyLogitsProcessor

from radq import generate
from radq.decoding import engine as engine_module
from radq.decoding.config import Steering
from radq.decoding.decoder import Decoder
from radq.decoding.engine import Engine
from radq.decoding.request import Request, Ticket
from radq.errors import MemoryLimitError, RewardValueError
from radq.guides.base import Guide
from radq.guides.reward import RewardGuide
from radq.models.prefill import Prefill
from radq.models.slots import takes_slots

GUIDES = ["none", "q", "sum", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v", "dexperts", "gedi"))]


def continue_alone(lm: Any, guide: Guide | None, request: Request) -> Ticket:
    ticket = Engine(lm, guide).submit(request)
    assert len(list(ticket)) >= 1
    return ticket


@pytest.mark.parametrize("name", GUIDES)
def test_requests_that_join_and_leave_are_continued_as_alone(name: str, lm_folders: dict[str, Path]) -> None:
    lm, guide = make_lm("llama").double(), make_any_guide(name, lm_folders)
    requests = [make_request(number, length=2 + number % 9) for number in range(25)]
    engine, random = Engine(lm, guide, max_rows=6), np.random.default_rng(0)
    tickets: list[Ticket] = []
    while len(tickets) < len(requests) or engine.busy:
        for _ in range(random.integers(0, 3)):
            if len(tickets) < len(requests):
                tickets.append(engine.submit(requests[len(tickets)]))
        engine.step()
        assert len(engine.running) <= 6
    for ticket in tickets:
        alone = continue_alone(lm, guide, ticket.request)
        assert [row[0] for row in ticket.rows] == [row[0] for row in alone.rows]
        assert ticket.finish_reason == alone.finish_reason
        np.testing.assert_allclose(np.array(ticket.rows), np.array(alone.rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "v", "gedi"])
def test_results_that_come_late_change_no_text(name: str, lm_folders: dict[str, Path]) -> None:
    """As on a GPU: rows run past their stop tokens, and what they draw there is thrown away."""
    lm, guide = make_lm("llama").double(), make_any_guide(name, lm_folders)
    engine = Engine(lm, guide, max_rows=4)
    engine.lag = 2
    stops = frozenset(range(0, VOCAB, 5))
    tickets = [engine.submit(make_request(number, length=2 + number % 9, stops=stops)) for number in range(15)]
    drawn = sum(len(result.tickets) for result in engine.run())
    for ticket in tickets:
        alone = continue_alone(lm, guide, ticket.request)
        assert [row[0] for row in ticket.rows] == [row[0] for row in alone.rows]
        assert ticket.finish_reason == alone.finish_reason
    assert drawn > sum(len(ticket.rows) for ticket in tickets)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 4))
def test_texts_do_not_depend_on_the_number_of_rows(numbers: list[int], max_rows: int) -> None:
    lm = make_lm("gpt2").double()
    engine = Engine(lm, max_rows=max_rows)
    tickets = [engine.submit(make_request(number)) for number in numbers]
    for _ in engine.run():
        pass
    for ticket in tickets:
        assert [row[0] for row in ticket.rows] == [row[0] for row in continue_alone(lm, None, ticket.request).rows]


def test_strengths_belong_to_requests(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("llama").double(), make_reward("q", lm_folders["llama"]).double()
    engine = Engine(lm, RewardGuide(model, {"nice": 1.0}))
    tickets = [engine.submit(make_request(4, beta=(beta,))) for beta in (0.0, 5.0, -30.0)]
    for _ in engine.run():
        pass
    for ticket in tickets:
        own = RewardGuide(model, {"nice": float(ticket.request.beta[0])})  # pyright: ignore[reportOptionalSubscript]
        alone = continue_alone(lm, own, make_request(4))
        assert [row[0] for row in ticket.rows] == [row[0] for row in alone.rows]


# --- no waiting ---


@pytest.mark.parametrize("name", ["none", "q", "v", "dexperts", "gedi", "sum"])
def test_no_step_waits_for_the_device(name: str, lm_folders: dict[str, Path]) -> None:
    lm, guide = make_lm("llama").double().eval(), make_any_guide(name, lm_folders)
    decoder = Decoder(lm, guide)
    requests = [make_request(number, stops=frozenset()) for number in range(3)]
    decoder.add([[5, 6, 7], [8]], [0, 1, 1], requests, np.full((3, 9), 0.4), capacity=3, width=64)
    decoder.draw(np.ones(decoder.count, dtype=bool))
    decoder.read()
    with CountWaiting() as count:
        for _ in range(3):
            decoder.draw(np.ones(decoder.count, dtype=bool))
            decoder.read()
    assert count.found == []


def test_drawn_tokens_do_not_keep_the_states_of_candidates(lm_folders: dict[str, Path]) -> None:
    """A captured step keeps what it has drawn: with the states of all candidates, each shape would fill gigabytes."""
    lm, guide = make_lm("llama").double().eval(), make_any_guide("v", lm_folders)
    assert guide is not None
    decoder = Decoder(lm, guide)
    decoder.add([[5, 6, 7]], [0], [make_request(0, stops=frozenset())], np.full((1, 9), 0.4), capacity=1, width=64)
    drawn = decoder.draw(np.ones(1, dtype=bool))
    siblings = weakref.ref(decoder.members[0].readings[0].siblings.hidden)
    assert siblings() is not None
    decoder.read()
    assert drawn.tokens.shape == (1,)
    assert siblings() is None


def test_the_count_of_waiting_operations_can_fail() -> None:
    with CountWaiting() as count:
        assert bool((torch.ones(3) > 0).all())
    assert count.found


# --- bad input ---


def test_a_row_without_numbers_ends_alone(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("llama").double(), make_reward("q", lm_folders["llama"]).double()
    guide = RewardGuide(model, {"nice": 1.0}, clamp=False)
    engine = Engine(lm, guide)
    good, bad = engine.submit(make_request(4)), engine.submit(make_request(4, beta=(float("inf"),)))
    with pytest.raises(RewardValueError, match="finite"):
        list(bad)
    assert bad.finish_reason == "error"
    assert [token.id for token in good] == [row[0] for row in continue_alone(lm, guide, make_request(4)).rows]


def test_a_guide_without_numbers_does_not_end_texts_of_strength_0(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("llama").double(), make_reward("q", lm_folders["llama"]).double()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    engine = Engine(lm, RewardGuide(model, {"nice": 1.0, "rude": 1.0}))
    plain, *steered = (engine.submit(make_request(4, beta=beta)) for beta in [(0.0, 0.0), (0.0, 2.0), None])
    alone = continue_alone(lm, None, make_request(4))
    assert [token.id for token in plain] == [row[0] for row in alone.rows]
    assert plain.finish_reason == alone.finish_reason
    assert [ticket.finish_reason for ticket in steered] == ["error", "error"]


def test_a_part_of_a_sum_without_numbers_does_not_count_at_strength_0(lm_folders: dict[str, Path]) -> None:
    lm = make_lm("llama").double()
    fine, broken = (make_reward("q", lm_folders["llama"]).double() for _ in range(2))
    with torch.no_grad():
        broken.head.weight.fill_(torch.nan)
    guide = RewardGuide(fine, {"nice": 5.0})
    engine = Engine(lm, guide + RewardGuide(broken, {"rude": 1.0}))
    steered, ended = (engine.submit(make_request(4, beta=beta)) for beta in [(5.0, 0.0), (5.0, 1.0)])
    alone = continue_alone(lm, guide, make_request(4))
    assert [token.id for token in steered] == [row[0] for row in alone.rows]
    assert (steered.finish_reason, ended.finish_reason) == (alone.finish_reason, "error")


def test_a_client_that_goes_away_frees_its_row() -> None:
    engine = Engine(make_lm("gpt2"), max_rows=2)
    first, second, third = (engine.submit(make_request(n, length=30, stops=frozenset())) for n in range(3))
    engine.step()
    assert third in engine.waiting
    first.cancel()
    engine.step()
    assert engine.running == [second, third]
    assert len(list(first)) == 1
    assert first.finish_reason == "cancelled"
    assert len(list(third)) == 30


def test_full_memory_halves_the_rows_and_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm("gpt2").double()
    requests = [make_request(number, length=6) for number in range(8)]
    expected = [[row[0] for row in continue_alone(lm, None, request).rows] for request in requests]
    draw = Decoder.draw

    def draw_few(self: Decoder, *arguments: Any) -> Any:
        if self.count > 3 and self._steerings:
            raise torch.OutOfMemoryError("no memory")
        return draw(self, *arguments)

    monkeypatch.setattr(Decoder, "draw", draw_few)
    engine = Engine(lm)
    tickets = [engine.submit(request) for request in requests]
    with pytest.warns(UserWarning, match="[24] texts at once"):
        for _ in engine.run():
            pass
    assert [[row[0] for row in ticket.rows] for ticket in tickets] == expected
    monkeypatch.setattr(Decoder, "draw", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none")))
    with pytest.raises(MemoryLimitError, match="a single text"):
        list(Engine(lm).submit(requests[0]))


def test_a_shortage_of_memory_is_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "CALM", 8)
    engine, keep = Engine(make_lm("gpt2")), Decoder.read

    def read_few(self: Decoder) -> None:
        if self.count > 2:
            raise torch.OutOfMemoryError("no memory")
        keep(self)

    for number in range(12):
        engine.submit(make_request(number, length=6, stops=frozenset()))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "read", read_few)
        with pytest.warns(UserWarning, match="texts at once for some time"):
            [engine.step() for _ in range(6)]
    assert len(engine.running) <= 2
    together = []
    while engine.busy:
        engine.step()
        together.append(len(engine.running))
    assert max(together) == 4  # after eight more steps


def test_functions_that_watch_end_a_text_and_see_each_token_once() -> None:
    seen: list[int] = []

    def watch(token: int) -> bool:
        seen.append(token)
        return len(seen) == 3

    ticket = Engine(make_lm("gpt2")).submit(make_request(0, length=9, stops=frozenset(), watch=watch))
    assert [token.id for token in ticket] == seen
    assert len(seen) == 3
    assert ticket.finish_reason == "stop"


# --- logits processors ---


def test_logits_processors_see_the_whole_text_of_each_row() -> None:
    """Rows of different lengths, of which only some have processors."""
    lm = make_lm("llama").double()
    seen: list[list[int]] = []

    def forbid_repeats(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.extend(input_ids.tolist())
        return logits.scatter(1, input_ids, -torch.inf)

    engine = Engine(lm, max_rows=4)
    changes: dict[str, Any] = {"stops": frozenset(), "steering": Steering(top_k=10)}
    requests = [
        make_request(number, **changes, processors=(forbid_repeats,) if number % 2 else ()) for number in range(8)
    ]
    tickets = [engine.submit(request) for request in requests]
    for _ in engine.run():
        pass
    for ticket in tickets:
        prompt, tokens = list(ticket.request.prompt), [int(row[0]) for row in ticket.rows]
        alone = continue_alone(lm, None, ticket.request)
        assert tokens == [int(row[0]) for row in alone.rows]
        if ticket.request.processors:
            assert len(set(tokens)) == len(tokens)
            assert not set(tokens) & set(prompt)
            assert all(prompt + tokens[:n] in seen for n in range(len(tokens)))


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    lm = make_lm("llama").double()
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    tokenizer = make_number_tokenizer()
    found = generate(
        lm, tokenizer, [[5, 9, 11]], temperature=0, max_new_tokens=8, stop_token_ids=[], logits_processors=[penalty]
    )
    input_ids = torch.tensor([[5, 9, 11]])
    expected: Any = lm.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        repetition_penalty=1.7,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found[0].token_ids == expected[0, 3:].tolist()


def test_running_texts_go_on_while_prompts_wait() -> None:
    lm = make_lm("gpt2")
    engine = Engine(lm)
    engine.prompt_budget = 8
    running = engine.submit(make_request(0, length=20, stops=frozenset()))
    engine.step()
    others = [engine.submit(make_request(5 + 6 * n, length=4, stops=frozenset())) for n in range(4)]  # 6 tokens each
    engine.step()
    assert (len(engine.running), len(engine.waiting), len(running.rows)) == (2, 3, 2)
    engine.step()
    assert (len(engine.running), len(engine.waiting), len(running.rows)) == (3, 2, 3)
    for ticket in others:
        alone = continue_alone(lm, None, ticket.request)
        assert [token.id for token in ticket] == [token.id for token in alone]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 12))
@pytest.mark.parametrize("name", GUIDES)
def test_prompts_that_are_read_in_parts_are_continued_as_alone(
    name: str, seed: int, budget: int, lm_folders: dict[str, Path]
) -> None:
    """Long and short prompts come at any time, some of them twice, and some requests go before they are read."""
    lm, guide = make_lm("llama").double(), make_any_guide(name, lm_folders)
    engine, random = Engine(lm, guide, max_rows=4), np.random.default_rng(seed)
    engine.prompt_budget = budget
    lengths = random.integers(1, 40, 8)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in lengths]
    prompts = [prompts[max(0, place - int(random.integers(0, 4) == 0))] for place in range(8)]
    tickets: list[Ticket] = []
    while len(tickets) < len(prompts) or engine.busy:
        if len(tickets) < len(prompts) and random.integers(0, 2):
            tickets.append(engine.submit(make_request(len(tickets), length=6, prompt=prompts[len(tickets)])))
        unread = [ticket for ticket in tickets if not ticket.rows and ticket.finish_reason is None]
        if unread and random.integers(0, 10) == 0:
            unread[0].cancel()
        engine.step()
    assert takes_slots(engine.decoder.reader)
    for ticket in tickets:
        if ticket.finish_reason != "cancelled":
            alone = continue_alone(lm, guide, ticket.request)
            assert [row[0] for row in ticket.rows] == [row[0] for row in alone.rows]
            np.testing.assert_allclose(np.array(ticket.rows), np.array(alone.rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "q", "dexperts", "gedi"])
def test_a_long_prompt_keeps_no_text_waiting_for_more_than_a_part(name: str, lm_folders: dict[str, Path]) -> None:
    """Between two tokens of a running text, all models together read at most as many tokens as the budget allows."""
    lm, guide = make_lm("llama").double(), make_any_guide(name, lm_folders)
    models = [lm, *(reader.model for reader in guide.readers)] if guide is not None else [lm]
    engine, read = Engine(lm, guide), [0]

    def count(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        read[0] += kwargs["input_ids"].numel() if kwargs["input_ids"].shape[1] > 1 else 0

    hooks = [model.register_forward_pre_hook(count, with_kwargs=True) for model in models]
    engine.prompt_budget = 10
    running = engine.submit(make_request(0, length=40, stops=frozenset()))
    engine.step()
    long = engine.submit(make_request(1, length=3, prompt=[5 + n % 30 for n in range(45)], stops=frozenset()))
    steps = 0
    while not long.rows:
        before, read[0] = len(running.rows), 0
        engine.step()
        assert len(running.rows) == before + 1
        assert read[0] <= 10
        steps += 1
    assert steps >= -(-45 * len(models) // 10)
    for hook in hooks:
        hook.remove()


def test_an_engine_without_a_budget_reads_no_prompts_and_forgets_it_at_rest() -> None:
    engine = Engine(make_lm("gpt2"))
    engine.prompt_budget = 0
    ticket = engine.submit(make_request(0, length=3, stops=frozenset()))
    engine.step()
    assert engine.has_prompts
    assert not ticket.rows
    engine.rest()
    assert ticket.finish_reason == "cancelled"
    assert len(list(engine.submit(make_request(0, length=3, stops=frozenset())))) == 3


def test_a_request_that_is_half_read_waits_again_when_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = make_lm("llama").double()
    engine = Engine(lm)
    engine.prompt_budget = 4
    running = engine.submit(make_request(0, length=12, stops=frozenset()))
    engine.step()
    long = engine.submit(make_request(1, length=3, prompt=list(range(5, 20)), stops=frozenset()))
    engine.step()

    def fail(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Prefill, "read", fail)
        with pytest.warns(UserWarning, match="decodes 1 texts at once"):
            engine.step()
    for ticket in (running, long):
        alone = continue_alone(make_lm("llama").double(), None, ticket.request)
        assert [token.id for token in ticket] == [token.id for token in alone]
