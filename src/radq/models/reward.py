"""Reward models over any decoder-only backbone, saved and loaded as transformers models.

    model = RadQ.from_backbone("gpt2", attributes=["toxicity"])
    model.save_pretrained("reward")
    model = RewardModel.from_pretrained("reward")

There are two ways to ask for rewards. `token_rewards` gives those of whole texts, by one forward without a cache. For
next tokens, `read` turns a batch of prefixes into a `Reading`, `score` gives the rewards of candidates, and
`Reading.advance` goes on by a token; `next_rewards` reads and scores in one call.

Axes: b batch, t time, k candidates, d hidden, a attributes.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights
from transformers.utils.generic import ModelOutput

from radq.errors import ModelError, OptionError
from radq.files import MODEL_FILES, atomic_folder
from radq.models import lora
from radq.models.config import RewardModelConfig
from radq.models.heads import check_head
from radq.models.loading import check_one_device, find_backbone, load_causal_lm, load_config, load_weights, to_device
from radq.models.prefill import InTurns, Turn, finish
from radq.models.reading import Reader, Reading, ValueReading
from radq.models.readout import Readout, choose_readout, sketch_weights
from radq.models.vocabulary import Vocabulary, find_bos, read_vocabulary, writes_bos
from radq.numerics import (
    Candidates,
    LeftPacked,
    PlacedCandidates,
    Positions,
    Texts,
    at_least_float32,
    leading,
    leave_out_unknown,
    pack_left,
    pack_right,
)
from radq.sources.hub import quiet
from radq.sources.model_source import ModelName, ModelSource, require_reward_model

M = TypeVar("M", bound="RewardModel")

KINDS = {"q": "RadQ", "v": "RadV"}  # in a module that imports this one

Scored = tuple[Float[Tensor, "b k a"], Reading]  # numbers about candidates, and the reading to go on from


@dataclass
class RewardOutput(ModelOutput):
    """Head outputs for the training losses: rewards, but without the σ of a model trained with cross-entropy."""

    rewards: Any = None  # a tensor (b, t, a); under autocast outputs are made again from a dict of their fields
    marginals: Tensor | None = None  # (b, t, a): Δr of the random tokens, where some were given
    candidates: Tensor | None = None  # (b, p, k, a): outputs of candidates at p positions, where some were given


class RewardModel(PreTrainedModel):
    """Base class of RadQ and RadV. `RewardModel.from_pretrained` loads either."""

    config_class = RewardModelConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    kind: Literal["q", "v"]
    config: RewardModelConfig
    head: Any
    tokenizer: PreTrainedTokenizerBase | None
    may_change = True  # whether a program may change weights after this model has computed something from them

    def __init__(self, config: RewardModelConfig):
        super().__init__(config)
        if config.backbone is None:
            raise OptionError("the configuration names no backbone.", "use from_backbone or from_pretrained.")
        # in the dtype that is asked for, not in the one the backbone was stored in
        self.backbone = AutoModel.from_config(config.backbone, dtype=torch.get_default_dtype())
        self.vocabulary = Vocabulary(*(config.vocabulary or [config.backbone.vocab_size]))
        self.tokenizer = None
        self.readout = Readout(self.backbone, config.backbone, **config.readout) if config.readout else None

    # --- making, saving, loading ---

    @classmethod
    def from_backbone(
        cls: type[M],
        name_or_folder: ModelName,
        attributes: Sequence[str],
        head: str = "linear",
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        loading: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> M:
        """Make an untrained model from a language model, or its first layers. RAD-V has one kind of head.

        `loading` are arguments with which transformers loads it, `options` those of `RewardModelConfig`.
        """
        source = ModelSource.find(name_or_folder, **loading)
        lm = load_causal_lm(source, num_layers, dtype, **loading)
        model = cls._over_lm(lm, source.find_tokenizer(), source, attributes, head=head, **options)
        model.freeze_embeddings()
        return model

    @classmethod
    def from_base(
        cls: type[M],
        name_or_folder: ModelName,
        attributes: Sequence[str],
        head: str = "linear",
        num_layers: int | None = None,
        width: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> M:
        """Make an untrained model that reads hidden states of a language model, which stays as it is.

        Args:
            num_layers: number of layers whose outputs are read, evenly spaced; by default 5.
            width: number of hidden units of the readout; by default as many as a state has numbers.
        """
        source = ModelSource.find(name_or_folder)
        shape = load_config(source)
        readout = choose_readout(shape.num_hidden_layers, shape.hidden_size, num_layers, width)
        model: Any = cls.from_backbone(source, attributes, head, dtype=dtype, readout=readout)
        model.backbone.requires_grad_(False)
        model.readout.sketch.copy_(sketch_weights(model.backbone))
        model.config.set_origin(source.origin)
        return model

    @classmethod
    def _over_lm(cls, lm: Any, tokenizer: Any, name: ModelName, attributes: Sequence[str], **options: Any) -> Any:
        """Make an untrained model over the backbone of a language model, which it shares with the language model."""
        if isinstance(attributes, str) or not attributes or len(set(attributes)) != len(attributes):
            raise OptionError(f"attributes must be a list of different names, got {attributes!r}.", "give one or more.")
        backbone = find_backbone(lm, name)
        embedding = lm.get_output_embeddings().weight
        shape = copy.deepcopy(lm.config)
        shape.tie_word_embeddings = embedding is lm.get_input_embeddings().weight
        shape._name_or_path = ""  # a path of this machine means nothing where the reward model goes
        check_head(options.get("head", "linear"))
        bos = find_bos(shape, tokenizer)
        if options.get("readout") and "prepend_bos" not in options:
            options["prepend_bos"] = writes_bos(tokenizer, bos)  # a readout reads what the base model reads
        config = RewardModelConfig(
            kind=cls.kind,
            attributes=list(attributes),
            backbone=shape,
            bos_token_id=bos,
            vocabulary=read_vocabulary(shape.vocab_size, tokenizer),
            **options,
        )
        with no_init_weights():
            model = cls(config)
        model.backbone = backbone
        model.init_head(embedding)
        model.tokenizer = tokenizer
        # not the whole: the backbone has this dtype, but for buffers that must stay float32
        for part in filter(None, (model.head, model.readout)):
            part.to(backbone.device, backbone.dtype)
        return model.eval()

    def init_head(self, output_embedding: Float[Tensor, "v d"]) -> None:
        """Give the head its first weights, and the output embedding where the model keeps one of its own."""
        self.head.reset_parameters()
        if self.readout is not None:
            self.readout.reset_parameters()

    def freeze_embeddings(self) -> None:
        self.backbone.get_input_embeddings().requires_grad_(False)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | Path, **kwargs: Any
    ) -> None:
        """Write config.json, safetensors and the tokenizer; if anything fails, none of them."""
        with atomic_folder(save_directory, replaces=MODEL_FILES) as folder, quiet():
            if self.config.beside_backbone:
                lora.save_beside_backbone(
                    self, folder, Path(save_directory), kwargs.get("state_dict") or self.state_dict()
                )
            else:
                super().save_pretrained(folder, **kwargs)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: ModelName,
        device: str | torch.device | None = None,
        *,
        backbone: str | Path | None = None,
        lm: Any = None,
        **kwargs: Any,
    ) -> "RewardModel":
        """Load a reward model.

        >>> model = radq.RewardModel.from_pretrained("embedded:sentiment")
        >>> guide = radq.RewardGuide(model, {"sentiment": 45.0})

        Args:
            pretrained_model_name_or_path: a folder, a name on the hub, `embedded:sentiment` or `embedded:toxicity`.
            device: where to put the model; the CPU by default, or where `device_map` says.
            backbone: name or folder of a LoRA model's backbone, where it is no longer at the place that the model
                remembers; other weights are refused.
            lm: the language model that is to be steered. A reward model that reads its hidden states then shares its
                weights and its device instead of loading them a second time; others take no notice of it.
            kwargs: those of transformers, such as `dtype`, `attn_implementation`, `device_map` or `revision`.
        """
        if device is not None and kwargs.get("device_map") is not None:
            raise OptionError(f"both device ({device}) and device_map are given.", "give one of them.")
        source = ModelSource.find(pretrained_model_name_or_path, **kwargs)
        with source.explained("a reward model"):
            stored, _ = RewardModelConfig.get_config_dict(source.place, **source.hub)
        require_reward_model(source.place, stored)
        kind = import_kind(stored["kind"])
        if not issubclass(kind, cls):
            raise ModelError(
                f"{source.place!r} holds a {kind.__name__}, not a {cls.__name__}.", "load it by RewardModel."
            )
        kwargs.pop("adapter_kwargs", None)  # AutoModel's; adapters of reward models are radq's own
        config: Any = kwargs.pop("config", None) or RewardModelConfig.from_dict(stored)
        if config.readout and lm is not None:
            return lora.load_beside_lm(kind, config, source, lm)
        if config.beside_backbone:
            model: Any = lora.load_beside_backbone(kind, config, source, backbone, **kwargs)
        else:
            if attention := kwargs.pop("attn_implementation", None):
                config.backbone._attn_implementation = attention
            model = load_weights(super(RewardModel, kind).from_pretrained, source, config=config, **kwargs)
        model.tokenizer = source.find_tokenizer() or model.tokenizer  # beside adapters: that of the backbone
        model.freeze_embeddings()
        if kwargs.get("device_map") is None:
            return to_device(model, source.place, device, kwargs.get("dtype", kwargs.get("torch_dtype")))
        check_one_device(model)
        return model.eval()

    @classmethod
    def _from_config(cls, config: RewardModelConfig, **kwargs: Any) -> Any:  # pyright: ignore
        """Make a model of the kind that the configuration names; `AutoModel.from_config` calls this."""
        return super(RewardModel, import_kind(config.kind))._from_config(config, **kwargs)

    def load_trained(self, folder: str | Path) -> None:
        """Load the trained weights from a folder that a model of this shape has saved, such as a checkpoint."""
        if self.config.beside_backbone:
            lora.load_adapters(self, ModelSource.find(folder))
        else:
            saved = load_weights(super(RewardModel, type(self)).from_pretrained, folder, dtype=self.dtype)
            self.load_state_dict(saved.state_dict())

    def add_lora(self, rank: int, backbone_name: str) -> None:
        """Freeze the backbone and add adapters to it. Only adapters and head are then trained and saved."""
        lora.add_adapters(self.backbone, rank)
        self.config.lora_rank = rank
        self.config.set_origin(ModelSource.find(backbone_name).origin)

    def train(self, mode: bool = True) -> Any:
        if mode and self.config.lora_rank:
            lora.unfold_adapters(self.backbone)  # which a guide has folded
        super().train(mode)
        if self.readout is not None:
            self.backbone.eval()  # states in training are those of decoding
        return self

    def notice_changes(self) -> None:
        """Look at the weights before texts are read outside training, since a program may have changed them.

        A readout refuses a base model that is no longer its own. Whatever was computed from weights is computed again.
        """
        if self.readout is not None:
            self.readout.require_base(self.backbone)
        if self.config.lora_rank and not self.training:
            lora.fold_adapters(self.backbone, only_again=True)

    # --- rewards of texts ---

    def token_rewards(
        self, input_ids: Texts, attention_mask: Texts | None = None, states: Float[Tensor, "b t nd"] | None = None
    ) -> Float[Tensor, "b t a"]:
        """r̂(u_t | u_<t) of every token of a batch of texts, maybe from `base_states`; 0 at padding on either side."""
        if self.may_change and not torch.is_grad_enabled():
            self.notice_changes()
        given = {} if states is None else {"states": states}
        rewards = self.link(self(input_ids, attention_mask, **given).rewards)
        return rewards if attention_mask is None else rewards * attention_mask[..., None]

    def link(self, outputs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Turn head outputs into rewards, in float32 or better."""
        return at_least_float32(outputs).sigmoid() if self.config.loss == "ce" else at_least_float32(outputs)

    def _read_texts(
        self, input_ids: Texts, attention_mask: Texts | None, states: Float[Tensor, "b t nd"] | None = None
    ) -> tuple[Float[Tensor, "b n d"], LeftPacked]:
        """Hidden states of whole texts; n is t, or t + 1 if a BOS was prepended.

        A readout that prepends none has a learned state before the first token. `states` are those of the base model
        where they are known, as `base_states` gives them.
        """
        self.reader.check_length(input_ids.shape[1], "shorten the text.")
        tokens, mask = self._with_bos(input_ids, attention_mask)
        empty = int(self.readout is not None and not self.config.prepend_bos)
        if empty:
            tokens, mask = F.pad(tokens, (1, 0)), F.pad(mask, (1, 0), value=1)
        packed = pack_left(tokens, mask)
        texts = packed.input_ids[:, empty:]
        if states is not None:
            hidden = F.pad(self.read_hidden(states), (0, 0, 0, texts.shape[1] - states.shape[1]))
        elif self.readout is not None:
            hidden = self.readout(self.readout.read_base(self.backbone, texts))
        else:
            hidden = self.backbone(input_ids=texts, use_cache=False).last_hidden_state
        if self.readout is not None and empty:
            hidden = torch.cat([self.readout.empty.to(hidden.dtype).expand(len(hidden), 1, -1), hidden], dim=1)
        return hidden, packed

    def accepts_states(self, lm: Any, input_ids: Texts) -> bool:
        """Whether the states of a language model at the tokens of texts are those from which a readout scores them."""
        if self.readout is None or find_backbone(lm, type(lm).__name__) is not self.backbone:
            return False
        return not self.config.prepend_bos or bool((input_ids[:, 0] == self.config.bos_token_id).all())

    @torch.no_grad()
    def base_states(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t nd"]:
        """Compute the base model's states from which a readout scores the tokens of whole texts.

        They are packed to the left, as many as a text has tokens. RAD-V scores a token from its own state. RAD-Q scores
        it from the state before it: that of a BOS which was prepended counts, and the last one scores no token.
        """
        assert self.readout is not None
        tokens, mask = self._with_bos(input_ids, attention_mask)
        states = self.readout.read_base(self.backbone, pack_left(tokens, mask).input_ids)
        before = mask.sum(1) - attention_mask.sum(1) if self.config.kind == "v" else torch.zeros_like(mask[:, 0])
        columns = before[:, None] + torch.arange(input_ids.shape[1], device=before.device)  # (b, t)
        return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))

    def text_rewards(self, input_ids: Int[Tensor, "1 t"], turn: Turn) -> InTurns[Float[Tensor, "1 t a"]]:
        """Compute `token_rewards` of one text, which is read in turns."""
        self.notice_changes()
        tokens, mask = self._with_bos(input_ids, None)
        packed = pack_left(tokens, mask).input_ids
        states = yield from self.reader.read_everywhere(packed, torch.ones_like(packed), turn)
        first = int(mask.sum()) - input_ids.shape[1] if self.config.kind == "v" else 0  # RAD-Q reads the BOS, too
        return self.token_rewards(input_ids, states=states[:, first : first + input_ids.shape[1]])

    def read_hidden(self, outputs: Float[Tensor, "*p n"]) -> Float[Tensor, "*p d"]:
        """The hidden states that the head reads, from what the reader keeps of tokens."""
        return outputs if self.readout is None else self.readout(outputs.to(self.readout.empty.device))

    def _with_bos(
        self, input_ids: Texts, attention_mask: Texts | None
    ) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
        """Put a BOS before texts, masked out for those that begin with one already, since some tokenizers add it."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if not self.config.prepend_bos:
            return input_ids, mask
        bos = input_ids.new_full((len(input_ids), 1), self.config.bos_token_id)
        present = leading(input_ids, mask, self.config.bos_token_id).any(1, keepdim=True)
        return torch.cat([bos, input_ids], dim=1), torch.cat([1 - present.long(), mask], dim=1)

    # --- rewards of next tokens ---

    @torch.no_grad()
    def next_rewards(
        self, input_ids: Texts, attention_mask: Texts | None = None, candidates: Candidates | None = None
    ) -> Float[Tensor, "b k a"]:
        """r̂(v | x) of k candidates after each prefix, or of the whole vocabulary."""
        return self.score(self.read(input_ids, attention_mask), candidates)[0]

    @property
    def reader(self) -> Reader:
        return Reader(
            self.backbone,
            "last_hidden_state" if self.readout is None else "states",
            "reward model",
            self.vocabulary,
            self.tokenizer,
            overhead=int(self.config.prepend_bos),
            reads_candidates=self.config.kind == "v",
            layers=() if self.readout is None else self.readout.layers,
        )

    def read(self, input_ids: Texts, attention_mask: Texts | None = None) -> ValueReading:
        """The state after a batch of prefixes."""
        return finish(self.read_in_turns(input_ids, attention_mask, Turn()))

    def read_in_turns(self, input_ids: Texts, attention_mask: Texts | None, turn: Turn) -> InTurns[ValueReading]:
        self.notice_changes()
        known = leave_out_unknown(input_ids, attention_mask, self.vocabulary.num_known)
        tokens, mask = pack_right(*self._with_bos(*known))
        if not bool(mask.any(1).all()):
            raise OptionError("a prefix has no tokens, and this model prepends no BOS.", "begin the prefix with a BOS.")
        return (yield from self.reader.read_in_turns(tokens, mask, turn))

    @torch.no_grad()
    def score(self, reading: Reading, candidates: Candidates | None = None) -> Scored:
        """The rewards of candidates, or of the whole vocabulary; unknown ones have the reward of the prefix itself."""
        known = None
        if candidates is None:
            known = torch.arange(self.vocabulary.size, device=reading.last.device)[None] < self.vocabulary.num_known
        elif not reading.all_known:
            known = candidates < self.vocabulary.num_known
        outputs, reading = self._score(reading, candidates, known)
        return self.link(outputs), reading

    @abstractmethod
    def _score(self, reading: Reading, candidates: Candidates | None, known: Bool[Tensor, "#b k"] | None) -> Scored:
        """Head outputs of candidates, or of the prefix where one is not known; None where all candidates are known."""

    @property
    def reads_once(self) -> bool:
        """Whether `place_rewards` can read a text once for the candidates at all its places."""
        return True

    @torch.no_grad()
    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k a"]:
        """The rewards of candidates in place of the tokens at some positions; all tokens must be known."""
        return self.link(self(input_ids, attention_mask, positions=positions, candidates=candidates).candidates)


def import_kind(kind: str) -> type[RewardModel]:
    return getattr(import_module("radq.models.kinds"), KINDS[kind])
