"""DExperts (Liu et al. 2021): two language models, one finetuned on text of an attribute and one on text without.

An expert is a language model that reads along with a text and says how likely the next token is; GeDi has one, too.
Every text is read after a BOS and maybe a control code; a BOS that the text brings along is not read twice.
Axes: b batch, t time, n columns that are read, p places, k candidates; rows are texts, once for each control code.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, OptionError, VocabularyError
from radq.guides.base import Advice, Guide, Prompts, States
from radq.guides.folders import ANTI_EXPERT, EXPERT, holds_experts
from radq.models import kv_cache
from radq.models.loading import Wrappable, load_causal_lm, num_logits
from radq.models.prefill import InTurns, Turn, finish
from radq.models.reading import Reader, Reading, ValueReading
from radq.models.slots import takes_slots
from radq.models.vocabulary import find_bos, read_vocabulary
from radq.numerics import (
    Candidates,
    PlacedCandidates,
    Positions,
    Strengths,
    Texts,
    Tokens,
    at_least_float32,
    constant,
    leading,
    leave_out_unknown,
    pack_right,
    texts_per_forward,
)
from radq.sources.model_source import ModelSource


class Places(NamedTuple):
    """The answers of a language model at some places of texts, about candidates for the token that comes there."""

    logits: Float[Tensor, "rows p k"]  # as those of `candidate_logits`
    normaliser: Float[Tensor, "rows p 1"]  # by which logits become log-probabilities
    scores: Float[Tensor, "rows p 1"]  # log-probability of the text before the place, without BOS and control code
    lengths: Int[Tensor, "rows p 1"]  # number of tokens of this text


class Expert:
    """A causal language model that reads every text once after each of its control codes, as rows of one batch."""

    def __init__(
        self,
        lm: Wrappable,
        tokenizer: PreTrainedTokenizerBase | None = None,
        codes: Sequence[Sequence[int]] = ((),),
        keeps_scores: bool = False,
    ):
        kv_cache.takes_padding(lm)  # tried here, so that trials are no part of a first step
        self.lm, self.codes = lm.eval(), codes
        self.bos = find_bos(lm.config, tokenizer)
        vocabulary = read_vocabulary(num_logits(lm), tokenizer)
        overhead = 1 + max(map(len, codes))
        self.reader = Reader(lm, "logits", "expert", vocabulary, tokenizer, overhead, keeps_scores=keeps_scores)
        takes_slots(self.reader)

    def read(self, prompts: Prompts) -> InTurns[ValueReading]:
        """The state after a batch of texts: for each text one row for each code, side by side."""
        batch = self._put_codes_before(prompts.input_ids, prompts.attention_mask)
        return self.reader.read_in_turns(*batch, prompts.turn)

    def read_scored(self, prompts: Prompts) -> InTurns[tuple[ValueReading, Float[Tensor, "rows n"], object]]:
        """The same, and the log-probability of every token that was read but the first."""
        batch = self._put_codes_before(prompts.input_ids, prompts.attention_mask)
        return self.reader.read_scored(*batch, prompts.turn)

    @torch.no_grad()
    def read_places(
        self, input_ids: Texts, attention_mask: Texts, places: Positions, candidates: PlacedCandidates
    ) -> Places:
        """Read each text once, and ask for candidates in place of the tokens at some positions, or after the last.

        A model that takes no padding reads one text at a time.
        """
        columns = input_ids.shape[1] + self.reader.overhead
        rows = texts_per_forward(columns * self.reader.vocabulary.size, self.reader.device)
        size = max(1, rows // len(self.codes)) if kv_cache.takes_padding(self.lm) else 1
        batch = (input_ids, attention_mask, places, candidates)
        parts = [self._read_some_places(*part) for part in zip(*(values.split(size) for values in batch), strict=True)]
        return Places(*map(torch.cat, zip(*parts, strict=True)))

    def _read_some_places(
        self, input_ids: Texts, attention_mask: Texts, places: Positions, candidates: PlacedCandidates
    ) -> Places:
        rows, mask = self._put_codes_before(input_ids, attention_mask)
        logits = finish(self.reader.read_everywhere(rows, mask, Turn()))  # (rows, n, v)
        normaliser = log_normaliser(logits)  # (rows, n, 1)
        totals = _score_tokens(logits, normaliser, rows).cumsum(1)  # (rows, n)
        read = self._choose_tokens(input_ids, attention_mask)[1].cumsum(1)  # (b, t)
        before = torch.cat([torch.zeros_like(read[:, :1]), read], dim=1).gather(1, places.to(read.device))  # (b, p)
        start = rows.shape[1] - 1 - read[:, -1:]  # the column before the text, (b, 1)
        before, start, candidates = (
            values.repeat_interleave(len(self.codes), dim=0) for values in (before, start, candidates.to(read.device))
        )
        columns = start + before  # the columns whose outputs are about the places, (rows, p)
        normaliser = normaliser.gather(1, columns[..., None])  # (rows, p, 1)
        known = candidates < self.reader.num_known
        row = torch.arange(len(rows), device=read.device)[:, None, None]
        said = at_least_float32(logits[row, columns[..., None], candidates * known])  # (rows, p, k)
        scores = totals.gather(1, columns) - totals.gather(1, start)
        return Places(torch.where(known, said, normaliser), normaliser, scores[..., None], before[..., None])

    def _put_codes_before(
        self, input_ids: Texts, attention_mask: Texts | None
    ) -> tuple[Int[Tensor, "rows n"], Int[Tensor, "rows n"]]:
        """BOS, code and text for each code, left padded as little as the longest allows."""
        input_ids, mask = self._choose_tokens(input_ids, attention_mask)
        b, longest = len(input_ids), max(map(len, self.codes))

        def put_before(code: Sequence[int]) -> tuple[Tensor, Tensor]:
            head = input_ids.new_tensor([self.bos, *code]).expand(b, -1)
            gap = input_ids.new_zeros(b, longest - len(code))
            return torch.cat([gap, head, input_ids], dim=1), torch.cat([gap, torch.ones_like(head), mask], dim=1)

        rows, masks = zip(*map(put_before, self.codes), strict=True)
        return pack_right(torch.stack(rows, dim=1).flatten(0, 1), torch.stack(masks, dim=1).flatten(0, 1))

    def _choose_tokens(self, input_ids: Texts, attention_mask: Texts | None) -> tuple[Texts, Texts]:
        """Mask the tokens that are not read: unknown ones, and a BOS that the text brings along."""
        device = self.reader.device
        input_ids, mask = leave_out_unknown(
            input_ids.to(device), None if attention_mask is None else attention_mask.to(device), self.reader.num_known
        )
        return input_ids, mask * ~leading(input_ids, mask, self.bos)


def candidate_logits(reading: Reading, candidates: Candidates) -> Float[Tensor, "b k"]:
    """The logits of candidates after texts that a language model has read, in float32 or better.

    An unknown token gets the logit that makes its log-probability 0: it does not change how likely the text is.
    """
    candidates = candidates.to(reading.last.device)
    known = candidates < reading.reader.num_known
    logits = at_least_float32(reading.last.gather(1, candidates * known))
    return torch.where(known, logits, log_normaliser(reading.last))


def log_normaliser(logits: Float[Tensor, "*p v"]) -> Float[Tensor, "*p 1"]:
    """The logarithm of the sum over the vocabulary by which logits become log-probabilities."""
    return at_least_float32(logits).logsumexp(-1, keepdim=True)


def _score_tokens(
    logits: Float[Tensor, "b n v"], normaliser: Float[Tensor, "b n 1"], input_ids: Int[Tensor, "b n"]
) -> Float[Tensor, "b n"]:
    """The log-probability of each token by the output at the one before it; 0 for the first."""
    scores = torch.zeros_like(normaliser[..., 0])
    chosen = at_least_float32(logits[:, :-1].gather(2, input_ids[:, 1:, None]))  # (b, n − 1, 1)
    scores[:, 1:] = (chosen - normaliser[:, :-1])[..., 0]
    return scores


def class_log_posterior(
    sums: Float[Tensor, "2 ..."], lengths: Tensor, scale: float | Tensor, log_prior: Sequence[float]
) -> Float[Tensor, "2 ..."]:
    """log P(c | x) of two classes from the sums of log P(x_j | x_<j, c) over the tokens of texts x of these lengths.

    P(c | x_1..x_T) ∝ P(c) · Π_j P(x_j | x_<j, c)^(scale / T)
    """
    prior = constant(tuple(log_prior), sums.dtype, sums.device).view(2, *[1] * (sums.dim() - 1))
    return (scale * sums / lengths + prior).log_softmax(0)


# --- DExperts ---


@final
class DExpertsGuide(Guide[States[Reading]]):
    """shift(v) = α (z⁺(v | x) − z⁻(v | x)), z⁺ and z⁻ the logits of expert and anti-expert.

    α is signed: a negative one steers away from what the expert was trained on. A step is one forward of one token for
    each of the two. A token that the experts do not know counts as equally likely for both.
    """

    capturable = True

    def __init__(
        self,
        expert: PreTrainedModel,
        anti_expert: PreTrainedModel,
        alpha: float,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        """`tokenizer` is the experts' own: to compare vocabularies token by token and not by size alone."""
        if not math.isfinite(alpha):
            raise OptionError(f"alpha must be a finite number, got {alpha}.", "give another alpha.")
        self.expert, self.anti_expert = Expert(expert, tokenizer), Expert(anti_expert, tokenizer)
        first, second = (reader.vocabulary for reader in self.readers)
        if first != second:
            raise VocabularyError(
                f"the expert has {first.size} tokens, the anti-expert {second.size}.", "train both from one backbone."
            )
        self.beta = (alpha,)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, alpha: float, device: str = "cpu", dtype: torch.dtype | str = "auto"
    ) -> "DExpertsGuide":
        """Load the experts in `folder`/expert and `folder`/anti, as `radq train-experts` writes them."""
        return load_experts(folder, device, dtype)(alpha=alpha)

    @property
    def readers(self) -> list[Reader]:
        return [self.expert.reader, self.anti_expert.reader]

    def start_in_turns(self, prompts: Prompts) -> InTurns[States[Reading]]:
        wanted = yield from self.expert.read(prompts)
        unwanted = yield from self.anti_expert.read(prompts)
        return States((wanted, unwanted))

    def advise(self, state: States[Reading], candidates: Candidates, beta: Strengths | None = None) -> Advice:
        wanted, unwanted = (candidate_logits(part, candidates).to(candidates.device) for part in state.parts)
        difference = wanted - unwanted
        return Advice(self.beta_rows(beta, wanted) * difference, state, rewards=(difference[..., None],))

    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k 1"]:
        wanted, unwanted = (
            expert.read_places(input_ids, attention_mask, positions, candidates).logits.to(candidates.device)
            for expert in (self.expert, self.anti_expert)
        )
        return (wanted - unwanted)[..., None]

    def advance(self, state: States[Reading], tokens: Tokens) -> States[Reading]:
        return States(tuple(part.advance(tokens) for part in state.parts))


def load_experts(
    folder: str | Path, device: str = "cpu", dtype: torch.dtype | str = "auto"
) -> Callable[..., DExpertsGuide]:
    """Load the models of `DExpertsGuide`; return a function that makes guides from α."""
    if not holds_experts(folder):
        raise ModelError(
            f"{str(folder)!r} has no folders {EXPERT!r} and {ANTI_EXPERT!r}.",
            "make them with `radq train-experts --method dexperts`.",
        )
    parts = [ModelSource.find(Path(folder) / name) for name in (EXPERT, ANTI_EXPERT)]
    expert, anti_expert = (load_causal_lm(part, dtype=dtype, device=device) for part in parts)
    return partial(DExpertsGuide, expert, anti_expert, tokenizer=parts[0].find_tokenizer())
