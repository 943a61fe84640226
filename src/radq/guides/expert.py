"""Language models as experts: they read along with a text and say how likely the next token is.

Every text is read after a BOS and maybe a control code; a BOS that the text brings along is not read twice.
Axes: b batch, t time, n columns that are read, k candidates.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.models import kv_cache, packing
from radq.models.loading import Wrappable, num_logits
from radq.models.reading import Reader, Reading
from radq.models.slots import AnyReading, takes_slots
from radq.models.vocabulary import find_bos, read_vocabulary
from radq.numerics import at_least_float32, constant, log_probabilities


class Expert:
    """A causal language model that reads every text once after each of its control codes, as rows of one batch."""

    def __init__(
        self, lm: Wrappable, tokenizer: PreTrainedTokenizerBase | None = None, codes: Sequence[Sequence[int]] = ((),)
    ):
        kv_cache.takes_padding(lm)  # tried here, so that trials are no part of a first step
        self.lm, self.codes = lm.eval(), codes
        self.bos = find_bos(lm.config, tokenizer)
        vocabulary = read_vocabulary(num_logits(lm), tokenizer)
        self.reader = Reader(lm, "logits", "expert", vocabulary, tokenizer, overhead=1 + max(map(len, codes)))
        takes_slots(self.reader)

    def read(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None) -> Reading:
        """The state after a batch of texts: for each text one row for each code, side by side."""
        return self.reader.read(*self._put_codes_before(input_ids, attention_mask))

    def read_scored(
        self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None
    ) -> tuple[Reading, Float[Tensor, "rows n"]]:
        """The same, and the log-probability of every token that was read; 0 in the first column."""
        input_ids, attention_mask = self._put_codes_before(input_ids, attention_mask)
        reading, logits = self.reader.read_everywhere(input_ids, attention_mask)
        scores = torch.zeros_like(at_least_float32(logits[..., 0]))
        scores[:, 1:] = log_probabilities(logits[:, :-1], input_ids[:, 1:])
        return reading, scores

    def _put_codes_before(
        self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None
    ) -> tuple[Int[Tensor, "rows n"], Int[Tensor, "rows n"]]:
        """BOS, code and text for each code, left padded as little as the longest allows."""
        device = self.reader.device
        input_ids, mask = packing.leave_out_unknown(
            input_ids.to(device), None if attention_mask is None else attention_mask.to(device), self.reader.num_known
        )
        mask = mask * ~packing.leading(input_ids, mask, self.bos)
        b, longest = len(input_ids), max(map(len, self.codes))

        def put_before(code: Sequence[int]) -> tuple[Tensor, Tensor]:
            head = input_ids.new_tensor([self.bos, *code]).expand(b, -1)
            gap = input_ids.new_zeros(b, longest - len(code))
            return torch.cat([gap, head, input_ids], dim=1), torch.cat([gap, torch.ones_like(head), mask], dim=1)

        rows, masks = zip(*map(put_before, self.codes), strict=True)
        both = torch.stack(rows, dim=1).flatten(0, 1), torch.stack(masks, dim=1).flatten(0, 1)
        return packing.pack_right(*both)


def candidate_logits(reading: AnyReading, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """The logits of candidates after texts that a language model has read, in float32 or better.

    An unknown token gets the logit that makes its log-probability 0: it does not change how likely the text is.
    """
    candidates = candidates.to(reading.last.device)
    known = candidates < reading.reader.num_known
    logits = at_least_float32(reading.last.gather(1, candidates * known))
    return torch.where(known, logits, log_normaliser(reading))


def log_normaliser(reading: AnyReading) -> Float[Tensor, "b 1"]:
    """The logarithm of the sum over the vocabulary by which logits become log-probabilities."""
    return at_least_float32(reading.last).logsumexp(1, keepdim=True)


def class_log_posterior(
    sums: Float[Tensor, "2 ..."], lengths: Tensor, scale: float | Tensor, log_prior: Sequence[float]
) -> Float[Tensor, "2 ..."]:
    """log P(c | x) of two classes from the sums of log P(x_j | x_<j, c) over the tokens of texts x of these lengths.

    P(c | x_1..x_T) ∝ P(c) · Π_j P(x_j | x_<j, c)^(scale / T)
    """
    prior = constant(tuple(log_prior), sums.dtype, sums.device).view(2, *[1] * (sums.dim() - 1))
    return (scale * sums / lengths + prior).log_softmax(0)
