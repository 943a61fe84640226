"""Readouts inside vLLM that read vLLM's own hidden states: guides without a state, a cache or a forward of their own.

vLLM computes the logits of a step from the last hidden states of the rows that are sampled. Many of its models can also
give the outputs of earlier layers, which some ways of drafting need. These are put beside the last states, so that they
take the same way, and a readout takes what it reads from there, row by row.

Axes: r rows of logits, k candidates, s strengths, d hidden size of the base model, w width of all states of a row.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.errors import DataError, ModelError, OptionError, require_package
from radq.guides.base import Advice, Guide
from radq.guides.reward import RewardGuide
from radq.hosts.follower import Follower, GuidedRequest
from radq.models.loading import hidden_size, load_causal_lm
from radq.models.reading import OutputReading
from radq.models.readout import join_layers
from radq.sources.model_source import ModelSource

_KEPT: dict[str, Tensor] = {}  # the states of the latest logits of this process
WANTED = "radq_layers"  # the name in vLLM's configurations of the earlier layers whose outputs are wanted


def reads_shown(guide: Guide, shown: Sequence[int]) -> bool:
    """Whether a guide reads nothing but layers of the base model that are shown."""
    layers = _find_layers(guide)
    return bool(layers) and set(layers) <= set(shown)


def _find_layers(guide: Guide) -> tuple[int, ...]:
    """The layers of the base model that a guide reads; none if it reads by itself."""
    return guide.model.reader.base_layers if isinstance(guide, RewardGuide) else ()


# --- vLLM's side ---


def show_layers(guides: Iterable[Guide], vllm_config: Any) -> tuple[int, ...]:
    """Let vLLM show the layers that guides read; return them in the order in which their states stand side by side.

    Raises:
        OptionError, ModelError: the states are not those that a readout of the last layer was trained on. A readout of
            more layers runs the base model by itself then, as all of them do beside one that was trained on others, and
            in models that do not give their outputs.
    """
    readouts = [guide for guide in guides if isinstance(guide, RewardGuide) and _find_layers(guide)]
    if not readouts:
        return ()
    alone = [guide for guide in readouts if _find_layers(guide) == (guide.model.backbone.config.num_hidden_layers,)]
    hindrance = _find_hindrance(vllm_config)
    if alone and hindrance:
        raise OptionError(f"a readout of the last layer cannot be used with {hindrance}.", "turn that off in vLLM.")
    for guide in alone:
        _check_weights(guide, vllm_config)
    deeper = [guide for guide in readouts if guide not in alone]
    if hindrance or not _can_show(vllm_config) or not all(_has_weights(guide, vllm_config) for guide in deeper):
        readouts = alone  # layers that are shown count for every guide, so all must have been trained on them
    if not readouts:
        return ()
    keep_states()
    last = readouts[0].model.backbone.config.num_hidden_layers
    earlier = tuple(layer for layer in join_layers([_find_layers(guide) for guide in readouts]) if layer != last)
    if earlier:
        _show_earlier(vllm_config, earlier)
    return last, *earlier


def _find_hindrance(vllm_config: Any) -> str | None:
    """Name what makes the states of vLLM's rows others than those of the base model."""
    hindrances = {
        "quantised weights": vllm_config.model_config.quantization is not None,
        "LoRA adapters": vllm_config.lora_config is not None,
        "batch-sharded sampling": vllm_config.parallel_config.enable_batch_sharded_sampling,
    }
    return next((name for name, present in hindrances.items() if present), None)


def _check_weights(guide: RewardGuide, vllm_config: Any) -> None:
    """Raise if vLLM's base model is not the one whose states the readout was trained on."""
    name = vllm_config.model_config.model
    source = ModelSource.find(name)
    if source.weights_fingerprint != guide.model.config.backbone_fingerprint:
        guide.check_base(load_causal_lm(source))  # a copy in another data type is the same base model


def _has_weights(guide: RewardGuide, vllm_config: Any) -> bool:
    try:
        _check_weights(guide, vllm_config)
    except ModelError:
        return False
    return True


