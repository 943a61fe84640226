"""Prompts that are read in turns against prompts that are read at once."""

import pytest
import torch
from families import VOCAB, make_lm
from hypothesis import given, settings
from hypothesis import strategies as st

from radq.models.kv_cache import takes_padding
from radq.models.prompt_parts import PromptParts, prompt_parts
from radq.models.reading import Reader, Reading
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
    parts, turns, total = PromptParts(), 0, 0

    def work() -> list[Reading]:
        return [reader.read(*padded) for reader in readers] + [readers[0].read(*padded)]  # the last one is known

    done = False
    while not done:
        read[0] = 0
        done = parts.read(turn, work)
        assert read[0] <= max(turn, len(texts))  # at least a token of each row
        turns, total = turns + 1, total + read[0]
    assert total == 2 * padded[0].numel()
    assert turns >= total / max(turn, len(texts))
    for reader, found in zip([*readers, readers[0]], parts.result, strict=True):
        whole = reader.read(*padded)
        torch.testing.assert_close(found.last, whole.last)
        tokens = torch.full((len(texts),), 7)
        torch.testing.assert_close(found.read(tokens).last, whole.read(tokens).last)


def test_a_trial_of_a_model_does_not_take_the_place_of_a_prompt() -> None:
    """What a model can do is tried when somebody asks first, which may be while prompts are read in turns."""
    readers, ids = [make_reader(), make_reader()], torch.tensor([[5, 9, 11, 3, 4, 6, 8]])
    mask, parts = torch.ones_like(ids), PromptParts()

    def work() -> list[Reading]:
        first = readers[0].read(ids, mask)
        assert takes_slots(readers[0])
        return [first, readers[1].read(ids, mask)]

    while not parts.read(2, work):
        pass
    for reader, found in zip(readers, parts.result, strict=True):
        torch.testing.assert_close(found.last, reader.read(ids, mask).last)


def test_an_error_ends_the_turn() -> None:
    parts = PromptParts()
    with pytest.raises(ZeroDivisionError):
        parts.read(5, lambda: 1 / 0)
    assert prompt_parts() is None
