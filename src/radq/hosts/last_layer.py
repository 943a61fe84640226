"""Readouts of the last layer inside vLLM: guides that need no state, no cache and no forward of their own.

vLLM computes the logits of a step from the last hidden states of the rows that are sampled. A readout that reads this
layer alone takes the same states, row by row. Axes: r rows of logits, k candidates, s strengths.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from radq.errors import DataError, OptionError, require_package
from radq.guides import Guide, RewardGuide
from radq.guides.base import Advice
from radq.hosts.follower import Follower, Text
from radq.models.loading import load_causal_lm
from radq.models.origins import identify_backbone
from radq.models.reward_state import BaseReading, RewardState

_KEPT: dict[str, Tensor] = {}  # the states of the latest logits of this process


def reads_last_layer(guide: Guide) -> bool:
    """Whether a guide reads nothing but the states from which the base model computes its logits."""
    if not isinstance(guide, RewardGuide):
        return False
    return guide.model.reader.base_layers == (guide.model.backbone.config.num_hidden_layers,)


def keep_last_states() -> None:
    """Let vLLM's layer that computes logits keep the states that it is given.

    vLLM's second runner makes its processors after the model, so the method is replaced: another class would come too
    late.
    """
    layer: Any = require_package("vllm.model_executor.layers.logits_processor", "vllm").LogitsProcessor
    original = layer.forward
    if hasattr(original, "keeps_states"):
        return

    def forward(self: Any, lm_head: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        _KEPT["states"] = hidden_states
        return original(self, lm_head, hidden_states, *arguments, **options)

    forward.keeps_states = True  # pyright: ignore[reportFunctionMemberAccess]
    layer.forward = forward


def take_states() -> Float[Tensor, "r d"]:
    """The states of the latest logits, one for each row."""
    if "states" not in _KEPT:
        raise DataError("vLLM has shown no hidden states.", "use a readout of more layers.")
    return _KEPT["states"]


def check_last_layer(guides: Iterable[Guide], vllm_config: Any) -> None:
    """Raise if the states of vLLM's base model are not those that a readout was trained on."""
    readouts = [guide for guide in guides if reads_last_layer(guide)]
    if not readouts:
        return
    model = vllm_config.model_config
    hindrances = {
        "quantised weights": model.quantization is not None,
        "LoRA adapters": vllm_config.lora_config is not None,
        "batch-sharded sampling": vllm_config.parallel_config.enable_batch_sharded_sampling,
    }
    for name, present in hindrances.items():
        if present:
            raise OptionError(f"a readout of the last layer cannot be used with {name}.", "turn that off in vLLM.")
    for guide in readouts:
        assert isinstance(guide, RewardGuide)
        if identify_backbone(model.model).fingerprint != guide.model.config.backbone_fingerprint:
            guide.check_base(load_causal_lm(model.model))  # a copy in another data type is the same base model


class LastLayerRows(Follower):
    """A guide whose rows are those of the logits. It follows no text, so that it takes no memory."""

    def plan_bytes(self) -> int:
        return 0

    def follow(self, present: Mapping[Text, int], last: Tensor | None, widest: int) -> dict[Text, Exception]:
        if present != self.rows:
            self.rows, self.texts = dict(present), list(present)
            self.layout += 1
        return {}

    def retain(self, texts: Iterable[Text]) -> None:
        staying = set(texts)
        self.follow({text: row for text, row in self.rows.items() if text in staying}, None, 1)

    def advise_beside(
        self, states: Float[Tensor, "b d"], candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"]
    ) -> Advice:
        return self.guide.advise(RewardState(BaseReading(lambda: states)), candidates, beta)


class LastLayerFollower(LastLayerRows):
    """A guide that advises on one row of logits for each text."""

    def advise(self, rows: Int[Tensor, " b"], candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"]) -> Advice:
        return self.advise_beside(take_states()[rows], candidates, beta)