def _can_show(vllm_config: Any) -> bool:
    """Whether vLLM's model can give outputs of earlier layers, and nothing else makes use of them."""
    drafts = vllm_config.speculative_config
    if drafts is not None and not str(drafts.method).startswith("ngram"):
        return False
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or not isinstance(vllm_config.additional_config, dict):
        return False
    return hasattr(_find_class(vllm_config), "set_aux_hidden_state_layers")


def _find_class(vllm_config: Any) -> Any:
    return require_package("vllm.model_executor.model_loader.utils", "vllm").get_model_cls(vllm_config.model_config)


def _show_earlier(vllm_config: Any, layers: tuple[int, ...]) -> None:
    """Let vLLM's model put the outputs of earlier layers beside its last states.

    vLLM's second runner makes its processors after the model, so the method of the class is replaced. The configuration
    tells which models of the class are meant, and that what was compiled for others does not fit.
    """
    setattr(vllm_config.model_config.hf_config, WANTED, layers)
    vllm_config.additional_config[WANTED] = list(layers)

    def forward(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        wanted = getattr(getattr(self, "config", None), WANTED, ())
        if not wanted:
            return original(self, *arguments, **options)
        if getattr(self, WANTED, ()) != wanted:
            self.set_aux_hidden_state_layers(wanted)
            setattr(self, WANTED, wanted)
        last, earlier = original(self, *arguments, **options)
        return torch.cat([last, *earlier], dim=-1)

    _replace_forward(_find_class(vllm_config), forward)


def keep_states() -> None:
    """Let vLLM's layer that computes logits keep the states that it is given, and compute logits from the last ones."""

    def forward(original: Any, self: Any, lm_head: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        _KEPT["states"] = hidden_states
        width = getattr(lm_head, "embedding_dim", hidden_states.shape[-1])
        last = hidden_states if hidden_states.shape[-1] <= width else hidden_states[..., :width].contiguous()
        return original(self, lm_head, last, *arguments, **options)

    _replace_forward(require_package("vllm.model_executor.layers.logits_processor", "vllm").LogitsProcessor, forward)


def _replace_forward(kind: Any, forward: Callable[..., Any]) -> None:
    """Replace the method of a class, once, by a function that is given the original one."""
    original = kind.forward
    if not hasattr(original, "replaces"):
        kind.forward = lambda *arguments, **options: forward(original, *arguments, **options)
        kind.forward.replaces = original  # pyright: ignore[reportFunctionMemberAccess]


def take_states() -> Float[Tensor, "r w"]:
    if "states" not in _KEPT:
        raise DataError("vLLM has shown no hidden states.", "use a reward model with a transformer of its own.")
    return _KEPT["states"]


# --- guides ---


class ShownFollower(Follower):
    """A guide that advises on rows of logits by the states that belong to them, those of drafts too.

    It follows no text, so that it takes no memory.
    """

    def __init__(self, guide: Guide, capacity: int, length: int, device: torch.device, shown: tuple[int, ...]):
        """`shown` are the layers whose states stand side by side."""
        super().__init__(guide, capacity, length, device)
        self.shown = shown

    def plan_bytes(self) -> int:
        return 0

    def follow(
        self, present: Mapping[GuidedRequest, int], last: Tensor | None, widest: int
    ) -> dict[GuidedRequest, Exception]:
        if present != self.rows:
            self.rows = dict(present)
            self.layout += 1
        return {}

    def retain(self, texts: Collection[GuidedRequest]) -> None:
        self.follow({text: row for text, row in self.rows.items() if text in texts}, None, 1)

    def advise(
        self, rows: Int[Tensor, " b"] | None, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"]
    ) -> Advice:
        """Give an opinion on candidates in some rows of the latest logits, or in all of them."""
        states = take_states() if rows is None else take_states()[rows]
        parts = states.split(hidden_size(self.guide.readers[0].model.config), dim=-1)
        if len(parts) != len(self.shown):
            raise DataError(f"vLLM has shown {len(parts)} layers, not {len(self.shown)}.", "use --readout-layers 1.")
        own = torch.cat([parts[self.shown.index(layer)] for layer in _find_layers(self.guide)], dim=-1)
        return self.guide.advise(OutputReading(self.guide.readers[0], lambda: own), candidates, beta)
