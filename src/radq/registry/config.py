"""The operator's file: a base model, the guides that clients may name, virtual models and limits.

    base: embedded
    guides:
      sentiment: {guide: embedded:sentiment, range: [-100, 100], suggested: 45}
      toxicity: embedded:toxicity=-95        # the number is the suggested strength
    models:
      kind: {sentiment: strong, toxicity: -95}   # clients see the model embedded@kind
    limits: {max_tokens: 512}
    hosts: [radq.example.com]                 # names of the server, beside localhost and its address

A page of another site can let its own name point to 127.0.0.1 (DNS rebinding), and a browser then lets it read answers
of a server on this computer. Its requests name that site as their host, so they are refused. A host that is an IP
address is always allowed, since no site can make an address point elsewhere.

Importing this module imports no torch.
"""

import ipaddress
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends, Steering
from radq.errors import OptionError, RadqError, UnknownAttributeError
from radq.guides.spec import OPTIONS, GuideSpec
from radq.models.calibration import (
    Calibration,
    OtherModelError,
    find_calibration,
    find_strength,
    is_strength,
    note_number,
    shipped_strengths,
)
from radq.registry.strengths import SETTINGS, Guidance, note_shares, read_strengths, shorten
from radq.settings import Range, build, load_yaml
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import check_language_model

LEAST_REACH = 100.0  # of a range that the operator leaves out, on both sides of 0
MEANINGS = {"sentiment": "positive"}  # of strengths whose names do not say what a high reward stands for
DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")
NAME = re.compile(r"[A-Za-z0-9][\w.\-]*")
MODEL_NAME = re.compile(r"[A-Za-z0-9][\w.\-/@:]*")


class UnknownModelError(OptionError):
    """An error for the name of a model that the server does not have."""


@dataclass(frozen=True)
class GuideEntry:
    """A guide that clients may name, with one strength.

    Args:
        guide: folder and name of the strength, written `models/praise:praise` or `experts:alpha`; numbers that are no
            strengths may follow, as in `gedi:omega,filter_p=0.5`.
        range: the lowest and highest strength that a client may ask for.
        default: the strength of requests that do not name the guide, as β or as a calibrated strength; 0 does not
            steer them.
        suggested: the strength of requests that name the guide without a number; by default the calibrated strong.
        safe: the range of strengths in which texts stay well-formed, which the page marks; by default the one that
            `radq calibrate` has found.
        description: what a high reward stands for.
    """

    guide: GuideSpec
    range: tuple[float, float] | None = None
    default: float = 0.0
    suggested: float | None = None
    safe: tuple[float, float] | None = None
    description: str = ""

    @classmethod
    def read(cls, value: Any, place: str, base: str | None = None) -> "GuideEntry":
        """Make an entry from a text such as `DIR:attribute=beta`, or from names with values; `base` is steered."""
        given = {"guide": value} if isinstance(value, str) else value
        if isinstance(given, dict) and "guide" in given:
            text = given["guide"]
            if not isinstance(text, str) or not text.rpartition(":")[0]:
                hint = "write it as DIR:attribute, or as DIR:attribute=beta."
                raise OptionError(f"{place} is no guide: {text!r}.", hint)
            guide = GuideSpec.parse(text, base, fetch=False, bare=True)
            given = {**given, "guide": guide, **_read_words(given, guide, place, base)}
        entry = build(given, cls, place)
        if len(entry.options) + 1 < len(entry.guide.settings) or not OPTIONS.issuperset(entry.options):
            raise OptionError(f"{place} has more than one strength.", "give each attribute a name of its own.")
        calibration = _find_calibration(entry.folder, entry.strength, base)
        shipped = shipped_strengths() if entry.folder == EMBEDDED else {}  # also over another base model, not measured
        named = calibration.named.get("strong") if calibration else None
        suggestions = entry.suggested, entry.guide.numbers.get(entry.strength), named, shipped.get(entry.strength)
        suggested = next((beta for beta in suggestions if beta is not None), None)
        reach = max(4 * abs(suggested or 0.0), LEAST_REACH)
        low, high = entry.range or (-reach, reach)
        for name, number in {"default": entry.default, "suggested": suggested}.items():
            if number is not None and not low <= number <= high:
                raise OptionError(f"{place}: {name} must be from {low:g} to {high:g}, got {number:g}.", "change one.")
        return replace(
            entry,
            range=(low, high),
            suggested=suggested,
            safe=entry.safe or (calibration.safe if calibration else None),
            description=entry.description or MEANINGS.get(entry.strength, entry.strength),
        )

    @property
    def folder(self) -> str:
        return self.guide.folder

    @property
    def strength(self) -> str:
        """The name of the strength inside the folder: an attribute of a reward model, alpha or omega."""
        return next(iter(self.guide.settings))

    @property
    def options(self) -> dict[str, float]:
        return {name: number for name, number in self.guide.numbers.items() if name != self.strength}

    @property
    def limits(self) -> tuple[float, float]:
        assert self.range is not None
        return self.range

    def check(self) -> None:
        """Refuse a folder without a guide, and an attribute that its models do not have. Nothing is loaded."""
        GuideSpec(self.folder, {self.strength: 1.0, **self.options}).check()


