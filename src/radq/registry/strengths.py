"""Steering as clients write it in a request, as an object or as a text:

    {"sentiment": 20, "toxicity": -50, "kl_budget": 0.5}        "sentiment=20,toxicity=-50,kl_budget=0.5"
    {"sentiment": "strong", "toxicity": "60%"}                  "sentiment=strong,toxicity=60%"

A number is always β. Words and percentages are strengths of guides that are calibrated, see `radq.models.calibration`.
Importing this module imports no torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from radq.decoding.config import DEFAULT_KL_BUDGET, Steering
from radq.errors import OptionError
from radq.guides.spec import join_budgets
from radq.models.calibration import Calibration, Setting, find_setting, is_strength, note_share

SETTINGS = ("kl_budget", "top_k", "details")  # names that are no guides
MISSPELLED = ("vllm_args", "xargs", "extra_args", "extra_body")  # fields in which clients might hide strengths
MOST_NAMES, MOST_CHARACTERS = 64, 4096
HINT = 'write {"sentiment": 20, "toxicity": -50} or "sentiment=20,toxicity=-50".'


@dataclass(frozen=True)
class Guidance:
    """A request whose gaps the operator's defaults have filled: strengths of the guides that are read, and steering."""

    strengths: Mapping[str, float]
    steering: Steering
    details: bool = False  # whether the answer has the candidates and rewards of each token
    notes: tuple[str, ...] = ()  # about numbers that may have been meant otherwise

    def describe(self, sampler: str) -> dict[str, Any]:
        """Describe what is applied, for an answer. A seed gives the texts of `radq.generate` with the sampler radq."""
        steering = {"kl_budget": self.steering.kl_budget, "top_k": self.steering.top_k}
        return {"sampler": sampler, "strengths": dict(self.strengths), **steering}


def read_strengths(
    value: Any,
    calibrations: Mapping[str, Calibration] = MappingProxyType({}),
    budget: float | None = DEFAULT_KL_BUDGET,
) -> dict[str, float | None]:
    """Read β of guides by name, and maybe some of `SETTINGS`.

    None stands for the strength that the operator suggests, which a client gets by a name alone or by `true`; for
    kl_budget it stands for no budget. Strengths become β, and bring the KL budget along under which they were
    calibrated if none is given; beside them, β counts with `budget`.
    """
    read = {name: _read_setting(name, one, calibrations.get(name)) for name, one in read_pairs(value).items()}
    strengths = {name: one.beta if isinstance(one, Setting) else one for name, one in read.items()}
    if "kl_budget" not in read and any(isinstance(one, Setting) for one in read.values()):
        steering = [one for name, one in read.items() if name not in SETTINGS and one != 0]
        strengths["kl_budget"] = join_budgets(steering, budget)
    return strengths


def note_shares(value: Any, calibrations: Mapping[str, Calibration]) -> list[str]:
    """Write a line for each β that looks like a share of what can be reached."""
    notes = [note_share(name, one, calibrations.get(name)) for name, one in read_pairs(value).items()]
    return [note for note in notes if note is not None]


def read_pairs(value: Any) -> dict[str, Any]:
    pairs = _split(value) if isinstance(value, str) else value
    if not isinstance(pairs, Mapping) or len(pairs) > MOST_NAMES:
        raise OptionError(f"radq must give names of guides their strengths, got {shorten(value)}.", HINT)
    for name in pairs:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise OptionError(f"radq must name guides by texts, got {shorten(name)}.", HINT)
    return dict(pairs)


def write_strengths(strengths: Mapping[str, float | None]) -> str:
    """Write β as a text, from which `read_strengths` reads the same; a sign says that a small β is meant."""
    return ",".join(
        f"{name}={number:+}" if number is not None else f"{name}=none" if name == "kl_budget" else name
        for name, number in strengths.items()
    )


def _split(text: str) -> dict[str, Any]:
    """Split a text into names and numbers; a name without a number stands for itself."""
    pairs: dict[str, Any] = {}
    if len(text) > MOST_CHARACTERS:
        raise OptionError(f"radq must have at most {MOST_CHARACTERS} characters, got {len(text)}.", HINT)
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, number = map(str.strip, part.partition("="))
        if name in pairs:
            raise OptionError(f"radq names {shorten(name)} twice.", "give each name once.")
        pairs[name] = number if equals else True
    return pairs


def _read_setting(name: str, value: Any, calibration: Calibration | None) -> float | Setting | None:
    if name == "kl_budget" and value in (None, "none"):
        return None
    if name == "details" and isinstance(value, bool):
        return float(value)
    if name not in SETTINGS and value is True:
        return None
    if name not in SETTINGS and is_strength(value):
        return find_setting(value, calibration, f"the guide {shorten(name)}")
    number = to_number(value)
    if not math.isfinite(number):
        raise OptionError(f"radq must give {shorten(name)} a finite number, got {shorten(value)}.", HINT)
    return number


def to_number(value: Any) -> float:
    """Turn a number, or a text that holds one, into a float; NaN if the value is neither."""
    try:
        return math.nan if value is None or isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def shorten(value: Any) -> str:
    """Shorten a value of a client for an error message, in the words of JSON."""
    shown = ascii(value)  # also characters that cannot be written as UTF-8
    if not isinstance(value, str | float):  # neither Python's None and True, nor JSON's Infinity
        shown = json.dumps(value, default=ascii, skipkeys=True)
    return shown if len(shown) <= 60 else shown[:57] + "..."
