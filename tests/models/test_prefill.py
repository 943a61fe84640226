"""Prompts that are read in turns against prompts that are read at once."""

import pytest
import torch
from families import VOCAB, make_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from radq.models.kv_cache import takes_padding
from radq.models.prefill import InTurns, Prefill, Turn
from radq.models.reading import Reader, ValueReading
from radq.models.slots import takes_slots
from radq.models.vocabulary import Vocabulary
from radq.numerics import pad_left


def make_reader() -> Reader:
    return Reader(make_lm("llama").double().eval(), "logits", "base model", Vocabulary(VOCAB))


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=3),
    turn=st.integers(1, 15),
)
def test_models_that_read_in_turns_share_them(texts: list[list[int]], turn: int) -> None:
    """A turn is for all models together, however much of it the first one leaves, and nothing is read twice."""
    readers, padded = [make_reader(), make_reader()], pad_left(texts)
    read = [0]

    def count(_: object, __: object, kwargs: dict[str, torch.Tensor]) -> None:
        read[0] += kwargs["input_ids"].numel()

    for reader in readers:
        takes_padding(reader.model)  # tried once, with a few tokens that do not count here
        reader.model.register_forward_pre_hook(count, with_kwargs=True)

    def work(turn: Turn) -> InTurns[list[ValueReading]]:
        found = []
        for reader in readers:
            found.append((yield from reader.read_in_turns(*padded, turn)))
        return found

    prefill, turns, total, done = Prefill(work), 0, 0, False
    while not done:
        read[0] = 0
        done = prefill.read(turn)
        assert read[0] <= max(turn, len(texts))  # at least a token of each row
        turns, total = turns + 1, total + read[0]
    assert total == 2 * padded[0].numel()
    assert turns >= total / max(turn, len(texts))
    assert prefill.result is not None
    for reader, found in zip(readers, prefill.result, strict=True):
        whole = reader.read(*padded)
        torch.testing.assert_close(found.last, whole.last)
        tokens = torch.full((len(texts),), 7)
        torch.testing.assert_close(found.read(tokens).last, whole.read(tokens).last)


def test_a_trial_of_a_model_does_not_take_the_place_of_a_prompt() -> None:
    """What a model can do is tried when somebody asks first, which may be while prompts are read in turns."""
    readers, ids = [make_reader(), make_reader()], torch.tensor([[5, 9, 11, 3, 4, 6, 8]])
    mask = torch.ones_like(ids)

    def work(turn: Turn) -> InTurns[list[ValueReading]]:
        first = yield from readers[0].read_in_turns(ids, mask, turn)
        assert takes_slots(readers[0])
        return [first, (yield from readers[1].read_in_turns(ids, mask, turn))]

    prefill = Prefill(work)
    while not prefill.read(2):
        pass
    assert prefill.result is not None
    for reader, found in zip(readers, prefill.result, strict=True):
        torch.testing.assert_close(found.last, reader.read(ids, mask).last)


def test_an_error_ends_the_turn() -> None:
    def work(turn: Turn) -> InTurns[float]:
        yield
        return 1 / 0

    prefill = Prefill(work)
    assert not prefill.read(5)
    with pytest.raises(ZeroDivisionError):
        prefill.read(5)
