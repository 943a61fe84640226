"""Calibrated strengths of reward models: shares from 0 to 1 of what a judge says can be reached with readable texts.

`radq calibrate` measures them, and writes calibration.json into the folder of the reward model. A folder may hold the
calibrations of several attributes and base models. Importing this module imports no torch.

A strength is written as a word (weak, medium, strong) or as a percentage (60%). A number is always β.
"""

import json
import math
import re
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from radq.errors import ModelError, OptionError, UnknownAttributeError
from radq.files import atomic_file, explained_writing
from radq.settings import build
from radq.sources.embedded import EMBEDDED, embedded_rewards, reward_folder
from radq.sources.model_source import ModelName, ModelSource, fingerprint_weights_in

CALIBRATION = "calibration.json"
NAMED = {"weak": 0.33, "medium": 0.67, "strong": 1.0}
Interval = tuple[float, float, float]  # a value with the lower and the upper end of its interval


@dataclass(frozen=True)
class Setting:
    """The numbers that a strength stands for."""

    beta: float
    kl_budget: float | None  # the budget of each token, under which β has the effect of the strength


@dataclass(frozen=True)
class StrengthPoint:
    """A strength, its setting, and the judge's metric and the perplexity ratio that are expected there."""

    strength: float
    beta: float
    kl_budget: float | None
    score: float
    perplexity_ratio: float


@dataclass(frozen=True)
class MeasuredPoint:
    """A setting that was measured; older calibrations have neither `ended` nor `length`."""

    beta: float
    kl_budget: float | None
    score: Interval
    gain: Interval  # the judge's improvement over the unguided base model
    perplexity_ratio: Interval
    ended: Interval | None = None  # the share of texts that ended by themselves
    length: Interval | None = None  # the mean number of tokens


@dataclass(frozen=True)
class Calibration:
    """The strengths of an attribute over one base model, and how they were measured."""

    attribute: str
    base: str  # the name of the base model
    base_fingerprint: str  # tells base models apart, see `ModelSource.fingerprint`
    by: Literal["beta", "kl"]  # whether strengths differ in β, or in the KL budget
    reduce: bool  # whether strengths reduce the attribute
    judge: str
    metric: str
    reads: str
    prompts: str  # a hash of the prompts
    num_prompts: int
    samples: int
    max_new_tokens: int
    top_k: int | None
    seed: int
    max_perplexity_ratio: float  # the bound that the perplexity ratio keeps, with its interval
    # Why strength 1 is where it is: the judge improves no further, the perplexity leaves its bound, or no larger value
    # was tried.
    limited_by: Literal["judge", "perplexity", "range"]
    command: str
    table: list[StrengthPoint]  # strengths in ascending order, from 0 to 1
    measured: list[MeasuredPoint]
    weights: str | None = None  # fingerprint of the weights of the reward model; older calibrations have none

    def __post_init__(self) -> None:
        strengths = [point.strength for point in self.table]
        if len(strengths) < 2 or strengths != sorted(strengths) or (strengths[0], strengths[-1]) != (0.0, 1.0):
            raise OptionError("the strengths of a calibration must rise from 0 to 1.", "calibrate again.")

    def at(self, strength: float) -> Setting:
        """The setting of a strength from 0 to 1, by straight lines between the points of the table."""
        if strength == 0:
            return Setting(0.0, self.table[0].kl_budget)
        strengths = [point.strength for point in self.table]
        beta = float(np.interp(strength, strengths, [point.beta for point in self.table]))
        budgets = [point.kl_budget for point in self.table]
        known = [budget for budget in budgets if budget is not None]
        budget = None if len(known) < len(budgets) else float(np.interp(strength, strengths, known))
        return Setting(round(beta, 6), None if budget is None else round(budget, 6))

    @property
    def safe(self) -> tuple[float, float] | None:
        """The range of β from 0 to that of strength 1; None where strengths differ in the KL budget."""
        beta = _shorten(self.at(1.0).beta)
        return (min(0.0, beta), max(0.0, beta)) if self.by == "beta" else None

    @property
    def named(self) -> dict[str, float]:
        """β of the strengths that have names; none where strengths differ in the KL budget."""
        return {name: _shorten(self.at(strength).beta) for name, strength in NAMED.items() if self.by == "beta"}


def _shorten(number: float) -> float:
    return float(f"{number:.3g}")


# --- files ---


def calibrated_folder(folder: str | Path, attribute: str) -> str | Path:
    """The folder or hub name that holds the model of an attribute: `embedded` has one for each attribute."""
    kind, _, name = str(folder).partition(":")
    return reward_folder(name or attribute) if kind == EMBEDDED else folder


def read_calibrations(folder: str | Path, fetch: bool = True) -> list[Calibration]:
    """Read the calibrations of a folder or hub name; there are none where there is no calibration.json.

    Without `fetch`, a hub name has those that its cache holds.
    """
    try:
        file = ModelSource.find(folder).find_file(CALIBRATION, fetch)
        text = file.read_text(encoding="utf-8")
    except OSError:  # or a ModelError, which is one
        return []
    try:
        return [build(stored, Calibration, CALIBRATION) for stored in json.loads(text)["calibrations"]]
    except (ValueError, KeyError, TypeError) as error:  # also an OptionError, which is a ValueError
        raise ModelError(f"{str(file)!r} is damaged: {error}.", "delete it, and calibrate again.") from error


def write_calibration(folder: Path, calibration: Calibration) -> Path:
    """Add a calibration to a folder, in the place of an earlier one of the same attribute and base model."""
    key = (calibration.attribute, calibration.base_fingerprint)
    others = [other for other in read_calibrations(folder) if (other.attribute, other.base_fingerprint) != key]
    document = {"calibrations": [asdict(entry) for entry in (*others, calibration)]}
    file = folder / CALIBRATION
    with explained_writing(file), atomic_file(file) as temporary:
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


