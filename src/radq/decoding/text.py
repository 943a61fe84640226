"""Prompts as tokens, and tokens as text: as a whole, or piece by piece as they come.

    encode_prompts(lm.config, tokenizer, ["The film was", [464, 2646], [{"role": "user", "content": "Hello"}]], 20)

    text = GrowingText(tokenizer, prompt, stops=["\\n"])
    for token in ticket:
        print(text.add(token.id), end="")
    print(text.end(), end="")

A prompt is a text, a list of token ids, or a list of chat messages.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError
from radq.models.loading import Wrappable, max_positions, name_positions
from radq.models.vocabulary import exceeds, find_bos, find_control_tokens, tokenise, tokenise_plainly

UNFINISHED = "\ufffd"  # what tokenizers write for the first bytes of a character
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

    A prompt has at most `longest` tokens, and with the new ones `context`, by default as many as the base model has
    room for. A text that is too long for any tokens is refused before it is tokenised. With `control_tokens`, names of
    special tokens in messages of chats, such as <|im_end|>, stand for these tokens, and not for their characters alone.
    """
    if isinstance(prompts, str) or not prompts:
        raise OptionError(
            f"prompts must be a list of one or more texts, got {prompts!r}.", "put a single prompt into a list."
        )
    bos = find_bos(config, tokenizer)
    positions, limit = max_positions(config), name_positions(config)
    if context is not None:
        positions, limit = context, f"context of {context} tokens"
    rooms = [longest, None if positions is None else positions - max_new_tokens]
    most = min((room for room in rooms if room is not None), default=None)
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
                f"{limit}.",
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
    texts = [text for message in messages if isinstance(text := message.get("content"), str)]
    check_size(tokenizer, "".join(texts), most)  # before templates write it
    names = [] if control_tokens else find_control_tokens(tokenizer, messages)
    marks = {f"\ue000{secrets.token_hex(8)}\ue001": name for name in names}
    try:
        text = str(tokenizer.apply_chat_template(_replace(messages, marks), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise errors of their own about roles and their order
        raise OptionError(f"the chat template refuses prompt {number}: {error}.", "check its messages.") from error
    check_size(tokenizer, text, most)
    tokens: list[int] = []
    for part in filter(None, re.split(f"({'|'.join(marks)})", text) if marks else [text]):
        name = marks.get(part)  # of a control token, which is read as its characters
        tokens += tokenise_plainly(tokenizer, name) if name else tokenizer(part, add_special_tokens=False).input_ids
    return tokens


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
    for owner in (getattr(lm, "generation_config", None), tokenizer, getattr(lm, "config", None)):
        if (end := getattr(owner, "eos_token_id", None)) is not None:
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


def continue_text(before: str, whole: str) -> str | None:
    """Cut a text off before its continuation; None if the whole does not begin with it.

    Tokens may end inside a character. Then the continuation begins with this character, once it is whole.
    """
    begins = (before, before.rstrip(UNFINISHED))
    return next((whole[len(begin) :] for begin in begins if whole.startswith(begin)), None)


class GrowingText:
    """The text of a continuation. Pieces are given out as soon as later tokens can no longer change them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        min_new_tokens: int = 0,
    ):
        """The text is cut off before the first stop text that is complete with `min_new_tokens` tokens or later."""
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self._free = min_new_tokens  # tokens until stop texts end the text
        self.text = ""  # up to a stop string, which is not part of it
        self.stopped = False
        # Decoded together with some tokens before, since some tokenizers drop a space at the beginning of a text.
        self._window = list(prompt[-8:])
        self._before = self._decode(self._window)
        self._given = 0

    def __call__(self, token: int) -> bool:
        """Add a token; return whether the text has reached a stop text."""
        self.add(token)
        return self.stopped

    def add(self, token: int) -> str:
        """Add a token; return the piece of text that has become final."""
        if self.stopped:
            return ""
        self._window.append(token)
        self._free -= 1
        whole = self._decode(self._window)
        if whole.endswith(UNFINISHED):
            return ""
        length = len(self.text)  # so far, in which stop texts have been looked for
        self.text += self._continue(whole)
        self._window = self._window[-8:]
        self._before = self._decode(self._window)
        found = [self.text.find(stop, max(0, length - len(stop) + 1)) for stop in self.stops]
        places = [place for place in found if place >= 0]
        if places and self._free <= 0:
            self.stopped, self.text = True, self.text[: min(places)]
        return self._give(len(self.text) if self.stopped else len(self.text) - self._held_back())

    def end(self) -> str:
        """The rest of the text, when no more tokens will come. A character that is not whole is left out."""
        if not self.stopped:
            whole = self._decode(self._window)
            self.text, self._before = self.text + self._continue(whole).rstrip(UNFINISHED), whole
        return self._give(len(self.text))

    def _continue(self, whole: str) -> str:
        rest = continue_text(self._before, whole)
        return whole[len(self._before) :] if rest is None else rest

    def _give(self, end: int) -> str:
        begin, self._given = self._given, max(self._given, end)
        return self.text[begin : self._given]

    def _held_back(self) -> int:
        """The number of last characters with which a stop string may have begun."""
        longest = min(max((len(stop) for stop in self.stops), default=1) - 1, len(self.text))
        ends = (self.text[len(self.text) - n :] for n in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self.stops)), 0)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))
