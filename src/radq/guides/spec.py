"""A guide written as text: `DIR:name=number,name=number`, on the command line and in the YAML of a sweep.

What the folder holds says what the names mean:

    a reward model                            weights of its attributes: DIR:toxicity=-50,insult=-20
    the folders expert and anti of DExperts   DIR:alpha=2
    a language model with GeDi's codes        DIR:omega=30, and maybe filter_p, target_p, prior

`embedded` in place of DIR are the reward models that radq brings along: embedded:sentiment=35,toxicity=-100.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from radq.errors import OptionError

if TYPE_CHECKING:
    from radq.guides import Guide

DEXPERTS_OPTIONS = ("alpha",)
GEDI_OPTIONS = ("omega", "filter_p", "target_p", "prior")
HINT = "write it as DIR:attribute=weight,attribute=weight; of experts as DIR:alpha=2 or DIR:omega=30."


def parse_guide(specification: str) -> tuple[str, dict[str, float]]:
    """Folder and numbers."""
    folder, colon, pairs = specification.rpartition(":")
    numbers: dict[str, float] = {}
    try:
        for pair in pairs.split(","):
            name, _, number = pair.partition("=")
            numbers[name.strip()] = float(number)
    except ValueError:
        colon = ""
    if not colon or not folder:
        raise OptionError(f"the guide is {specification!r}.", HINT)
    return folder, numbers


def load_guide(specification: str, device: str = "cpu", dtype: str = "auto", clamp: bool = True) -> "Guide":
    folder, numbers = parse_guide(specification)
    return guide_maker(folder, device, dtype, clamp)(numbers)


def load_guides(
    specifications: Sequence[str], device: str = "cpu", dtype: str = "auto", clamp: bool = True
) -> "Guide | None":
    """Their sum; None without any."""
    guides = [load_guide(specification, device, dtype, clamp) for specification in specifications]
    return reduce(add, guides) if guides else None


def guide_maker(
    folder: str, device: str = "cpu", dtype: str = "auto", clamp: bool = True
) -> "Callable[[Mapping[str, float]], Guide]":
    """Loads the folder's models once; what it returns makes guides of any numbers with them."""
    from radq.guides import DExpertsGuide, GeDiGuide, RewardGuide
    from radq.guides.dexperts import holds_experts, load_experts
    from radq.guides.gedi import load_gedi, read_codes
    from radq.models.embedded import EMBEDDED, located
    from radq.models.reward import RewardModel

    if folder == EMBEDDED:
        return _embedded_maker(device, dtype, clamp)
    folder = str(located(folder))
    if holds_experts(folder):
        experts = load_experts(folder, device, dtype)
        return lambda numbers: DExpertsGuide(**experts, **_checked(folder, numbers, DEXPERTS_OPTIONS, "alpha"))
    if read_codes(folder) is not None:
        gedi = load_gedi(folder, device, dtype)
        return lambda numbers: GeDiGuide(**gedi, **_checked(folder, numbers, GEDI_OPTIONS, "omega"))
    model = RewardModel.from_pretrained(folder, device, dtype=dtype)
    return lambda weights: RewardGuide(model, weights, clamp)


def _embedded_maker(device: str, dtype: str, clamp: bool) -> "Callable[[Mapping[str, float]], Guide]":
    """A reward model for each attribute that is asked for, loaded once."""
    from radq.guides import Guide, RewardGuide
    from radq.models.reward import RewardModel

    loaded: dict[str, RewardModel] = {}

    def make(weights: Mapping[str, float]) -> Guide:
        for name in weights:
            if name not in loaded:
                loaded[name] = RewardModel.from_pretrained(f"embedded:{name}", device, dtype=dtype)
        guides: list[Guide] = [RewardGuide(loaded[name], {name: weight}, clamp) for name, weight in weights.items()]
        return reduce(add, guides)

    return make


def _checked(folder: str, numbers: Mapping[str, float], known: Sequence[str], needed: str) -> dict[str, Any]:
    for name in numbers:
        if name not in known:
            raise OptionError(f"{folder!r} has no option {name!r}.", f"it has {', '.join(known)}.")
    if needed not in numbers:
        raise OptionError(f"the guide {folder!r} is given no {needed}.", f"write it as DIR:{needed}=NUMBER.")
    return dict(numbers)
