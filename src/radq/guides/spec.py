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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radq.errors import OptionError
from radq.guides.folders import ANTI_EXPERT, EXPERT, holds_experts, read_codes
from radq.models.calibration import (
    Setting,
    find_calibration,
    find_known_calibration,
    find_setting,
    is_strength,
    join_budgets,
    looks_like_share,
    note_share,
)
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import check_language_model, check_reward_model

if TYPE_CHECKING:
    from radq.guides.base import Guide

HINT = "write it as DIR:attribute=beta or DIR:attribute=strong; for experts as DIR:alpha=2 or DIR:omega=30."
Numbers = Mapping[str, float]
MakeGuide = Callable[[Numbers], Any]  # from numbers to a guide


def parse_guide(specification: str, base: str | None = None, fetch: bool = True) -> tuple[str, dict[str, float]]:
    """Split a specification into folder and numbers; calibrated strengths become β.

    Args:
        base: the name of the base model, which is compared with the one of the calibration.
        fetch: fetch the calibration of a hub name unless the cache holds it.
    """
    folder, settings = _read_settings(specification, base, fetch)
    return folder, {name: one.beta if isinstance(one, Setting) else one for name, one in settings.items()}


def find_budget(specifications: Sequence[str], default: float | None, base: str | None = None) -> float | None:
    """Find the KL budget of several guides: strengths have the one under which they were calibrated, β the default."""
    read = [one for specification in specifications for one in _read_settings(specification, base)[1].values()]
    return join_budgets([one.kl_budget if isinstance(one, Setting) else default for one in read], default)


def _read_settings(specification: str, base: str | None, fetch: bool = True) -> tuple[str, dict[str, float | Setting]]:
    """Split a specification into folder and numbers, or settings where a value is a calibrated strength."""
    folder, colon, pairs = specification.rpartition(":")
    if not colon or not folder:
        raise OptionError(f"{specification!r} is no specification of a guide.", HINT)
    found: dict[str, float | Setting] = {}
    for pair in pairs.split(","):
        name, _, text = map(str.strip, pair.partition("="))
        if is_strength(text):
            found[name] = find_setting(text, find_calibration(folder, name, base, fetch), f"{name} of {folder!r}")
            continue
        found[name] = _read_number(text, specification)
        if looks_like_share(text) and (note := note_share(name, text, find_known_calibration(folder, name))):
            warnings.warn(note, stacklevel=1)
    return folder, found


def _read_number(text: str, specification: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"{specification!r} is no specification of a guide.", HINT)
    return number


def check_guide(folder: str, numbers: Numbers) -> None:
    """Refuse a folder that holds no guide, and numbers that its guide does not have; nothing is loaded."""
    find_kind(folder).check(folder, numbers)


