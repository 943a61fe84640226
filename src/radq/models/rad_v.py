"""RAD-V, the flexible kind of reward model.

    model = RadV.from_backbone("gpt2", attributes=["toxicity"])

Axes: b batch, t time, p positions, k candidates, d hidden, a attributes.
"""

from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from radq.models.config import RewardModelConfig
from radq.models.heads import ValueHead
from radq.models.kv_cache import takes_siblings
from radq.models.loading import hidden_size
from radq.models.reading import Reading
from radq.models.reward import RewardModel, RewardOutput, Scored
from radq.numerics import Candidates, PlacedCandidates, Positions, Texts, pack_left

SIBLINGS_PER_FORWARD = 256  # more candidates than this are read in several forwards


@final
class RadV(RewardModel):
    """RAD-V computes r̂(v | x) from the hidden state of the token v, read after the prefix x.

    It is more flexible than RAD-Q, and needs a forward over every candidate. With a readout it gives values of texts
    without a transformer of its own, for best of n, for scoring and as a teacher; as a guide it runs the language model
    over every candidate.
    """

    kind = "v"

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        assert config.backbone is not None
        self.head = ValueHead(hidden_size(config.backbone), len(config.attributes))
        self.post_init()

    def forward(
        self, input_ids: Texts, attention_mask: Texts | None = None, states: Float[Tensor, "b m nd"] | None = None
    ) -> RewardOutput:
        """Head outputs for every token of a text; those of a readout maybe from its `base_states`."""
        if states is None:
            hidden, packed = self._read_texts(input_ids, attention_mask)
        else:
            packed = pack_left(input_ids, torch.ones_like(input_ids) if attention_mask is None else attention_mask)
            hidden = F.pad(self.read_hidden(states), (0, 0, 0, input_ids.shape[1] - states.shape[1]))
        return RewardOutput(packed.unpack(self.head(hidden))[:, hidden.shape[1] - input_ids.shape[1] :])

    @property
    def reads_once(self) -> bool:
        return takes_siblings(self.backbone)

    @torch.no_grad()
    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k a"]:
        reading = self.read(input_ids, attention_mask)
        before = reading.prefix.attention_mask.sum(1) - attention_mask.sum(1)  # a BOS that was put before a text
        places, size = positions + before[:, None], max(1, SIBLINGS_PER_FORWARD // candidates.shape[2])
        parts = zip(places.split(size, dim=1), candidates.split(size, dim=1), strict=True)
        hidden = torch.cat([self.read_hidden(reading.read_places(*part)) for part in parts], dim=1)
        return self.link(self.head(hidden))

    def _score(self, reading: Reading, candidates: Candidates | None, known: Bool[Tensor, "#b k"] | None) -> Scored:
        if candidates is None:
            b = len(reading.last)
            candidates = torch.arange(self.vocabulary.size, device=reading.last.device).expand(b, -1)
        prefix = self.head(self.read_hidden(reading.last))[:, None]  # (b, 1, a)
        if candidates.shape[1] <= SIBLINGS_PER_FORWARD:
            outputs, reading = self._score_siblings(reading, candidates)
        else:
            # Keys and values of the whole vocabulary would fill gigabytes: they are dropped chunk by chunk, and the
            # token chosen in the end is read once more.
            chunks = candidates.split(SIBLINGS_PER_FORWARD, dim=1)
            outputs = torch.cat([self._score_siblings(reading, chunk)[0] for chunk in chunks], dim=1)
            reading = reading.drop_siblings()
        return outputs if known is None else torch.where(known[..., None], outputs, prefix), reading

    def _score_siblings(self, reading: Reading, candidates: Candidates) -> Scored:
        reading = reading.read_siblings(candidates)
        assert reading.siblings is not None
        return self.head(self.read_hidden(reading.siblings.hidden)), reading
