"""A guide written as text: `DIR:name=number,name=number`, on the command line, in the YAML of a sweep and of a server.

The contents of the folder decide what the names mean:

    a reward model                            β of its attributes: DIR:toxicity=-50,insult=-20
                                              or calibrated strengths: DIR:toxicity=strong, DIR:toxicity=60%
    the folders expert and anti of DExperts   DIR:alpha=2
    a language model with GeDi's codes        DIR:omega=30, and maybe filter_p, target_p, prior

`embedded` in place of DIR are the reward models that radq brings along: embedded:sentiment=45,toxicity=-95.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radq.errors import OptionError
from radq.files import fingerprint_values
from radq.guides.folders import ANTI_EXPERT, EXPERT, holds_experts, read_codes
from radq.models.calibration import Setting, find_strength, is_strength, note_number
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelName, ModelSource, check_language_model, check_reward_model

if TYPE_CHECKING:
    from radq.guides.base import Guide

HINT = "write it as DIR:attribute=beta or DIR:attribute=strong; for experts as DIR:alpha=2 or DIR:omega=30."
Numbers = Mapping[str, float]
MakeGuide = Callable[[Numbers], Any]  # from numbers to a guide


@dataclass(frozen=True)
class GuideSpec:
    """A guide as it is written: where its models lie, and its settings."""

    folder: str  # a folder, a name on the hub, or `embedded`
    # For each name a number, or what a calibrated strength stands for; None for a name that stands alone.
    settings: Mapping[str, float | Setting | None]

    @classmethod
    def parse(cls, text: str, base: ModelName | None = None, fetch: bool = True, bare: bool = False) -> "GuideSpec":
        """Read `DIR:name=number,name=strong`, for strengths over a base model; `bare` names may have no number.

        Without `fetch`, the calibration of a hub name is the one that its cache holds.
        """
        folder, _, pairs = text.rpartition(":")
        if not folder or "\0" in text:
            raise OptionError(f"{text!r} is no specification of a guide.", HINT)
        settings: dict[str, float | Setting | None] = {}
        for name, equals, written in (pair.partition("=") for pair in pairs.split(",")):
            if equals or not bare:
                settings[name.strip()] = _read_setting(folder, name.strip(), written.strip(), text, base, fetch)
            else:
                settings[name.strip()] = None
        return cls(folder, settings)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are given, with β in place of calibrated strengths."""
        given = {name: setting for name, setting in self.settings.items() if setting is not None}
        return {name: setting.beta if isinstance(setting, Setting) else setting for name, setting in given.items()}

    @cached_property
    def kind(self) -> "GuideKind":
        return find_kind(self.folder)

    def check(self) -> None:
        """Refuse a folder that holds no guide, and numbers that its guide does not have; nothing is loaded."""
        self.kind.check(self.folder, self.numbers)

    def load(self, device: str = "cpu", dtype: str = "auto", clamp: bool = True, lm: object = None) -> "Guide":
        """Load the guide, see `load_guide`."""
        self.check()
        return self.kind.load(self.folder, device, dtype, clamp, lm)(self.numbers)

    @property
    def fingerprint(self) -> str:
        """Tells guides apart by the content of their models; attributes say which of the embedded ones are meant."""
        models = self.kind.models(self.folder, sorted(self.settings))
        return fingerprint_values(*(ModelSource.find(model).fingerprint for model in models))


def _read_setting(
    folder: str, name: str, written: str, specification: str, base: ModelName | None, fetch: bool
) -> float | Setting:
    if is_strength(written):
        return find_strength(written, folder, name, base, fetch)
    try:
        number = float(written)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"{specification!r} is no specification of a guide.", HINT)
    if note := note_number(name, written, folder, name):
        warnings.warn(note, stacklevel=1)
    return number


def find_budget(specifications: Iterable[GuideSpec], default: float | None) -> float | None:
    """Find the KL budget of several guides, see `join_budgets`."""
    return join_budgets([setting for guide in specifications for setting in guide.settings.values()], default)


def join_budgets(settings: Iterable[float | Setting | None], default: float | None) -> float | None:
    """Find one KL budget for several settings together: the largest of theirs, and none if one of them has none.

    A strength has the budget under which it was calibrated; β, and no settings at all, have the default.
    """
    budgets = [setting.kl_budget if isinstance(setting, Setting) else default for setting in settings] or [default]
    known = [budget for budget in budgets if budget is not None]
    return max(known) if len(known) == len(budgets) else None


def load_guide(
    specification: str,
    device: str = "cpu",
    dtype: str = "auto",
    clamp: bool = True,
    lm: object = None,
    base: str | None = None,
) -> "Guide":
    """Load a guide that is written as text, as `radq generate --guide` takes it.

    >>> guide = radq.load_guide("embedded:sentiment=45,toxicity=-95")
    >>> lm, tokenizer = radq.load("embedded")
    >>> print(radq.generate(lm, tokenizer, ["The film was"], guide)[0].text)

    Args:
        specification: `DIR:name=number,name=number`, where DIR is `embedded`, a folder or a name on the hub. The names
            are the attributes of a reward model, each with its strength β, or alpha for DExperts, or omega for GeDi.
            Attributes that are calibrated over the base model also take strong or 60%; see docs/strength.md.
        device: "cpu", "cuda", "cuda:1", …: where the models of the guide compute.
        dtype: data type of the models; "auto" takes the one in which they are stored, or float32 on a CPU that has no
            instructions for it.
        clamp: clamp rewards to the range of the labels that the reward model was trained on.
        lm: the language model that is to be steered; a reward model that reads its hidden states then shares its
            weights instead of loading them a second time.
        base: the name of that language model, by default that under which `lm` was loaded. Strengths that were
            calibrated over another one are refused.
    """
    return GuideSpec.parse(specification, find_base(lm) if base is None else base).load(device, dtype, clamp, lm)


