"""RAD-V, the flexible kind of reward model.

    model = RadV.from_backbone("gpt2", attributes=["toxicity"])

Axes: b batch, t time, k candidates, d hidden, a attributes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from radq.models.config import RewardModelConfig
from radq.models.heads import ValueHead
from radq.models.loading import hidden_size
from radq.models.reward import RewardModel, RewardOutput
from radq.models.reward_state import RewardState

SIBLINGS_PER_FORWARD = 256  # more candidates than this are read in several forwards


@final
class RadV(RewardModel):
    """RAD-V computes r̂(v | x) from the hidden state of the token v, read after the prefix x.

    It is more flexible than RAD-Q, and needs a forward over every candidate.
    """

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        assert config.backbone is not None
        self.head = ValueHead(hidden_size(config.backbone), len(config.attributes))
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        name_or_folder: str | Path,
        attributes: Sequence[str],
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> "RadV":
        """Make an untrained model from a language model, or its first layers; options go to `RewardModelConfig`."""
        return cls._over_backbone(name_or_folder, attributes, num_layers, dtype, kind="v", **options)

    def init_head(self, output_embedding: Float[Tensor, "v d"]) -> None:
        nn.init.normal_(self.head.weight, std=1 / self.head.in_features)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> RewardOutput:
        hidden, packed = self._read_texts(input_ids, attention_mask)
        return RewardOutput(packed.unpack(self.head(hidden))[:, hidden.shape[1] - input_ids.shape[1] :])

    def _score(
        self, state: RewardState, candidates: Int[Tensor, "b k"] | None, known: Bool[Tensor, "#b k"]
    ) -> tuple[Float[Tensor, "b k a"], RewardState]:
        reading = state.reading
        if candidates is None:
            b = len(reading.last)
            candidates = torch.arange(self.vocabulary.size, device=reading.last.device).expand(b, -1)
        prefix = self.head(reading.last)[:, None]  # (b, 1, a)
        if candidates.shape[1] <= SIBLINGS_PER_FORWARD:
            siblings = reading.read_siblings(candidates)
            outputs, state = self.head(siblings.hidden), RewardState(reading, candidates, siblings)
        else:
            # Keys and values of the whole vocabulary would fill gigabytes: they are dropped chunk by chunk, and the
            # token chosen in the end is read once more.
            chunks = candidates.split(SIBLINGS_PER_FORWARD, dim=1)
            hidden = (reading.read_siblings(chunk).hidden for chunk in chunks)
            outputs, state = torch.cat([self.head(h) for h in hidden], dim=1), RewardState(reading)
        return torch.where(known[..., None], outputs, prefix), state