class OtherModelError(OptionError):
    """An attribute is calibrated for another base model or other weights, with which strengths mean something else."""


def find_calibration(
    folder: str | Path, attribute: str, base: ModelName | None = None, fetch: bool = True
) -> Calibration | None:
    """Find the calibration of an attribute over a base model; None if the attribute is not calibrated.

    One over other base models alone, or for other weights of the reward model, is refused. Where `base` is None, base
    models are not compared, and the last one is taken; a warning names its base model if there are several.
    """
    model = calibrated_folder(folder, attribute)
    calibrations = [own for own in read_calibrations(model, fetch) if own.attribute == attribute]
    if not calibrations:
        return None
    bases = " and ".join(dict.fromkeys(repr(own.base) for own in calibrations))
    if base is None:
        if len({own.base_fingerprint for own in calibrations}) > 1:
            warnings.warn(
                f"{attribute} of {str(folder)!r} is calibrated over {bases}, and the strengths over "
                f"{calibrations[-1].base!r} are taken. hint: say which base model is steered.",
                stacklevel=2,
            )
    elif not (same := [own for own in calibrations if own.base_fingerprint == _fingerprint_base(base)]):
        changed = " as it is now" * any(own.base == str(base) for own in calibrations)
        raise OtherModelError(
            f"{attribute} of {str(folder)!r} is calibrated over {bases}, not over "
            f"{str(base) or 'this language model'!r}{changed}.",
            "measure its strengths there with `radq calibrate`, or give β as a number.",
        )
    else:
        calibrations = same
    weights = fingerprint_weights_in(ModelSource.find(model).find_file(CALIBRATION, fetch).parent)
    if None not in (weights, calibrations[-1].weights) and weights != calibrations[-1].weights:
        raise OtherModelError(
            f"{attribute} of {str(model)!r} was calibrated with other weights, which have changed since.",
            "measure its strengths again with `radq calibrate`, or give β as a number.",
        )
    return calibrations[-1]


def _fingerprint_base(name: ModelName) -> str | None:
    """The fingerprint of a base model; None for one in memory whose folder is not known, or no longer there."""
    source = ModelSource.find(name)
    try:
        return source.fingerprint if source.name else None
    except OSError:  # or a ModelError, which is one
        if source.is_base:  # its package is missing, and the error says how to install it
            raise
        return None


@cache
def shipped_calibrations() -> dict[str, Calibration]:
    """The calibrations of the reward models that radq brings along, over the base model that it brings along."""
    return {
        name: calibration
        for name in embedded_rewards()
        for calibration in read_calibrations(reward_folder(name))
        if (calibration.base, calibration.by) == (EMBEDDED, "beta")
    }


def shipped_strengths() -> dict[str, float]:
    """β of these reward models at the strength `strong`."""
    return {name: calibration.named["strong"] for name, calibration in shipped_calibrations().items()}


# --- strengths as text ---


def is_strength(value: Any) -> bool:
    """Whether a value is a strength, and not β."""
    return isinstance(value, str) and (value.strip() in NAMED or value.strip().endswith("%"))


def find_setting(value: str, calibration: Calibration | None, what: str) -> Setting:
    """Find the setting of a strength as a user writes it; error messages call the attribute and its model `what`."""
    text = value.strip()
    try:
        strength = NAMED.get(text) or float(text.removesuffix("%")) / 100
    except ValueError:
        strength = math.nan
    if not 0 <= strength <= 1:
        hint = "to steer the other way, give β as a number." if strength < 0 else "write it as 60%."
        raise OptionError(f"a strength must be from 0% to 100%, got {text[:40]!r}.", hint)
    if calibration is None:
        raise OptionError(
            f"{what} is not calibrated, so it has no strength {text[:40]!r}.",
            "give β as a number, or measure strengths with `radq calibrate`.",
        )
    return calibration.at(strength)


def find_strength(
    value: str, folder: str | Path, attribute: str, base: ModelName | None = None, fetch: bool = True
) -> Setting:
    """Find the setting of a strength of a stored reward model, see `find_calibration` and `find_setting`."""
    return find_setting(value, find_calibration(folder, attribute, base, fetch), f"{attribute} of {str(folder)!r}")


def _read_share(value: Any) -> float | None:
    """Read β that may have been meant as a share of what can be reached; with a sign (+0.6) it is not."""
    if isinstance(value, bool) or (isinstance(value, str) and not re.match(r"[\d.]", value)):
        return None
    try:
        return float(value) if 0 < float(value) <= 1 else None
    except (TypeError, ValueError):
        return None


def note_share(name: str, value: Any, calibration: Calibration | None) -> str | None:
    """Write a line that names the percentage, if β of a calibrated attribute looks like a share and hardly steers."""
    number = _read_share(value)
    if calibration is None or number is None or abs(calibration.at(number).beta) <= number:
        return None
    return f"{name}={value} is β = {number:g}, which is very weak. hint: write {name}={100 * number:g}% for a strength."


def note_number(name: str, value: Any, folder: str | Path, attribute: str) -> str | None:
    """Write the line of `note_share` about a stored reward model, whose calibration is read only if it is needed.

    Any calibration on this machine will do, since nothing is compared or refused.
    """
    if _read_share(value) is None:
        return None
    try:
        known = read_calibrations(calibrated_folder(folder, attribute), fetch=False)
    except (ModelError, UnknownAttributeError):
        return None
    own = (calibration for calibration in reversed(known) if calibration.attribute == attribute)
    return note_share(name, value, next(own, None))
