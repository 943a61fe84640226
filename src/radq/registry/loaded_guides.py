"""The loaded guides of a server. Names that clients use share models: one that several names need is loaded once, and
reads a text once, whatever strengths the text has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import torch

from radq.guides import Guide, RewardGuide
from radq.guides.spec import guide_maker
from radq.models.loading import Wrappable, num_logits
from radq.models.prefill import InTurns, Turn
from radq.models.reading import Reader
from radq.models.readout import join_layers, pick_layers
from radq.models.reward import RewardModel
from radq.models.vocabulary import Vocabulary
from radq.registry.config import GuideEntry
from radq.sources.embedded import EMBEDDED

Model = tuple[str, tuple[tuple[str, float], ...]]  # a folder, and the numbers of its guide that are no strengths


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
        strengths: dict[Model, list[str]] = {}
        for entry in entries.values():
            names = strengths.setdefault(_model(entry), [])
            if entry.strength not in names:
                names.append(entry.strength)
        folders = {entry.folder for entry in entries.values()}
        makers = {folder: guide_maker(folder, device, dtype, lm=lm) for folder in folders}
        guides = [
            makers[EMBEDDED if folder.startswith(f"{EMBEDDED}:") else folder](dict.fromkeys(names, 1.0) | dict(options))
            for (folder, options), names in strengths.items()
        ]
        models = list(strengths)
        places = {
            name: (models.index(_model(entry)), strengths[_model(entry)].index(entry.strength))
            for name, entry in entries.items()
        }
        return cls(guides, places)

    def strengths(self, wanted: Mapping[str, float]) -> dict[int, list[float]]:
        """Find all strengths of each guide that is needed; those of several names for one strength add up."""
        found: dict[int, list[float]] = {}
        for name, number in wanted.items():
            guide, place = self.places[name]
            row = found.setdefault(guide, [0.0] * len(self.guides[guide].beta))
            row[place] += number
        return found

    def select(self, wanted: Mapping[str, float]) -> Selection:
        """Select the guides that texts with these strengths by name need."""
        rows = self.strengths(wanted)
        strengths: list[float] = []
        first: list[int] = []  # the place of each guide among the strengths
        for number, guide in enumerate(self.guides):
            first.append(len(strengths))
            strengths += rows.get(number, [0.0] * len(guide.beta))
        places = {name: first[guide] + place for name, (guide, place) in self.places.items() if name in wanted}
        return Selection(tuple(sorted(rows)), tuple(strengths), places)

    def sum(self, wanted: Mapping[str, float]) -> tuple[Guide | None, tuple[float, ...]]:
        """Add up the guides that texts with these strengths by name need; also return the strengths of the sum."""
        rows = sorted(self.strengths(wanted).items())
        guide = reduce(add, [self.guides[number] for number, _ in rows]) if rows else None
        return guide, tuple(strength for _, row in rows for strength in row)

    # --- rewards ---

    def reward_model(self, name: str) -> tuple[RewardModel, int] | None:
        """Find the reward model behind a name, and the column of its rewards; None for experts."""
        number, place = self.places[name]
        guide = self.guides[number]
        return (guide.model, guide.columns[place]) if isinstance(guide, RewardGuide) else None

    def reward_ranges(self) -> dict[str, tuple[float, float] | None]:
        """Find the lowest and highest reward of each name; None for a guide without a reward model."""
        found = {name: self.reward_model(name) for name in self.places}
        return {
            name: None if pair is None else pair[0].config.attribute_ranges[pair[1]] for name, pair in found.items()
        }

    @torch.no_grad()
    def token_rewards(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Compute the reward of each token of a text by each name with a reward model.

        A model that several names share reads the text once.
        """
        texts = {model: torch.tensor([list(token_ids)], device=model.device) for model in self._reward_models()}
        return self._tell({model: model.token_rewards(ids) for model, ids in texts.items()})

    def score(
        self, lm: Wrappable, token_ids: Sequence[int], turn: Turn
    ) -> InTurns[tuple[list[float], dict[str, list[float]]]]:
        """Compute also the log-probability of each token but the first; readouts take the states of this forward."""
        input_ids = torch.tensor([list(token_ids)], device=lm.device)
        models = self._reward_models()
        readouts = {model: model.reader.layers for model in models if model.accepts_states(lm, input_ids)}
        layers = join_layers(list(readouts.values()))
        reader = Reader(lm, "logits", "base model", Vocabulary(num_logits(lm)), layers=layers)
        scores, states = yield from reader.read_scored(input_ids, turn)
        rewards: dict[RewardModel, torch.Tensor] = {}
        for model in models:
            ids = input_ids.to(model.device)
            if states is not None and model in readouts:
                rewards[model] = model.token_rewards(ids, states=pick_layers(states, layers, readouts[model]))
            else:
                rewards[model] = yield from model.text_rewards(ids, turn)
        return scores[0].tolist(), self._tell(rewards)

    def _reward_models(self) -> list[RewardModel]:
        """List the reward models of all names, each once."""
        pairs = [pair for name in self.places if (pair := self.reward_model(name)) is not None]
        return list(dict.fromkeys(model for model, _ in pairs))

    def _tell(self, rewards: Mapping[RewardModel, torch.Tensor]) -> dict[str, list[float]]:
        """Tell rewards by name, from those of each model, (1, t, attributes)."""
        found = {name: pair for name in self.places if (pair := self.reward_model(name)) is not None}
        return {
            name: rewards[model][0, :, column].clamp(*model.config.attribute_ranges[column]).tolist()
            for name, (model, column) in found.items()
        }


def _model(entry: GuideEntry) -> Model:
    """Return the key by which entries share a model; each embedded attribute has a model of its own."""
    folder = f"{EMBEDDED}:{entry.strength}" if entry.folder == EMBEDDED else entry.folder
    return folder, tuple(sorted(entry.options.items()))