def find_base(lm: object) -> str | None:
    """The name under which a language model was loaded; empty if it has none, or is no longer what that name means."""
    if lm is None:
        return None
    return "" if getattr(lm, "peft_config", None) else str(getattr(getattr(lm, "config", None), "name_or_path", ""))


def load_guides(
    specifications: Sequence[GuideSpec], device: str = "cpu", dtype: str = "auto", clamp: bool = True, lm: object = None
) -> "Guide | None":
    """Load guides and add them up; None if there are none."""
    guides = [specification.load(device, dtype, clamp, lm) for specification in specifications]
    return reduce(add, guides) if guides else None


def guide_maker(
    folder: str, device: str = "cpu", dtype: str = "auto", clamp: bool = True, lm: object = None
) -> MakeGuide:
    """Load a folder's models once; return a function that makes guides with any numbers from them."""
    kind = find_kind(folder)
    make = kind.load(folder, device, dtype, clamp, lm)

    def make_checked(numbers: Numbers) -> "Guide":
        kind.check(folder, numbers)
        return make(numbers)

    return make_checked


def find_kind(folder: str) -> "GuideKind":
    return next(kind for kind in GUIDES.values() if kind.holds(folder))


# --- kinds of guides ---


def _list_reward_models(folder: str, names: Sequence[str]) -> dict[str, Sequence[str]]:
    return {f"{EMBEDDED}:{name}": [name] for name in names} if folder == EMBEDDED else {folder: names}


def _load_reward(folder: str, device: str, dtype: str, clamp: bool, lm: object) -> MakeGuide:
    """Load a reward model; of the embedded ones, each when it is first asked for."""
    from radq.guides.reward import RewardGuide
    from radq.models.reward import RewardModel

    @cache
    def load(name: str) -> RewardModel:
        return RewardModel.from_pretrained(name, device, lm=lm, dtype=dtype)

    def make(beta: Numbers) -> "Guide":
        models = _list_reward_models(folder, [*beta]).items()
        guides: list[Guide] = [
            RewardGuide(load(model), {name: beta[name] for name in names}, clamp) for model, names in models
        ]
        return reduce(add, guides)

    if folder != EMBEDDED:
        load(folder)
    return make


def _load_experts(folder: str, device: str, dtype: str, clamp: bool, lm: object) -> MakeGuide:
    from radq.guides.dexperts import load_experts
    from radq.guides.gedi import load_gedi

    make = (load_experts if holds_experts(folder) else load_gedi)(folder, device, dtype)
    return lambda numbers: make(**numbers)


@dataclass(frozen=True)
class GuideKind:
    """A kind of guides that lie in folders."""

    holds: Callable[[str], bool]  # whether a folder, or name of one, holds a guide of this kind
    # From a folder and the names of numbers to the models of the guide, and the attributes that each of them must have.
    models: Callable[[str, Sequence[str]], Mapping[str, Sequence[str]]]
    # Loads its models from (folder, device, dtype, clamp, lm) and returns a function from numbers to guides.
    load: Callable[[str, str, str, bool, object], MakeGuide]
    strength: str | None = None  # the name of the strength of experts; reward models have their attributes
    options: tuple[str, ...] = ()  # numbers that are no strengths, set once by whoever sets the guide up

    def check(self, folder: str, numbers: Numbers) -> None:
        """Refuse models that cannot be loaded, or numbers that the guide does not have, by config.json alone."""
        if self.strength is not None:
            known = (self.strength, *self.options)
            for name in numbers:
                if name not in known:
                    raise OptionError(f"{folder!r} has no option {name!r}.", f"it has {', '.join(known)}.")
            if self.strength not in numbers:
                hint = f"write it as DIR:{self.strength}=NUMBER."
                raise OptionError(f"the guide {folder!r} is given no {self.strength}.", hint)
        for model, attributes in self.models(folder, [*numbers]).items():
            if self.strength is None:
                check_reward_model(model, attributes)
            else:
                check_language_model(model)
        if folder == EMBEDDED:
            check_language_model(EMBEDDED)  # the backbone of these reward models


GUIDES = {  # the first kind that a folder holds is taken
    "embedded": GuideKind(lambda folder: folder == EMBEDDED, _list_reward_models, _load_reward),
    "dexperts": GuideKind(
        holds_experts,
        lambda folder, _: {str(Path(folder) / name): () for name in (EXPERT, ANTI_EXPERT)},
        _load_experts,
        "alpha",
    ),
    "gedi": GuideKind(
        lambda folder: read_codes(folder) is not None,
        lambda folder, _: {folder: ()},
        _load_experts,
        "omega",
        ("filter_p", "target_p", "prior"),
    ),
    "reward": GuideKind(lambda folder: True, _list_reward_models, _load_reward),
}
OPTIONS = {name for kind in GUIDES.values() for name in kind.options}  # numbers that are no strengths
