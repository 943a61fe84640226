"""The models of a benchmark: loaded ones, and random ones that are made on the device in their final data type."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from radq.benchmark.config import SHAPES, BenchConfig, Shape, kind_of
from radq.models.config import RewardModelConfig
from radq.models.loading import load, truncate
from radq.models.reward import RewardModel, import_kind
from radq.models.vocabulary import find_bos
from radq.numerics import require_memory
from radq.sources.hub import quiet

REWARD_LAYERS = 0.4  # of a language model's layers are in a random reward model of its first layers
ATTRIBUTE = "reward"


@dataclass(frozen=True)
class BenchModels:
    """A language model, and reward models and experts for it, which are made when they are asked for."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    backbone: PreTrainedConfig  # of all reward models and experts
    loaded: RewardModel | None  # the reward model that the user has named

    @cached_property
    def rad_q(self) -> RewardModel:
        return self._reward("q")

    @cached_property
    def rad_v(self) -> RewardModel:
        return self._reward("v")

    @cached_property
    def expert(self) -> PreTrainedModel:
        return self._expert()

    @cached_property
    def anti_expert(self) -> PreTrainedModel:
        return self._expert()

    @property
    def device(self) -> str:
        return str(self.lm.device)

    def _reward(self, kind: str) -> RewardModel:
        """The loaded reward model if it is of this kind, else a random one."""
        if self.loaded is not None and self.loaded.config.kind == kind:
            return self.loaded
        return make_random_reward(kind, self.backbone, find_bos(self.lm.config, self.tokenizer), self.lm)

    def _expert(self) -> PreTrainedModel:
        return make_random_lm(self.backbone, self.device, self.lm.dtype)


def load_models(config: BenchConfig, device: str) -> BenchModels:
    """Load or make the language model, and load the reward model if one is named."""
    if config.lm in SHAPES:
        shape = SHAPES[config.lm]
        lm, tokenizer = make_random_lm(_configure(shape, shape.lm), device, _random_dtype(config.dtype, device)), None
        backbone = _configure(shape, shape.reward)
    else:
        lm, tokenizer = load(config.lm, device, config.dtype)
        backbone = _first_layers(lm.config)
    loaded = None
    if config.reward is not None:
        loaded = RewardModel.from_pretrained(config.reward, device, dtype=lm.dtype)
        assert loaded.config.backbone is not None
        backbone = loaded.config.backbone
    return BenchModels(lm, tokenizer or make_number_tokenizer(lm.config.vocab_size), backbone, loaded)


def _configure(shape: Shape, own: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(shape.family, **shape.shared, **own)


def _first_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a language model with fewer layers."""
    backbone = copy.deepcopy(config)
    truncate(backbone, math.ceil(REWARD_LAYERS * config.num_hidden_layers))
    backbone._name_or_path = ""
    return backbone


def _random_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if kind_of(device) == "cpu" else torch.bfloat16
    return getattr(torch, name)


# --- random weights ---


@contextmanager
def _placed(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Make tensors inside the block on a device and in a data type, so that no copy in float32 is needed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), quiet():
            yield
    finally:
        torch.set_default_dtype(before)


def make_random_lm(config: PreTrainedConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A language model with random weights. Where memory does not suffice, an error says so before it is filled."""
    with _placed("meta", dtype):
        empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    size = sum(weight.numel() * weight.element_size() for weight in empty.parameters())
    require_memory(size, device, "a model of this shape", "choose a smaller shape or data type.")
    with _placed(device, dtype):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()


def make_random_reward(kind: str, backbone: PreTrainedConfig, bos: int, lm: PreTrainedModel) -> RewardModel:
    """A reward model with random weights, on the device and in the data type of the language model."""
    config = RewardModelConfig(
        kind=kind,  # pyright: ignore[reportArgumentType]
        attributes=[ATTRIBUTE],
        backbone=copy.deepcopy(backbone),
        bos_token_id=bos,
        vocabulary=[backbone.vocab_size],
    )
    with _placed(str(lm.device), lm.dtype):
        model = import_kind(kind)(config)
    model.init_head(model.backbone.get_input_embeddings().weight)
    return model.eval()


def make_number_tokenizer(size: int) -> PreTrainedTokenizerBase:
    """A tokenizer for random models: the text of token 7 is "7"."""
    backend = Tokenizer(WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.WordPiece(prefix="")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0", bos_token="1", eos_token="2")