def _find_calibration(folder: str, strength: str, base: str | None) -> Calibration | None:
    """The calibration of a guide; none, with a warning, where it holds for other models."""
    try:
        return find_calibration(folder, strength, base, fetch=False)
    except UnknownAttributeError:  # which `GuideEntry.check` refuses
        return None
    except OtherModelError as error:
        warnings.warn(f"{error.message} Its strengths are not used. hint: {error.hint}", stacklevel=2)
        return None


def _read_words(given: Mapping[str, Any], guide: GuideSpec, place: str, base: str | None) -> dict[str, float]:
    """Turn the calibrated strengths of an entry into β; tell of numbers that look like strengths."""
    strength = next(iter(guide.settings))
    betas: dict[str, float] = {}
    for name in given.keys() & {"default", "suggested"}:
        if is_strength(given[name]):
            betas[name] = find_strength(given[name], guide.folder, strength, base, fetch=False).beta
        elif note := note_number(name, given[name], guide.folder, strength):
            warnings.warn(f"{place}: {note}", stacklevel=2)
    return betas


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request, and of the work that the server does at once. A request beyond them gets an error."""

    body_bytes: Annotated[int, Range(1024)] = 2**20
    """Largest body of a request."""
    prompt_tokens: Annotated[int, Range(1)] = 2048
    """Longest prompt."""
    max_tokens: Annotated[int, Range(1)] = 1024
    """Most tokens of a text; requests for more are cut to it, and the answer says so."""
    choices: Annotated[int, Range(1)] = 16
    """Most texts of one request: prompts times n."""
    top_k: Annotated[int, Range(1)] = 1024
    """Most candidates of a token."""
    stops: Annotated[int, Range(0)] = 16
    """Most stop texts of a request."""
    rows: Annotated[int, Range(1)] = 16
    """Most texts that are decoded at once; others wait. A quarter more are for those whom texts of another hold up."""
    queue: Annotated[int, Range(0)] = 256
    """Most texts that wait; further requests are answered with status 429."""


@dataclass(frozen=True)
class Connections:
    """Limits of the connections of `radq serve`. One that takes longer than it may is closed."""

    most: Annotated[int, Range(1)] = 512
    """Most connections at once. When all are taken, a new one takes the place of the one that has waited longest for
    the rest of its request."""
    header_seconds: Annotated[float, Range(0, without_low=True)] = 10.0
    """Longest time for the line and the headers of a request."""
    body_seconds: Annotated[float, Range(0, without_low=True)] = 30.0
    """Longest time for the body of a request."""
    idle_seconds: Annotated[float, Range(0, without_low=True)] = 30.0
    """Longest time between an answer and the next request of a connection."""
    send_seconds: Annotated[float, Range(0, without_low=True)] = 30.0
    """Longest time that a client may leave a part of an answer unread."""
    drain_seconds: Annotated[float, Range(0)] = 5.0
    """Longest time after SIGTERM in which connections are still taken, so that /health can say that the server ends."""


@dataclass(frozen=True)
class Defaults:
    """Settings of requests that leave them out."""

    kl_budget: Annotated[float, Range(0)] | None = DEFAULT_KL_BUDGET
    """Largest KL divergence per token, in nats, to which strengths are scaled down; null leaves them as they are."""
    ends: Ends = "base"
    """Stop tokens keep the probability that the base model gives them (base), or guides reward them like words
    (taught), which is for reward models that were taught ends."""
    top_k: Annotated[int, Range(1)] = 20
    """Number of candidates of a token."""
    max_tokens: Annotated[int, Range(1)] | None = None
    """Most tokens of a text; null lets it go on up to the limit and the context of the models."""


@dataclass(frozen=True)
class ServeConfig:
    """The settings of a server: its base model, guides, virtual models and limits."""

    base: str = EMBEDDED
    name: str | None = None
    """Name of the base model for clients; by default the last part of `base`."""
    guides: dict[str, Any] = field(default_factory=dict)
    """Guides by the names that clients use; see `GuideEntry`."""
    models: dict[str, Any] = field(default_factory=dict)
    """Virtual models: for each name the strengths of its requests."""
    device: str = "auto"
    dtype: Literal["auto", "fastest", "float32", "bfloat16", "float16"] = "auto"
    limits: RequestLimits = RequestLimits()
    connections: Connections = Connections()
    defaults: Defaults = Defaults()
    control_tokens: bool = False
    """Whether the names of special tokens, such as <|im_end|>, stand for these tokens in messages of clients."""
    hosts: list[str] = field(default_factory=list)
    """Names by which clients may address `radq serve`, beside localhost and its address; see `AllowedHosts`."""

    @classmethod
    def read(cls, file: str | Path) -> "ServeConfig":
        """Read a YAML file. One with guides alone may leave out the line `guides:`."""
        stored = load_yaml(file)
        if isinstance(stored, Mapping) and stored and not cls.__dataclass_fields__.keys() & stored.keys():
            stored = {"guides": dict(stored)}
        return build(stored, cls, repr(str(file)))

    @classmethod
    def embedded(cls, base: str | None = None) -> "ServeConfig":
        """Serve the embedded base model, or another one with its vocabulary, with both embedded reward models."""
        strengths = shipped_strengths()
        guides = {name: f"{EMBEDDED}:{name}" for name in strengths}
        return cls(base=base or EMBEDDED, guides=guides, models={"kind": strengths})

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise OptionError(f"there is no device {self.device!r}.", "choose auto, cpu, cuda, cuda:1, mps or xpu.")
        for name in ("top_k", "max_tokens"):
            default, most = getattr(self.defaults, name), getattr(self.limits, name)
            if default is not None and default > most:
                raise OptionError(
                    f"defaults: {name} is {default}, and limits allow {most}.", "lower the default, or raise the limit."
                )
        for host in self.hosts:
            check_host(host)
        entries: dict[str, GuideEntry] = {}
        for name, value in self.guides.items():
            entries[name] = GuideEntry.read(value, f"the guide {name!r}", self.base)
            if name in SETTINGS or not NAME.fullmatch(name):
                hint = f"use letters, digits and _, and not {', '.join(SETTINGS)}."
                raise OptionError(f"a guide cannot be named {name!r}.", hint)
        object.__setattr__(self, "guides", entries)
        models = {(full := self._model_name(name)): self._strengths(full, value) for name, value in self.models.items()}
        object.__setattr__(self, "models", models)

    @property
    def base_id(self) -> str:
        """The name of the base model for clients, which never is a path."""
        return self.name or Path(self.base).name or "base"

    def _model_name(self, name: str) -> str:
        full = name if "@" in name else f"{self.base_id}@{name}"
        if not MODEL_NAME.fullmatch(full) or full == self.base_id:
            raise OptionError(f"a virtual model cannot be named {name!r}.", "use letters, digits, _, - and @.")
        return full

    def _strengths(self, model: str, value: Any) -> dict[str, float | None]:
        """Read the strengths of a virtual model, and refuse unknown guides and strengths out of their ranges."""
        place = f"the virtual model {model!r}"
        with naming(place):
            strengths = self.read_strengths(value)
            for note in self.note_shares(value):
                warnings.warn(f"{place}: {note}", stacklevel=2)
        return strengths

    def model_strengths(self, model: str) -> dict[str, float | None]:
        """Find the strengths of a model by its name for clients; the base model has none."""
        if model != self.base_id and model not in self.models:
            known = ", ".join([self.base_id, *self.models])
            raise UnknownModelError(f"there is no model {ascii(model)[:80]}.", f"there are {known}.")
        return self.models.get(model, {})

    @cached_property
    def calibrations(self) -> dict[str, Calibration]:
        """The calibrations of the guides that have one, by the names that clients use."""
        entries = self.guides.items()
        known = {name: _find_calibration(entry.folder, entry.strength, self.base) for name, entry in entries}
        return {name: calibration for name, calibration in known.items() if calibration is not None}

    def read_strengths(self, value: Any) -> dict[str, float | None]:
        """Read and check what a client asks for; strengths of calibrated guides become β."""
        strengths = read_strengths(value, self.calibrations, self.defaults.kl_budget)
        self.check_strengths(strengths)
        return strengths

    def note_shares(self, value: Any) -> list[str]:
        """Write a line for each number of a client that is β, and looks like a strength."""
        return note_shares(value, self.calibrations)

    def guidance(
        self,
        asked: Mapping[str, float | None],
        temperature: float,
        top_p: float | None = None,
        notes: Sequence[str] = (),
    ) -> Guidance:
        """Complete what a request asks for, after `check_strengths`, by the defaults."""
        strengths: dict[str, float] = {
            name: entry.suggested if number is None else number
            for name, entry in self.guides.items()
            if (number := asked.get(name, entry.default)) or name in asked
        }
        top_k, budget = asked.get("top_k") or self.defaults.top_k, asked.get("kl_budget", self.defaults.kl_budget)
        steering = Steering(int(top_k), top_p, temperature, budget, self.defaults.ends)
        return Guidance(strengths, steering, bool(asked.get("details")), tuple(notes))

    def check_strengths(self, strengths: Mapping[str, float | None]) -> None:
        """Refuse unknown guides, and strengths or settings out of their ranges."""
        most = self.limits.top_k
        for name, number in strengths.items():
            if name in self.guides:
                low, high = self.guides[name].limits
                if number is None and self.guides[name].suggested is None:
                    hint = f"give one from {low:g} to {high:g}."
                    raise OptionError(f"the guide {name!r} has no suggested strength.", hint)
                if number is not None and not low <= number <= high:
                    reason = f"{name} must be from {low:g} to {high:g}, got {number:g}."
                    raise OptionError(reason, "give such a strength.")
            elif name not in SETTINGS:
                raise OptionError(f"there is no guide {name!r}.", f"there are {', '.join(self.guides) or 'none'}.")
            elif name == "kl_budget":
                Steering(kl_budget=number)
            elif name == "top_k" and (number is None or not 1 <= number <= most or number != int(number)):
                reason = f"top_k must be a whole number from 1 to {most}, got {shorten(number)}."
                raise OptionError(reason, "give such a number.")

    def check(self) -> None:
        """Refuse models that cannot be loaded, by their config.json alone."""
        check_language_model(self.base)
        for name, entry in self.guides.items():
            with naming(f"the guide {name!r}"):
                entry.check()


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Name what the error of a check is about."""
    try:
        yield
    except RadqError as error:
        raise type(error)(f"{place}: {error.message}", error.hint) from error


