"""Penalties, biases, min_p and least lengths: each against numbers by hand, and a loop without the engine."""

from collections import Counter
from typing import Any

import pytest
import torch
from families import EOS, VOCAB, make_lm, make_number_tokenizer
from torch import Tensor

from radq.decoding.config import LogitChanges
from radq.decoding.generate import generate, stream_text
from radq.decoding.processors import make_processors
from radq.errors import OptionError

TOKENIZER = make_number_tokenizer()
PROMPT = "5 9 3 12 30"
CHANGES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "both": {"presence_penalty": -1.0, "frequency_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {7: 3.0, 9: -100.0}},
    "least": {"min_new_tokens": 4},
    "min_p": {"min_p": 0.3},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {8: 1.0},
        "min_new_tokens": 3,
        "min_p": 0.1,
    },
}


def change(logits: Tensor, prompt: list[int], text: list[int], stops: list[int], changes: LogitChanges) -> Tensor:
    """Change the logits of one text by the definitions of each setting, token by token."""
    logits, counts = logits.clone(), Counter(text)
    for token in range(len(logits)):
        if len(text) < changes.min_new_tokens and token in stops:
            logits[token] = -torch.inf
        logits[token] += changes.logit_bias.get(token, 0.0)
        if token in {*prompt, *text}:
            by = changes.repetition_penalty
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        logits[token] -= changes.presence_penalty * (counts[token] > 0) + changes.frequency_penalty * counts[token]
    p = logits.softmax(-1)
    return logits.masked_fill(p < changes.min_p * p.max(), -torch.inf)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_those_of_their_definitions(name: str) -> None:
    changes, generator = LogitChanges(**CHANGES[name]), torch.Generator().manual_seed(0)
    prompt, text, stops = [5, 9, 3], [7, 7, 9][: 2 if name == "all" else 3], [EOS, 4]
    logits = 2 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    scores, input_ids = logits[None], torch.tensor([prompt + text])
    for processor in make_processors(changes, len(prompt), stops):
        scores = processor(input_ids, scores)
    torch.testing.assert_close(scores[0], change(logits, prompt, text, stops, changes))
    assert not torch.equal(scores[0], logits)


@pytest.mark.parametrize("name", CHANGES)
def test_texts_are_those_of_a_loop(name: str) -> None:
    lm, changes, stops = make_lm("gpt2").double(), LogitChanges(**CHANGES[name]), [EOS, 7, 11]
    (out,) = generate(lm, TOKENIZER, [PROMPT], temperature=0, max_new_tokens=8, stop_token_ids=stops, changes=changes)
    prompt: list[int] = TOKENIZER(PROMPT).input_ids
    text: list[int] = []
    while len(text) < 8 and not (text and text[-1] in stops):
        logits = lm(input_ids=torch.tensor([prompt + text])).logits[0, -1]
        text.append(int(change(logits, prompt, text, stops, changes).argmax()))
    assert out.token_ids == text
    assert len(text) >= changes.min_new_tokens


def test_rows_with_other_changes_are_themselves_alone() -> None:
    """The engine decodes both prompts together, each with penalties that count from its own end."""
    lm, prompts = make_lm("gpt2").double(), [PROMPT, "6 6 31"]
    options: dict[str, Any] = {"changes": LogitChanges(**CHANGES["all"]), "samples": 2, "max_new_tokens": 6}
    together = generate(lm, TOKENIZER, prompts, **options)
    alone = [
        one for p, prompt in enumerate(prompts) for one in generate(lm, TOKENIZER, [prompt], first_prompt=p, **options)
    ]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_a_stop_token_may_come_where_nothing_else_is_left() -> None:
    (later,) = make_processors(LogitChanges(min_new_tokens=2), 0, [1])
    scores = torch.tensor([[-torch.inf, 3.0, -torch.inf], [0.0, 3.0, -torch.inf]])
    out = later(torch.zeros(2, 0, dtype=torch.long), scores)
    assert out.tolist() == [[-torch.inf, 3.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]


def test_stop_texts_end_nothing_before_the_least_number_of_tokens() -> None:
    lm = make_lm("llama")
    options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": [], "seed": 1, "stop": [" "]}
    (free,) = generate(lm, TOKENIZER, [PROMPT], **options | {"stop": []})
    for least in (1, 2, 4):
        changes = LogitChanges(min_new_tokens=least)
        (cut,) = generate(lm, TOKENIZER, [PROMPT], changes=changes, **options)
        assert cut.token_ids == free.token_ids[:least]
        assert free.text.startswith(cut.text)
        before = TOKENIZER.decode(free.token_ids[: least - 1], skip_special_tokens=True)
        assert cut.text.split() == before.split()
        pieces = stream_text(lm, TOKENIZER, PROMPT, changes=changes, **options)
        assert "".join(pieces) == cut.text


def test_a_stop_token_that_is_a_word_is_no_part_of_the_text() -> None:
    lm = make_lm("llama")
    (free,) = generate(lm, TOKENIZER, [PROMPT], max_new_tokens=6, stop_token_ids=[], seed=1)
    stops = free.token_ids[2:3]
    (cut,) = generate(lm, TOKENIZER, [PROMPT], max_new_tokens=6, stop_token_ids=stops, seed=1)
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stops[0]) + 1]
    assert cut.text == "".join(stream_text(lm, TOKENIZER, PROMPT, max_new_tokens=6, stop_token_ids=stops, seed=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"repetition_penalty": 0},
        {"presence_penalty": float("inf")},
        {"logit_bias": {3: float("nan")}},
        {"min_new_tokens": -1},
    ],
)
def test_wrong_changes(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        LogitChanges(**wrong)


def test_biases_of_tokens_that_are_none() -> None:
    with pytest.raises(OptionError, match=str(VOCAB)):
        generate(make_lm("gpt2"), TOKENIZER, [PROMPT], changes=LogitChanges(logit_bias={VOCAB: 1.0}))
