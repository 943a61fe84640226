"""Slots against readings that are values: the same outputs, whatever joins, leaves, moves or is rewound."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, VOCAB, make_lm, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig

from radq.guides.reward import RewardGuide
from radq.models import reading
from radq.models.reading import Reader, ValueReading
from radq.models.slots import SlotReading, settle, takes_slots
from radq.models.vocabulary import Vocabulary
from radq.numerics import pad_left

TEXTS = [[5, 9, 3, 12, 30, 7, 8], [11], [6, 31, 14]]


def make_reader(family: str, known: int = VOCAB) -> Reader:
    return Reader(make_lm(family).double().eval(), "logits", "base model", Vocabulary(known))


def read_alone(reader: Reader, text: list[int]) -> ValueReading:
    ids = torch.tensor([text])
    return reader.read(ids, torch.ones_like(ids))


def fill(reader: Reader, texts: list[list[int]], capacity: int, width: int) -> SlotReading:
    slots = settle(read_alone(reader, texts[0]), capacity, width)
    assert isinstance(slots, SlotReading)
    for text in texts[1:]:
        slots.add(read_alone(reader, text))
    return slots


def last_alone(reader: Reader, texts: list[list[int]]) -> Tensor:
    return torch.cat([read_alone(reader, text).last for text in texts])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_different_lengths_read_as_alone(family: str) -> None:
    reader, texts = make_reader(family), [list(text) for text in TEXTS]
    slots = fill(reader, texts, capacity=1, width=4)  # too small on purpose: the store grows
    for tokens in ([3, 4, 5], [7, 7, 7], [20, 3, 11], [9, 9, 10], [4, 5, 6]):
        slots.reserve()
        slots.read(torch.tensor(tokens))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        torch.testing.assert_close(slots.last, last_alone(reader, texts))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_joining_leaving_and_reading(data: st.DataObject) -> None:
    reader = make_reader("llama", known=30)
    texts: list[list[int]] = [[5, 6]]
    slots = fill(reader, texts, capacity=1, width=4)
    token = st.integers(3, VOCAB - 1)
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["join", "leave", "read", "rewind"]))
        if action == "join":
            new = data.draw(st.lists(st.integers(3, 29), min_size=1, max_size=6))
            slots = slots.join([slots, read_alone(reader, new)])
            texts.append(new)
        elif action == "leave" and len(texts) > 1:
            rows = data.draw(st.lists(st.sampled_from(range(len(texts))), min_size=1, max_size=4))
            slots = slots.select(torch.tensor(rows))
            texts = [texts[row] for row in rows]
        elif action == "read":
            tokens = [data.draw(token) for _ in texts]
            slots.resize(len(texts)).reserve()
            slots = slots.advance(torch.tensor(tokens))  # tokens from 30 on are unknown and left out
            texts = [[*text, new] if new < 30 else text for text, new in zip(texts, tokens, strict=True)]
        elif action == "rewind" and min(map(len, texts)) > 2:
            slots.resize(len(texts)).reserve()
            slots = slots.rewind(1)
            texts = [text[:-1] for text in texts]
        assert slots.lengths.tolist() == [len(text) for text in texts]
        torch.testing.assert_close(slots.last, last_alone(reader, texts))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "mistral"])
def test_siblings_are_read_and_kept_as_alone(family: str, lm_folders: dict[str, Path]) -> None:
    guide = RewardGuide(make_reward("v", lm_folders[family]).double(), {"nice": 1.0})
    texts = [list(text) for text in TEXTS]
    alone = [guide.start(torch.tensor([text])) for text in texts]
    slots = guide.start(torch.tensor([texts[0]])).map_readings(lambda reading: settle(reading, 3, 8))
    for text in texts[1:]:
        slots = slots.join([slots, guide.start(torch.tensor([text]))])
    candidates = torch.tensor([[4, 9, 22], [8, 3, 5], [30, 12, 6]])
    for step in range(4):
        slots.reserve(siblings=3)
        advice = guide.advise(slots, candidates)
        expected = [guide.advise(state, row[None]) for state, row in zip(alone, candidates, strict=True)]
        torch.testing.assert_close(advice.shift, torch.cat([one.shift for one in expected]))
        tokens = candidates[:, step % 3]
        slots = guide.advance(advice.state, tokens)
        alone = [guide.advance(one.state, token[None]) for one, token in zip(expected, tokens, strict=True)]
        torch.testing.assert_close(slots.last, torch.cat([state.last for state in alone]))


def test_models_that_cannot_use_slots_stay_as_they_are() -> None:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)
    reader = Reader(AutoModelForCausalLM.from_config(config).eval(), "logits", "base model", Vocabulary(VOCAB))
    assert not takes_slots(reader)  # ALiBi finds positions from a mask with two axes
    state = read_alone(reader, [5, 6])
    assert settle(state, 4, 8) is state


def test_nothing_moves_while_rows_stay() -> None:
    """A captured step writes to the same addresses again and again."""
    slots = fill(make_reader("llama"), TEXTS, capacity=4, width=64)
    slots.reserve()
    places = [store.data_ptr() for store in slots._stores] + [slots.last.data_ptr(), slots.lengths.data_ptr()]
    for token in range(5, 10):
        slots.read(torch.full((3,), token))
        slots.reserve()
    found = [store.data_ptr() for store in slots._stores] + [slots.last.data_ptr(), slots.lengths.data_ptr()]
    assert found == places
    assert slots.epoch == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_are_read_in_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = make_reader(family)
    padded = pad_left(TEXTS)
    whole = reader.read(*padded)
    monkeypatch.setattr(reading, "TOKENS_PER_FORWARD", 6)
    parts = reader.read(*padded)
    torch.testing.assert_close(parts.last, whole.last)
    torch.testing.assert_close(parts.read(torch.tensor([5, 6, 7])).last, whole.read(torch.tensor([5, 6, 7])).last)
