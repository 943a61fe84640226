"""The log-probabilities of the tokens of prompts: under the base model, and as a guide would have them drawn.

    scores = PromptScores(lm, guide, [[5, 9, 3]], Steering(), guide.beta, top=1)
    while not scores.go_on(128):         # reads so many tokens of prompts
        ...                              # other work of the same models
    scores.base[0][1].log_probability    # of token 9 after token 5
    scores.guided[0][1]

The base model reads a prompt in few forwards. A guide advises about one token after the other, as in decoding: the
tokens of a prompt stand in the place of those that would be drawn.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.decoder import Decoder
from radq.decoding.request import Request
from radq.guides.base import Guide
from radq.models import kv_cache
from radq.models.loading import Wrappable, evaluating
from radq.numerics import at_least_float32, pad_right

PART = 128  # tokens of a prompt that the base model reads at once
FEW = 16  # tokens; a forward of fewer takes as long


@dataclass(frozen=True)
class BaseScore:
    """The base model's score of one token of a prompt, over the whole vocabulary and at temperature 1."""

    log_probability: float
    best: list[tuple[int, float]]  # the likeliest tokens in its place, with their log-probabilities


class PromptScores:
    """Scores of the tokens of some prompts; the first token of each has none."""

    def __init__(
        self,
        lm: Wrappable,
        guide: Guide | None,
        prompts: Sequence[Sequence[int]],
        steering: Steering,
        beta: Sequence[float],
        stops: Collection[int] = (),
        top: int = 0,
    ):
        """Guide, steering, β and stop tokens are those of `guided`, and `top` is the number of `BaseScore.best`."""
        self.lm, self.prompts, self.top = lm, prompts, top
        self.steering, self.beta, self.stops = steering, beta, stops
        self.base: list[list[BaseScore | None]] = [[None] for _ in prompts]
        self.guided: list[list[float | None]] = []
        # The numbers of tokens of all forwards, each of which is done when it is asked for.
        guided = () if guide is None else self._read_guided(guide)
        self._work = chain(*map(self._read_by_base, range(len(prompts))), guided)

    @torch.no_grad()
    def go_on(self, tokens: int) -> bool:
        """Let the models read at least so many tokens, if there are as many; return whether all are read."""
        with evaluating(self.lm):
            while tokens > 0:
                read = next(self._work, None)
                if read is None:
                    return True
                tokens -= read
        return False

    def _read_by_base(self, number: int) -> Iterator[int]:
        """Read a prompt in parts, since the logits of all its tokens would fill memory."""
        ids = torch.tensor([list(self.prompts[number])], device=self.lm.device)
        prefix = kv_cache.Prefix.empty(ids)
        for begin in range(0, ids.shape[1] - 1, PART):
            tokens = ids[:, begin : min(begin + PART, ids.shape[1] - 1)]
            output, prefix = kv_cache.extend(self.lm, prefix, tokens)
            following = ids[0, begin + 1 : begin + 1 + tokens.shape[1]]
            self.base[number] += _score(output["logits"][0], following, self.top)
            yield tokens.shape[1]

    def _read_guided(self, guide: Guide) -> Iterator[int]:
        """Decode all prompts together from their first tokens, and take their own tokens in place of those drawn."""
        n, longest = len(self.prompts), max(map(len, self.prompts))
        texts, _ = pad_right(self.prompts, device=self.lm.device)
        unused, first = np.zeros((n, longest)), [prompt[:1] for prompt in self.prompts]
        requests = [
            Request(prompt, self.steering, longest, unused[0], tuple(self.beta), frozenset(self.stops))
            for prompt in first
        ]
        decoder = Decoder(self.lm, guide, captures=False)
        decoder.add(first, range(n), requests, unused, capacity=n, width=longest)
        self.guided = [[None] for _ in first]
        for place in range(1, longest):
            proposal = decoder.draw(np.ones(n, dtype=bool)).proposal
            others = proposal.candidates != texts[:, place, None]
            found = proposal.log_probabilities.masked_fill(others, -torch.inf).amax(-1)  # −∞ for one that is none
            for row, number in enumerate(found.tolist()):
                if place < len(self.prompts[row]):
                    self.guided[row].append(number)
            yield max(n, FEW)
            if place + 1 < longest:
                decoder.read(texts[:, place])


def _score(logits: Float[Tensor, "t v"], following: Int[Tensor, " t"], top: int) -> list[BaseScore | None]:
    log_p = at_least_float32(logits).log_softmax(-1)
    values, tokens = log_p.topk(top)
    columns = log_p.gather(1, following[:, None])[:, 0].tolist(), tokens.tolist(), values.tolist()
    return [BaseScore(one, list(zip(*best, strict=True))) for one, *best in zip(*columns, strict=True)]