ANY = "*"
LABEL = r"[a-z0-9_](?:[a-z0-9_\-]*[a-z0-9_])?"
HOST_NAME = re.compile(rf"(?:\*\.)?{LABEL}(?:\.{LABEL})*")


def check_host(host: str) -> None:
    """Refuse a name that is no name of a computer, such as one with a port."""
    name = _normalise(host)
    if host != ANY and not HOST_NAME.fullmatch(name) and _find_address(name) is None:
        raise OptionError(
            f"hosts must be names such as radq.example.com or *.example.com, got {host!r}.",
            'leave scheme, port and path out, or write "*" to allow any name.',
        )


class AllowedHosts:
    """The names of a server: localhost, the address that it listens at, and those that its operator lists.

    A server that listens at all addresses cannot know its names, so it allows any, unless its operator lists some.
    (Starlette's TrustedHostMiddleware allows no addresses and says no reason.)
    """

    def __init__(self, address: str, listed: Collection[str] = ()):
        bound = _normalise(address)
        everywhere = not bound or getattr(_find_address(bound), "is_unspecified", False)
        names = map(_normalise, listed or ([ANY] if everywhere else []))
        self._patterns = {"localhost", bound, *names}

    def allow(self, header: str) -> bool:
        """Whether a request with this Host header is allowed."""
        host, colon, port = header.strip().rpartition(":")
        name = _normalise(host if colon and port.isdigit() else header)
        known = any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return known or _find_address(name) is not None


def _normalise(name: str) -> str:
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _find_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
