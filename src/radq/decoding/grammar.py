"""Texts that are JSON of a schema: what could not become such a text is forbidden before candidates are chosen.

    grammar = Grammar(tokenizer, vocab_size, {"type": "object"})
    mask = grammar.mask(prompt_tokens=9, stops=[50256])      # a logits processor for one text

The grammars are those of llguidance. Axes: b rows, t tokens of a text, v vocabulary.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.errors import OptionError, first_line, require_package

MOST_CHARACTERS = 65536  # of a schema
SPACES = r"[ \t\n]{1,16}"  # between parts of JSON: without a limit, small models write spaces for ever

_VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, Any] = WeakKeyDictionary()  # of llguidance; a second each


class Grammar:
    """A JSON schema in the tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, schema: Mapping[str, Any]):
        self._matcher = _compile(_find_vocabulary(tokenizer, vocab_size), _write(schema))

    def mask(self, prompt_tokens: int, stops: Collection[int]) -> "GrammarMask":
        """Make the processor of one text, which the given tokens end."""
        if not stops:
            raise OptionError("a text that is JSON must be able to end.", "allow a token that ends texts.")
        return GrammarMask(self._matcher, prompt_tokens, sorted(stops))


class GrammarMask:
    """Forbids the tokens with which a text would leave its grammar; stop tokens may come where the text is whole."""

    def __init__(self, matcher: Any, prompt_tokens: int, stops: list[int]):
        self._first, self._prompt_tokens, self._stops = matcher, prompt_tokens, stops
        self._matcher = matcher.deep_copy()
        self._read: list[int] = []  # the tokens that the matcher has read

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        texts = input_ids[:, self._prompt_tokens :].tolist()
        allowed = np.stack([self._find_allowed(text, scores.shape[1]) for text in texts])
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _find_allowed(self, text: list[int], vocab_size: int) -> np.ndarray:
        """Find the tokens that may follow a text, which mostly goes on from the last one."""
        if text[: len(self._read)] != self._read:
            self._matcher, self._read = self._first.deep_copy(), []
        self._matcher.consume_tokens(text[len(self._read) :])
        self._read = text
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(words, bitorder="little")[:vocab_size].astype(bool)
        whole = self._matcher.is_accepting() or not allowed.any()
        allowed[self._stops] |= whole
        return allowed


def _find_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Any:
    """Describe the tokens of a tokenizer to llguidance, once."""
    if tokenizer not in _VOCABULARIES:
        reader = require_package("llguidance.hf", "serve")
        try:
            _VOCABULARIES[tokenizer] = reader.from_tokenizer(tokenizer, n_vocab=vocab_size)
        except Exception as error:  # of several kinds, where tokens do not stand for bytes
            raise OptionError(
                f"texts with a JSON schema need a tokenizer of bytes: {first_line(error)}.", "use another base model."
            ) from error
    return _VOCABULARIES[tokenizer]


def _write(schema: Mapping[str, Any]) -> str:
    """Write a schema as text; refuse one that is nested too deeply, or too long."""
    try:
        written = json.dumps(schema)
    except (RecursionError, TypeError, ValueError) as error:
        raise OptionError("the JSON schema is no JSON, or nested too deeply.", "give a smaller schema.") from error
    if len(written) > MOST_CHARACTERS:
        raise OptionError(
            f"a JSON schema may have at most {MOST_CHARACTERS} characters, got {len(written)}.", "give a smaller one."
        )
    return written


def _compile(vocabulary: Any, schema: str) -> Any:
    kind = require_package("llguidance", "serve").LLMatcher
    try:
        grammar = kind.grammar_from_json_schema(schema, overrides={"whitespace_pattern": SPACES})
        matcher = kind(vocabulary, grammar, log_level=0)
    except ValueError as error:
        raise _refuse(str(error)) from error
    if matcher.is_error():
        raise _refuse(matcher.get_error())
    return matcher


def _refuse(problem: str) -> OptionError:
    shown = next(iter(problem.strip().splitlines()), "it is not known why")[:200]
    return OptionError(f"the JSON schema cannot be used: {shown}.", "leave out what it names.")
