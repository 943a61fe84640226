"""Prompts as tokens, and tokens as text: what stands before the loop over tokens and after it.

    encode_prompts(lm.config, tokenizer, ["The film was", [464, 2646], [{"role": "user", "content": "Hello"}]], 20)

A prompt is a text, a list of token ids, or a list of chat messages.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.decoding.text import UNFINISHED, continue_text
from radq.errors import ContextLengthError, OptionError
from radq.models.loading import Wrappable, max_positions, name_positions
from radq.models.vocabulary import exceeds, find_bos, find_control_tokens, tokenise, tokenise_plainly

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]


def encode_prompts(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    context: int | None = None,
    longest: int | None = None,
    control_tokens: bool = False,
) -> list[list[int]]:
    """Tokenise prompts, with the special tokens that the base model expects; an empty prompt becomes a BOS.

    A text that is too long for any tokens is refused before it is tokenised.

    Args:
        config: the base model's.
        context: the longest text that is allowed, with the new tokens; by default what the base model has room for.
        longest: the most tokens of a prompt; by default there is no other limit than `context`.
        control_tokens: whether the names of special tokens, such as <|im_end|>, stand for these tokens in messages of
            chats too, and not for their characters alone.
    """
    if isinstance(prompts, str) or not prompts:
        raise OptionError(
            f"prompts must be a list of one or more texts, got {prompts!r}.", "put a single prompt into a list."
        )
    bos = find_bos(config, tokenizer)
    positions, room = max_positions(config), name_positions(config)
    if context is not None:
        positions, room = context, f"context of {context} tokens"
    rooms = [longest, None if positions is None else positions - max_new_tokens]
    most = min((one for one in rooms if one is not None), default=None)
    vocab_size = config.get_text_config().vocab_size
    found = _tokens_of(prompts, tokenizer, bos, vocab_size, most, control_tokens)
    encoded = [ids or [bos] for ids in found]
    too_long = max(map(len, encoded))
    if longest is not None and too_long > longest:
        raise ContextLengthError(f"a prompt may have at most {longest} tokens, got {too_long}.", "shorten it.")
    for number, ids in enumerate(encoded):
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ContextLengthError(
                f"prompt {number} has {len(ids)} tokens; with {max_new_tokens} new ones it exceeds the base model's "
                f"{room}.",
                "shorten the prompt or lower max_new_tokens.",
            )
    return encoded


def _tokens_of(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    bos: int,
    vocab_size: int,
    most: int | None,
    control_tokens: bool,
) -> Iterator[list[int]]:
    """The tokens of texts, of lists of token ids, and of chats; `most` is the number that a prompt may have."""
    written = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in written:
        check_size(tokenizer, text, most)
    texts = iter(tokenise(tokenizer, written, bos))
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            yield next(texts)
        elif all(isinstance(message, Mapping) for message in prompt) and prompt:
            chat: Sequence[Mapping[str, object]] = prompt  # pyright: ignore[reportAssignmentType]
            yield _read_chat(tokenizer, chat, number, most, control_tokens)
        elif all(isinstance(token, int) and 0 <= token < vocab_size for token in prompt):
            yield [int(token) for token in prompt]  # pyright: ignore[reportArgumentType]
        else:
            raise OptionError(
                f"prompt {number} is neither a text, nor a list of token ids below {vocab_size}, nor a list of chat "
                f"messages: {str(prompt)[:60]}.",
                'a chat is a list such as [{"role": "user", "content": "Hello"}].',
            )


def check_size(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> None:
    """Refuse a text that has more than so many tokens for certain, without tokenising it."""
    if most is not None and exceeds(tokenizer, text, most):
        raise ContextLengthError(
            f"a text of {len(text)} characters has more than the {most} tokens that are allowed.", "shorten it."
        )


def _read_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    number: int,
    most: int | None,
    control_tokens: bool,
) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        raise OptionError(
            f"prompt {number} is a chat, and the tokenizer has no chat template.", "give a text, or another base model."
        )
    contents = (message.get("content") for message in messages)
    check_size(tokenizer, "".join(one for one in contents if isinstance(one, str)), most)  # before templates write it
    names = [] if control_tokens else find_control_tokens(tokenizer, messages)
    marks = {f"\ue000{secrets.token_hex(8)}\ue001": name for name in names}
    try:
        text = str(tokenizer.apply_chat_template(_replace(messages, marks), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise errors of their own about roles and their order
        raise OptionError(f"the chat template refuses prompt {number}: {error}.", "check its messages.") from error
    check_size(tokenizer, text, most)
    if not marks:
        return tokenizer(text, add_special_tokens=False).input_ids
    parts = re.split(f"({'|'.join(marks)})", text)
    return [token for part in parts if part for token in _tokenise_part(tokenizer, part, marks)]


def _tokenise_part(tokenizer: PreTrainedTokenizerBase, part: str, marks: Mapping[str, str]) -> list[int]:
    """Tokenise a part of a chat: the name of a control token as characters, everything else as it is."""
    if part in marks:
        return tokenise_plainly(tokenizer, marks[part])
    return tokenizer(part, add_special_tokens=False).input_ids


def _replace(value: object, marks: Mapping[str, str]) -> Any:
    """Put marks in place of the names of control tokens, in all texts of messages."""
    if isinstance(value, str):
        for mark, name in marks.items():
            value = value.replace(name, mark)
        return value
    if isinstance(value, Mapping):
        return {key: _replace(item, marks) for key, item in value.items()}
    return [_replace(item, marks) for item in value] if isinstance(value, list | tuple) else value


def find_stops(
    lm: Wrappable | None, tokenizer: PreTrainedTokenizerBase | None, stop_token_ids: Sequence[int] | None
) -> list[int]:
    """Find the tokens that end a text: those that are given, else those of the language model or its tokenizer."""
    if stop_token_ids is not None:
        return list(stop_token_ids)
    for one in (getattr(lm, "generation_config", None), tokenizer, getattr(lm, "config", None)):
        if (end := getattr(one, "eos_token_id", None)) is not None:
            return list(end) if isinstance(end, Sequence) else [end]
    return []


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], continuations: list[list[int]]
) -> list[str]:
    """Turn continuations into texts that can be appended to their prompts.

    Prompt and continuation are decoded together, since some tokenizers drop a space at the beginning of a text. A
    character that is not whole at the end of a continuation is left out.
    """
    samples = len(continuations) // len(prompts)
    begins = [begin for begin in tokenizer.batch_decode(prompts, skip_special_tokens=True) for _ in range(samples)]
    rows = [np.array(prompts[row // samples] + tokens) for row, tokens in enumerate(continuations)]
    wholes = tokenizer.batch_decode(rows, skip_special_tokens=True)  # pyright: ignore[reportArgumentType] - faster with arrays than with lists
    found = [continue_text(begin, whole) for begin, whole in zip(begins, wholes, strict=True)]
    return [
        (tokenizer.batch_decode([tokens], skip_special_tokens=True)[0] if text is None else text).rstrip(UNFINISHED)
        for text, tokens in zip(found, continuations, strict=True)
    ]
