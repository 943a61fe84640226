"""Changes of the base model's logits before candidates are chosen: penalties, biases, and tokens that may not come.

    processors = make_processors(LogitChanges(frequency_penalty=0.5), prompt_tokens=9, stops=[50256])
    logits = processors[0](input_ids, logits)      # as the logits processors of transformers

    mask = GrammarMask(compile_grammar(tokenizer, vocab_size, {"type": "object"}), prompt_tokens=9, stops=[50256])

Equal processors are equal objects, so that the engine changes the rows of several requests together. The mask of a
grammar is the processor of one text.
Axes: b rows, t tokens of a text, v vocabulary.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import MinPLogitsWarper, PreTrainedTokenizerBase, RepetitionPenaltyLogitsProcessor

from radq.decoding.config import LogitChanges
from radq.decoding.request import Processor
from radq.errors import OptionError, first_line, require_package
from radq.numerics import Texts, weakly_cached

MOST_CHARACTERS = 65536  # of a schema
SPACES = r"[ \t\n]{1,16}"  # between parts of JSON: without a limit, small models write spaces for ever


@dataclass(frozen=True)
class TokenBias:
    """Adds numbers to the logits of tokens."""

    biases: tuple[tuple[int, float], ...]

    def __call__(self, input_ids: Texts, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        tokens, numbers = zip(*self.biases, strict=True)
        index = torch.tensor(tokens, device=scores.device)
        return scores.index_add(1, index, scores.new_tensor(numbers).expand(len(scores), -1))


@dataclass(frozen=True)
class CountPenalty:
    """Lowers the logits of tokens that the continuation holds already: once, and again for each time."""

    presence: float
    frequency: float
    prompt_tokens: int

    def __call__(self, input_ids: Texts, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        written = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True)
class StopsLater:
    """Forbids stop tokens until a continuation has so many tokens, unless no other token is left."""

    tokens: tuple[int, ...]
    least: int
    prompt_tokens: int

    def __call__(self, input_ids: Texts, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        if input_ids.shape[1] - self.prompt_tokens >= self.least:
            return scores
        index = torch.tensor(self.tokens, device=scores.device)
        words = scores.index_fill(1, index, -torch.inf)
        return torch.where(words.isneginf().all(-1, keepdim=True), scores, words)


def make_processors(changes: LogitChanges, prompt_tokens: int, stops: Collection[int]) -> tuple[Processor, ...]:
    """Make the processors of a text, in the order of vLLM: tokens that may not come, biases, penalties, min_p."""
    found: list[Processor] = []
    if changes.min_new_tokens and stops:
        found.append(StopsLater(tuple(sorted(stops)), changes.min_new_tokens, prompt_tokens))
    if changes.logit_bias:
        found.append(TokenBias(tuple(sorted(changes.logit_bias.items()))))
    if changes.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(changes.repetition_penalty))
    if changes.presence_penalty or changes.frequency_penalty:
        found.append(CountPenalty(changes.presence_penalty, changes.frequency_penalty, prompt_tokens))
    if changes.min_p:
        found.append(MinPLogitsWarper(changes.min_p))
    return tuple(found)


# --- texts that are JSON of a schema, by the grammars of llguidance ---


@runtime_checkable
class Matcher(Protocol):
    """The methods of llguidance's LLMatcher that are called here."""

    def deep_copy(self) -> "Matcher": ...

    def consume_tokens(self, tokens: list[int]) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def is_accepting(self) -> bool: ...


def compile_grammar(tokenizer: PreTrainedTokenizerBase, vocab_size: int, schema: Mapping[str, object]) -> Matcher:
    """Write a JSON schema in the tokens of a tokenizer."""
    vocabulary, written = _find_vocabulary(tokenizer, vocab_size), _write(schema)
    kind = require_package("llguidance", "serve").LLMatcher
    try:
        grammar = kind.grammar_from_json_schema(written, overrides={"whitespace_pattern": SPACES})
        matcher = kind(vocabulary, grammar, log_level=0)
    except ValueError as error:
        raise _refuse(str(error)) from error
    if matcher.is_error():
        raise _refuse(matcher.get_error())
    return matcher


class GrammarMask:
    """Forbids the tokens with which a text would leave its grammar; stop tokens may come where the text is whole."""

    def __init__(self, grammar: Matcher, prompt_tokens: int, stops: Collection[int]):
        if not stops:
            raise OptionError("a text that is JSON must be able to end.", "allow a token that ends texts.")
        self._first, self._prompt_tokens, self._stops = grammar, prompt_tokens, sorted(stops)
        self._matcher = grammar.deep_copy()
        self._read: list[int] = []  # the tokens that the matcher has read

    def __call__(self, input_ids: Texts, scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        texts = input_ids[:, self._prompt_tokens :].tolist()
        allowed = np.stack([self._find_allowed(text, scores.shape[1]) for text in texts])
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _find_allowed(self, text: list[int], vocab_size: int) -> np.ndarray:
        if text[: len(self._read)] != self._read:
            self._matcher, self._read = self._first.deep_copy(), []
        self._matcher.consume_tokens(text[len(self._read) :])
        self._read = text
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(words, bitorder="little")[:vocab_size].astype(bool)
        whole = self._matcher.is_accepting() or not allowed.any()
        allowed[self._stops] |= whole
        return allowed


@weakly_cached
def _find_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> object:
    """Describe the tokens of a tokenizer to llguidance, which takes a second."""
    reader = require_package("llguidance.hf", "serve")
    try:
        return reader.from_tokenizer(tokenizer, n_vocab=vocab_size)
    except Exception as error:  # of several kinds, where tokens do not stand for bytes
        raise OptionError(
            f"texts with a JSON schema need a tokenizer of bytes: {first_line(error)}.", "use another base model."
        ) from error


def _write(schema: Mapping[str, object]) -> str:
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


def _refuse(problem: str) -> OptionError:
    shown = next(iter(problem.strip().splitlines()), "it is not known why")[:200]
    return OptionError(f"the JSON schema cannot be used: {shown}.", "leave out what it names.")