def load_guide(
    specification: str,
    device: str = "cpu",
    dtype: str = "auto",
    clamp: bool = True,
    lm: Any = None,
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
    folder, numbers = parse_guide(specification, find_base(lm) if base is None else base)
    check_guide(folder, numbers)
    return guide_maker(folder, device, dtype, clamp, lm)(numbers)


def find_base(lm: Any) -> str | None:
    """The name under which a language model was loaded; empty if it has none, or is no longer what that name means."""
    if lm is None:
        return None
    return "" if getattr(lm, "peft_config", None) else str(getattr(lm.config, "name_or_path", ""))


def load_guides(
    specifications: Sequence[str],
    device: str = "cpu",
    dtype: str = "auto",
    clamp: bool = True,
    lm: Any = None,
    base: str | None = None,
) -> "Guide | None":
    """Load guides and add them up; None if there are none."""
    guides = [load_guide(specification, device, dtype, clamp, lm, base) for specification in specifications]
    return reduce(add, guides) if guides else None


def guide_maker(folder: str, device: str = "cpu", dtype: str = "auto", clamp: bool = True, lm: Any = None) -> MakeGuide:
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


def _load_embedded(folder: str, device: str, dtype: str, clamp: bool, lm: Any) -> MakeGuide:
    """Load a reward model for each attribute when it is first asked for."""
    from radq.guides.reward import RewardGuide
    from radq.models.reward import RewardModel

    loaded: dict[str, RewardModel] = {}

    def make(beta: Numbers) -> "Guide":
        for name in beta:
            if name not in loaded:
                loaded[name] = RewardModel.from_pretrained(f"{EMBEDDED}:{name}", device, lm=lm, dtype=dtype)
        guides: list[Guide] = [RewardGuide(loaded[name], {name: number}, clamp) for name, number in beta.items()]
        return reduce(add, guides)

    return make


def _load_dexperts(folder: str, device: str, dtype: str, clamp: bool, lm: Any) -> MakeGuide:
    from radq.guides.dexperts import DExpertsGuide, load_experts

    experts = load_experts(folder, device, dtype)
    return lambda numbers: DExpertsGuide(**experts, **dict[str, Any](numbers))


def _load_gedi(folder: str, device: str, dtype: str, clamp: bool, lm: Any) -> MakeGuide:
    from radq.guides.gedi import GeDiGuide, load_gedi

    expert = load_gedi(folder, device, dtype)
    return lambda numbers: GeDiGuide(**expert, **dict[str, Any](numbers))


def _load_reward(folder: str, device: str, dtype: str, clamp: bool, lm: Any) -> MakeGuide:
    from radq.guides.reward import RewardGuide
    from radq.models.reward import RewardModel

    model = RewardModel.from_pretrained(folder, device, lm=lm, dtype=dtype)
    return lambda beta: RewardGuide(model, beta, clamp)


def _check_embedded(folder: str, numbers: Numbers) -> None:
    for name in numbers:
        check_reward_model(f"{EMBEDDED}:{name}", [name])
    check_language_model(EMBEDDED)  # the backbone of these reward models


def _check_dexperts(folder: str, numbers: Numbers) -> None:
    _check_names(folder, numbers, "alpha")
    for name in (EXPERT, ANTI_EXPERT):
        check_language_model(Path(folder) / name)


def _check_gedi(folder: str, numbers: Numbers) -> None:
    _check_names(folder, numbers, "omega", GUIDES["gedi"].options)
    check_language_model(folder)


def _check_names(folder: str, numbers: Numbers, strength: str, options: Sequence[str] = ()) -> None:
    for name in numbers:
        if name not in (strength, *options):
            raise OptionError(f"{folder!r} has no option {name!r}.", f"it has {', '.join((strength, *options))}.")
    if strength not in numbers:
        raise OptionError(f"the guide {folder!r} is given no {strength}.", f"write it as DIR:{strength}=NUMBER.")


@dataclass(frozen=True)
class GuideKind:
    """A kind of guides that lie in folders.

    Args:
        holds: whether a folder, or name of one, holds a guide of this kind.
        check: refuse a folder with models that cannot be loaded, or numbers that the guide does not have. It reads
            config.json alone.
        load: load its models from (folder, device, dtype, clamp, lm) and return a function from numbers to guides.
        options: numbers of a specification that are no strengths. They are set once, by whoever sets the guide up.
    """

    holds: Callable[[str], bool]
    check: Callable[[str, Numbers], None]
    load: Callable[[str, str, str, bool, Any], MakeGuide]
    options: tuple[str, ...] = ()


def _holds_codes(folder: str) -> bool:
    return read_codes(folder) is not None


GUIDES = {  # the first kind that a folder holds is taken
    "embedded": GuideKind(lambda folder: folder == EMBEDDED, _check_embedded, _load_embedded),
    "dexperts": GuideKind(holds_experts, _check_dexperts, _load_dexperts),
    "gedi": GuideKind(_holds_codes, _check_gedi, _load_gedi, ("filter_p", "target_p", "prior")),
    "reward": GuideKind(lambda folder: True, check_reward_model, _load_reward),
}
