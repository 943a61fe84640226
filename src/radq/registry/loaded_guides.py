"""The loaded guides of a server, alone or beside the base model that `radq serve` runs.

Names that clients use share models: one that several names need is loaded once, and reads a text once, whatever
strengths the text has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, chain
from operator import add
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from radq.errors import ContextLengthError
from radq.guides.base import Guide
from radq.guides.folders import EXPERT, holds_experts
from radq.guides.reward import RewardGuide
from radq.guides.spec import GUIDES, find_kind, guide_maker
from radq.models.loading import Wrappable, choose_dtype, find_device, load, load_config, max_positions, num_logits
from radq.models.prefill import InTurns, Turn
from radq.models.reading import Reader
from radq.models.readout import join_layers, pick_layers
from radq.models.reward import RewardModel
from radq.models.vocabulary import Vocabulary, check_vocabulary, read_vocabulary
from radq.registry.config import GuideEntry, ServeConfig, naming
from radq.registry.details import TokenTexts, describe_scores, encode_scored
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource

ModelKey = tuple[str, tuple[tuple[str, float], ...]]  # a folder, and the numbers of its guide that are no strengths
UNLIMITED = 2**31  # tokens of a text, where no model has a limit


@dataclass(frozen=True)
class Selection:
    """The guides that a text needs, by their numbers among those that are loaded, and the strengths of all of these."""

    guides: tuple[int, ...] = ()
    strengths: tuple[float, ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)  # of each name among the strengths


@dataclass
class LoadedGuides:
    """Guides with all their strengths, and the place of each registered name among them."""

    guides: list[Guide] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # of a name: its guide, and its strength there

    @classmethod
    def load(
        cls, entries: Mapping[str, GuideEntry], device: str = "cpu", dtype: str = "auto", lm: Any = None
    ) -> "LoadedGuides":
        strengths: dict[ModelKey, list[str]] = {}
        places: dict[str, tuple[int, int]] = {}
        for name, entry in entries.items():
            key = _find_folder(entry), tuple(sorted(entry.options.items()))
            names = strengths.setdefault(key, [])
            if entry.strength not in names:
                names.append(entry.strength)
            places[name] = list(strengths).index(key), names.index(entry.strength)
        folders = {entry.folder for entry in entries.values()}
        makers = {folder: guide_maker(folder, device, dtype, lm=lm) for folder in folders}
        guides = [
            makers[EMBEDDED if folder.startswith(f"{EMBEDDED}:") else folder](dict.fromkeys(names, 1.0) | dict(options))
            for (folder, options), names in strengths.items()
        ]
        return cls(guides, places)

    def strengths(self, wanted: Mapping[str, float]) -> dict[int, list[float]]:
        """Find all strengths of each guide that is needed; those of several names for one strength add up."""
        rows: dict[int, list[float]] = {}
        for name, number in wanted.items():
            guide, place = self.places[name]
            rows.setdefault(guide, [0.0] * len(self.guides[guide].beta))[place] += number
        return rows

    def select(self, wanted: Mapping[str, float]) -> Selection:
        """Select the guides that texts with these strengths by name need."""
        rows = self.strengths(wanted)
        every = [rows.get(number, [0.0] * len(guide.beta)) for number, guide in enumerate(self.guides)]
        first = [0, *accumulate(map(len, every))]  # the place of each guide among the strengths
        places = {name: first[guide] + place for name, (guide, place) in self.places.items() if name in wanted}
        return Selection(tuple(sorted(rows)), tuple(chain(*every)), places)

    def sum(self, wanted: Mapping[str, float]) -> tuple[Guide | None, tuple[float, ...]]:
        """Add up the guides that texts with these strengths by name need; also return the strengths of the sum."""
        rows = sorted(self.strengths(wanted).items())
        guide = reduce(add, [self.guides[number] for number, _ in rows]) if rows else None
        return guide, tuple(strength for _, row in rows for strength in row)

    # --- rewards ---

    @property
    def reward_columns(self) -> dict[str, tuple[RewardModel, int]]:
        """The reward model behind each name, and the column of its rewards; experts have none."""
        return {
            name: (guide.model, guide.columns[place])
            for name, (number, place) in self.places.items()
            if isinstance(guide := self.guides[number], RewardGuide)
        }

    @property
    def reward_models(self) -> list[RewardModel]:
        """The reward models of all names, each once."""
        return list(dict.fromkeys(model for model, _ in self.reward_columns.values()))

    def reward_ranges(self) -> dict[str, tuple[float, float] | None]:
        """Find the lowest and highest reward of each name; None for a guide without a reward model."""
        ranges = {name: model.config.attribute_ranges[column] for name, (model, column) in self.reward_columns.items()}
        return dict.fromkeys(self.places) | ranges

    def name_rewards(self, rewards: Mapping[RewardModel, torch.Tensor]) -> dict[str, list[float]]:
        """Return rewards by name, from those of each model, (1, t, attributes)."""
        return {
            name: rewards[model][0, :, column].clamp(*model.config.attribute_ranges[column]).tolist()
            for name, (model, column) in self.reward_columns.items()
        }

    @torch.no_grad()
    def token_rewards(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Compute the reward of each token of a text by each name with a reward model."""
        texts = {model: torch.tensor([list(token_ids)], device=model.device) for model in self.reward_models}
        return self.name_rewards({model: model.token_rewards(ids) for model, ids in texts.items()})


