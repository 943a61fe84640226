"""Prefixes for a distillation on candidates: prompts that the base model has continued, and places in them.

prompts = choose_prompts(config, data, eval_data, lm, tokenizer)
prefixes = write_prefixes(lm, tokenizer, prompts.train, range(256), config, seed, None, num_known)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.prompts import read_prompts
from radq.decoding.generate import generate
from radq.decoding.prompts import encode_prompts
from radq.errors import ContextLengthError, DataError
from radq.guides import Guide
from radq.models.loading import Wrappable
from radq.training.config import RewardTrainingConfig

HELD_OUT_SHARE = 0.1  # of the prompts, if no texts are held out


class Prefix(NamedTuple):
    """A text that begins with a prompt, and the places in it where candidates are compared.

    At place p, candidates stand in place of tokens[p], after the tokens before it. A place may be the end of the text.
    """

    tokens: list[int]
    places: list[int]
    prompt_length: int = 0


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts for training and of others for measuring, each in random order."""

    train: list[list[int]]
    held_out: list[list[int]]

    @property
    def longest(self) -> int:
        return max(map(len, [*self.train, *self.held_out]))


# --- prompts ---


def choose_prompts(
    config: RewardTrainingConfig,
    data: RewardData,
    eval_data: RewardData | None,
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
) -> Prompts:
    """Choose prompts to train on, and other prompts to measure with.

    They come from the file of prompts, or are the beginnings of texts. Beginnings to measure with are those of
    `eval_data`. A tenth of all prompts is held out where this gives none.
    """
    held_out: list[str] = []
    if config.prompts:
        train = _distinct(_read_file(config.prompts, tokenizer))
    else:
        train = _beginnings(data, tokenizer, config.prompt_tokens)
        others = [] if eval_data is None else _beginnings(eval_data, tokenizer, config.prompt_tokens)
        known = set(train)
        held_out = [text for text in others if text not in known]
    rng = np.random.default_rng(config.seed)
    train = [train[index] for index in rng.permutation(len(train))]
    if not held_out:
        cut = max(1, round(HELD_OUT_SHARE * len(train)))
        train, held_out = train[cut:], train[:cut]
    if not train:
        raise DataError("there is one prompt alone, and some are held out.", "give two or more different --prompts.")
    parts = [encode_prompts(lm.config, tokenizer, part, config.prefix_tokens) for part in (train, held_out)]
    return Prompts(*parts)


def _read_file(source: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    texts = [prompt.text for prompt in read_prompts(source)]
    rows = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    for number, row in enumerate(rows, 1):
        if not row:
            raise DataError(f"prompt {number} of {source} has no tokens.", "remove it, or write some words.")
    return texts


def _beginnings(data: RewardData, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> list[str]:
    """Cut off the beginnings of all texts: at most half of a short text, so that there is something to write."""
    starts, lengths = data.offsets[data.rows], data.lengths
    sizes = np.minimum(np.maximum(1, lengths // 2), prompt_tokens)
    rows: Any = [data.token_ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    texts = tokenizer.batch_decode(rows)
    return _distinct([text for text in texts if tokenizer(text, add_special_tokens=False).input_ids])


def _distinct(texts: list[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def check_room(prompts: Prompts, config: RewardTrainingConfig, context: int | None) -> None:
    """Refuse prompts that leave no room for their continuations in the teacher or the student."""
    if context is not None and prompts.longest + config.prefix_tokens > context:
        raise ContextLengthError(
            f"the longest prompt has {prompts.longest} tokens; with {config.prefix_tokens} new ones it exceeds the "
            f"{context} tokens that teacher and student can read.",
            "shorten the prompts, or lower --prefix-tokens.",
        )


# --- continuations ---


def write_prefixes(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    numbers: range,
    config: RewardTrainingConfig,
    seed: int,
    guide: Guide | None,
    num_known: int,
) -> list[Prefix]:
    """Let the base model continue prompts.

    Prefix n depends on n, its prompt and the seed, but not on the other `numbers`. A prefix ends before a token from
    `num_known` on, which teacher or student do not know.
    """
    chosen = [prompts[number % len(prompts)] for number in numbers]
    generations = generate(
        lm,
        tokenizer,
        chosen,
        guide,
        top_k=config.candidates,
        max_new_tokens=config.prefix_tokens,
        seed=seed,
        kl_budget=None,  # rare prefixes are worth learning from, too
        first_prompt=numbers.start,
    )
    found = zip(numbers, chosen, generations, strict=True)
    return [
        _choose_places(prompt, generation.token_ids, config.prefix_positions, [seed, number], num_known)
        for number, prompt, generation in found
    ]


def _choose_places(
    prompt: list[int], continuation: list[int], num_places: int, seed: list[int], num_known: int
) -> Prefix:
    """Choose places at random among those where the base model has chosen a token."""
    tokens = prompt + continuation
    unknown = next((place for place, token in enumerate(tokens) if token >= num_known), len(tokens))
    places = np.arange(len(prompt), min(len(tokens) - 1, unknown) + 1)
    chosen = np.sort(np.random.default_rng(seed).permutation(places)[:num_places]).tolist()
    return Prefix(tokens[: chosen[-1]] if chosen else prompt[:unknown] or [0], chosen, len(prompt))
