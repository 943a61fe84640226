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

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.steering import Proposal, RowSettings, propose
from radq.guides.base import BaseStates, Guide, Prompts
from radq.models import kv_cache
from radq.models.loading import Wrappable, evaluating, num_logits
from radq.models.prefill import finish
from radq.models.reading import Reader
from radq.models.readout import join_layers, pick_layers
from radq.models.vocabulary import Vocabulary
from radq.numerics import Tokens, at_least_float32

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
        self.lm, self.guide, self.prompts, self.top = lm, guide, prompts, top
        self.steering, self.beta, self.stops = steering, beta, stops
        self.base: list[list[BaseScore | None]] = [[None] for _ in prompts]
        self.guided: list[list[float | None]] = []
        self._work = self._read()

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

    def _read(self) -> Iterator[int]:
        """Read the prompts, and yield the number of tokens of each forward."""
        for number in range(len(self.prompts)):
            yield from self._read_by_base(number)
        if self.guide is not None:
            yield from self._read_guided(self.guide)

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
        longest, device = max(map(len, self.prompts)), self.lm.device
        texts = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in self.prompts], device=device)
        first, ones, size = texts[:, :1], torch.ones_like(texts[:, :1]), num_logits(self.lm)
        known = join_layers([reader.base_layers for reader in guide.readers])
        base = Reader(self.lm, "logits", "base model", Vocabulary(size), layers=known).read(first, ones)

        def take_states(layers: tuple[int, ...]) -> Float[Tensor, "b n"]:
            assert base.notes is not None
            return pick_layers(base.notes, known, layers)

        state = finish(guide.start_in_turns(Prompts(first, ones, base=BaseStates(take_states, size))))
        n = len(self.prompts)
        strengths = RowSettings.stack([self.steering] * n, [self.beta] * n, size, device, stops=[self.stops] * n)
        self.guided = [[None] for _ in range(n)]
        for place in range(1, longest):
            proposal = propose(base.last, guide, state, strengths)
            for row, found in enumerate(_find(proposal, texts[:, place]).tolist()):
                if place < len(self.prompts[row]):
                    self.guided[row].append(found)
            yield max(len(texts), FEW)
            if place + 1 < longest:
                base = base.read(texts[:, place])
                state = guide.advance(proposal.state, texts[:, place])


def _score(logits: Float[Tensor, "t v"], following: Int[Tensor, " t"], top: int) -> list[BaseScore | None]:
    log_p = at_least_float32(logits).log_softmax(-1)
    values, tokens = log_p.topk(top)
    columns = log_p.gather(1, following[:, None])[:, 0].tolist(), tokens.tolist(), values.tolist()
    return [BaseScore(one, list(zip(*best, strict=True))) for one, *best in zip(*columns, strict=True)]


def _find(proposal: Proposal, tokens: Tokens) -> Float[Tensor, " b"]:
    """Find the log-probability of a token of each row among the candidates; −∞ for one that is none."""
    same = proposal.candidates == tokens[:, None]
    return proposal.log_probabilities.masked_fill(~same, -torch.inf).amax(-1)
