"""The guides of a benchmark by name, and the models that they read: loaded ones, or random ones of one shape.

Random models are made on the device in their final data type. Beside radq's guides stand naive ways to compute the same
rewards, to compare times with. Axes: b batch, t time, k candidates, v vocabulary, s strengths.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import final

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

from radq.benchmark.config import SHAPES, BenchConfig, kind_of
from radq.guides.base import Advice, Guide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.guides.reward import RewardGuide
from radq.models.config import RewardModelConfig
from radq.models.loading import load, truncate
from radq.models.reading import Reader, Reading
from radq.models.reward import RewardModel, import_kind
from radq.models.vocabulary import find_bos
from radq.numerics import Candidates, Strengths, Texts, Tokens, require_memory
from radq.sources.hub import quiet

REWARD_LAYERS = 0.4  # of a language model's layers are in a random reward model of its first layers
ATTRIBUTE = "reward"
CODES = ([2], [3])  # GeDi's control codes, a token each


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
        return self.make_expert()

    @property
    def device(self) -> str:
        return str(self.lm.device)

    def _reward(self, kind: str) -> RewardModel:
        """The loaded reward model if it is of this kind, else one with random weights."""
        if self.loaded is not None and self.loaded.config.kind == kind:
            return self.loaded
        config = RewardModelConfig(
            kind=kind,  # pyright: ignore[reportArgumentType]
            attributes=[ATTRIBUTE],
            backbone=copy.deepcopy(self.backbone),
            bos_token_id=find_bos(self.lm.config, self.tokenizer),
            vocabulary=[self.backbone.vocab_size],
        )
        with _placed(self.device, self.lm.dtype):
            model = import_kind(kind)(config)
        model.init_head(model.backbone.get_input_embeddings().weight)
        return model.eval()

    def make_expert(self) -> PreTrainedModel:
        return make_random_lm(self.backbone, self.device, self.lm.dtype)


def load_models(config: BenchConfig, device: str) -> BenchModels:
    """Load or make the language model, and load the reward model if one is named."""
    if config.lm in SHAPES:
        shape = SHAPES[config.lm]
        parts = (shape.lm, shape.reward)
        own, backbone = (AutoConfig.for_model(shape.family, **shape.shared, **part) for part in parts)
        usual = "float32" if kind_of(device) == "cpu" else "bfloat16"
        dtype = getattr(torch, usual if config.dtype == "auto" else config.dtype)
        lm, tokenizer = make_random_lm(own, device, dtype), None
    else:
        lm, tokenizer = load(config.lm, device, config.dtype)
        backbone = copy.deepcopy(lm.config)
        truncate(backbone, math.ceil(REWARD_LAYERS * lm.config.num_hidden_layers))
        backbone._name_or_path = ""
    loaded = None
    if config.reward is not None:
        loaded = RewardModel.from_pretrained(config.reward, device, dtype=lm.dtype)
        assert loaded.config.backbone is not None
        backbone = loaded.config.backbone
    return BenchModels(lm, tokenizer or make_number_tokenizer(lm.config.vocab_size), backbone, loaded)


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


def make_number_tokenizer(size: int) -> PreTrainedTokenizerBase:
    """A tokenizer for random models: the text of token 7 is "7"."""
    backend = Tokenizer(WordLevel({str(number): number for number in range(size)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.WordPiece(prefix="")  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0", bos_token="1", eos_token="2")


# --- guides ---


class NaiveGuide(Guide[Reading]):
    """A reward guide whose candidates are scored in another way. Subclasses implement `advise`."""

    capturable = True

    def __init__(self, guide: RewardGuide):
        self.guide, self.beta = guide, guide.beta

    @property
    def readers(self) -> list[Reader]:
        return self.guide.readers

    def start(self, input_ids: Texts, attention_mask: Texts | None = None) -> Reading:
        return self.guide.start(input_ids, attention_mask)

    def advance(self, state: Reading, tokens: Tokens) -> Reading:
        return self.guide.advance(state, tokens)


@final
class SeparateForwards(NaiveGuide):
    """RAD-V with a forward for every candidate, and one more for the chosen token.

    The prefix is not read again: every forward uses its keys and values.
    """

    def advise(self, state: Reading, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        shifts = [self.guide.advise(state, column, beta).shift for column in candidates.split(1, dim=1)]
        return Advice(torch.cat(shifts, dim=1), state.drop_siblings())


@final
class WholeVocabulary(NaiveGuide):
    """RAD-Q that computes the rewards of all tokens, and then picks those of the candidates.

    It steers one attribute, and the base model must have the tokens of the reward model and no others.
    """

    def __init__(self, guide: RewardGuide):
        super().__init__(guide)
        (attribute,) = guide.attributes
        self.column = guide.model.config.attributes.index(attribute)
        self.low, self.high = guide.model.config.attribute_ranges[self.column]

    def advise(self, state: Reading, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        rewards, state = self.guide.model.score(state)  # (b, v, a)
        chosen = rewards[..., self.column].gather(1, candidates).clamp(self.low, self.high)  # (b, k)
        return Advice(self.beta_rows(beta, chosen) * chosen, state)


@dataclass(frozen=True)
class BenchGuide:
    """A guide of the benchmark, with its name in tables and plots."""

    title: str
    make: Callable[[BenchModels], Guide | None]


def _steer(model: RewardModel) -> RewardGuide:
    return RewardGuide(model, {model.config.attributes[0]: 1.0})


GUIDES: dict[str, BenchGuide] = {
    "none": BenchGuide("unguided", lambda models: None),
    "q": BenchGuide("RAD-Q", lambda models: _steer(models.rad_q)),
    "naive-q": BenchGuide("RAD-Q naive", lambda models: WholeVocabulary(_steer(models.rad_q))),
    "v": BenchGuide("RAD-V", lambda models: _steer(models.rad_v)),
    "naive-v": BenchGuide("RAD-V naive", lambda models: SeparateForwards(_steer(models.rad_v))),
    "dexperts": BenchGuide("DExperts", lambda models: DExpertsGuide(models.expert, models.make_expert(), 1.0)),
    "gedi": BenchGuide("GeDi", lambda models: GeDiGuide(models.expert, CODES, 1.0)),
}