def _find_folder(entry: GuideEntry) -> str:
    """Find the folder of the model of a guide; each embedded attribute has a model of its own."""
    return f"{EMBEDDED}:{entry.strength}" if entry.folder == EMBEDDED else entry.folder


class Served:
    """A base model with guides."""

    def __init__(self, config: ServeConfig):
        self.config, self.device = config, find_device(config.device)
        self.lm: Wrappable
        self.tokenizer: PreTrainedTokenizerBase
        self.dtype = choose_dtype(config.dtype, config.base, self.device)
        self.lm, self.tokenizer = load(config.base, self.device, self.dtype)
        self.loaded = LoadedGuides.load(config.guides, str(self.device), self.dtype, self.lm)
        for guide in self.loaded.guides:
            guide.check_base(self.lm)
            guide.check_vocabulary(num_logits(self.lm), self.tokenizer, config.base_id)
        # The most tokens of a text that the base model and all guides have positions for.
        contexts = [max_positions(self.lm.config), *(guide.context for guide in self.loaded.guides)]
        self.context = min((length for length in contexts if length is not None), default=UNLIMITED)
        self.has_chat = getattr(self.tokenizer, "chat_template", None) is not None
        self.texts = TokenTexts(self.tokenizer)
        self.show_token = self.texts.show

    def encode(self, text: str) -> list[int]:
        """Tokenise a text to be scored, unless it is too long."""
        return encode_scored(self.tokenizer, self.lm.config, text, min(self.config.limits.prompt_tokens, self.context))

    def score(self, token_ids: Sequence[int], turn: Turn) -> InTurns[dict[str, Any]]:
        """Compute the log-probability of each token under the base model, and its reward by each reward model.

        Readouts take the states of the base model's forward.
        """
        lm, input_ids = self.lm, torch.tensor([list(token_ids)], device=self.lm.device)
        models = self.loaded.reward_models
        readouts = {model: model.reader.layers for model in models if model.accepts_states(lm, input_ids)}
        layers = join_layers(list(readouts.values()))
        reader = Reader(lm, "logits", "base model", Vocabulary(num_logits(lm)), layers=layers)
        _, likelihoods, states = yield from reader.read_scored(input_ids, torch.ones_like(input_ids), turn)
        rewards: dict[RewardModel, torch.Tensor] = {}
        for model in models:
            ids = input_ids.to(model.device)
            if states is not None and model in readouts:
                rewards[model] = model.token_rewards(ids, states=pick_layers(states, layers, readouts[model]))
            else:
                rewards[model] = yield from model.text_rewards(ids, turn)
        named = self.loaded.name_rewards(rewards)
        return describe_scores(token_ids, likelihoods[0].tolist(), named, self.texts.show_each)


# --- a check that reads no weights ---


def check_guides(config: ServeConfig, max_model_len: int | None = None) -> list[str]:
    """Raise if a server could not start with these guides, and texts of so many tokens; return a line about each guide.

    It takes seconds. A server would find the same mistakes after it has loaded the base model.
    """
    config.check()
    source = ModelSource.find(config.base)
    base = load_config(source)
    lines: list[str] = []
    for name, entry in config.guides.items():
        with naming(f"the guide {name!r}"):
            vocabulary, context = _read_vocabulary_and_context(entry)
            check_vocabulary(vocabulary, base.get_text_config().vocab_size, source.tokenizer, config.base)
            longest = min((length for length in (max_positions(base), context) if length is not None), default=None)
            if longest is not None and max_model_len is not None and max_model_len > longest:
                reason = f"it reads texts of {longest} tokens, and they may have {max_model_len}."
                raise ContextLengthError(reason, f"give --max-model-len {longest}.")
        low, high = entry.limits
        length = "" if longest is None else f", texts of up to {longest} tokens"
        strengths = f"strengths from {low:g} to {high:g}, by default {entry.default:g}"
        lines.append(f"{name}: {entry.description}, {strengths}{length}")
    return lines


def _read_vocabulary_and_context(entry: GuideEntry) -> tuple[Vocabulary, int | None]:
    """Read the vocabulary of a guide, and the most tokens of a text that it has positions for."""
    overhead = 1  # positions that it needs before a text
    if find_kind(entry.folder) in (GUIDES["embedded"], GUIDES["reward"]):
        stored = ModelSource.find(_find_folder(entry)).config
        config = AutoConfig.for_model(**stored["backbone"])
        vocabulary = Vocabulary(*(stored.get("vocabulary") or [config.get_text_config().vocab_size]))
        overhead = int(stored.get("prepend_bos", True))
    else:
        source = ModelSource.find(Path(entry.folder) / EXPERT if holds_experts(entry.folder) else entry.folder)
        config = load_config(source)
        vocabulary = read_vocabulary(config.get_text_config().vocab_size, source.find_tokenizer())
    positions = max_positions(config)
    return vocabulary, None if positions is None else positions - overhead
