"""Changes of the base model's logits before candidates are chosen: penalties, biases, and tokens that may not come.

    processors = make_processors(LogitChanges(frequency_penalty=0.5), prompt_tokens=9, stops=[50256])
    logits = processors[0](input_ids, logits)      # as the logits processors of transformers

Equal processors are equal objects, so that the engine changes the rows of several requests together.
Axes: b rows, t tokens of a text, v vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from radq.decoding.config import LogitChanges
from radq.decoding.request import Processor


@dataclass(frozen=True)
class TokenBias:
    """Adds numbers to the logits of tokens."""

    biases: tuple[tuple[int, float], ...]

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        tokens, numbers = zip(*self.biases, strict=True)
        index = torch.tensor(tokens, device=scores.device)
        return scores.index_add(1, index, scores.new_tensor(numbers).expand(len(scores), -1))


@dataclass(frozen=True)
class CountPenalty:
    """Lowers the logits of tokens that the continuation holds already: once, and again for each time."""

    presence: float
    frequency: float
    prompt_tokens: int

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        written = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


@dataclass(frozen=True)
class StopsLater:
    """Forbids stop tokens until a continuation has so many tokens, unless no other token is left."""

    tokens: tuple[int, ...]
    least: int
    prompt_tokens: int

    def __call__(self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        if input_ids.shape[1] - self.prompt_tokens >= self.least:
            return scores
        index = torch.tensor(self.tokens, device=scores.device)
        words = scores.index_fill(1, index, -torch.inf)
        return torch.where(words.isneginf().all(-1, keepdim=True), scores, words)


def make_processors(changes: LogitChanges, prompt_tokens: int, stops: Collection[int]) -> tuple[Processor, ...]:
    """Make the processors of a text, in the order of vLLM: tokens that may not come, biases, penalties, min_p.

    Args:
        prompt_tokens: the number of tokens before the continuation.
        stops: the tokens that end the text.
    """
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
