"""The loaded guides of a server. Names that clients use share models: one that several names need is loaded once, and
reads a text once, whatever strengths the text has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from radq.guides import Guide
from radq.guides.spec import guide_maker
from radq.models.embedded import EMBEDDED
from radq.serving.config import GuideEntry

Model = tuple[str, tuple[tuple[str, float], ...]]  # a folder, and the numbers of its guide that are no strengths


@dataclass
class Panel:
    """Guides with all their strengths, and the place of each registered name among them."""

    guides: list[Guide] = field(default_factory=list)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # of a name: its guide, and its strength there

    @classmethod
    def load(cls, entries: Mapping[str, GuideEntry], device: str = "cpu", dtype: str = "auto") -> "Panel":
        strengths: dict[Model, list[str]] = {}
        for entry in entries.values():
            names = strengths.setdefault(_model(entry), [])
            if entry.strength not in names:
                names.append(entry.strength)
        makers = {folder: guide_maker(folder, device, dtype) for folder in {entry.folder for entry in entries.values()}}
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
        """For each guide that is needed, all its strengths; those of several names for one strength add up."""
        found: dict[int, list[float]] = {}
        for name, number in wanted.items():
            guide, place = self.places[name]
            row = found.setdefault(guide, [0.0] * len(self.guides[guide].beta))
            row[place] += number
        return found


def _model(entry: GuideEntry) -> Model:
    """The embedded reward models are one model for each attribute."""
    folder = f"{EMBEDDED}:{entry.strength}" if entry.folder == EMBEDDED else entry.folder
    return folder, tuple(sorted(entry.options.items()))
