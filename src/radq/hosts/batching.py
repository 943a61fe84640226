"""Requests in a running batch, each with a guide of its own: what a serving engine needs, whichever it is.

Clients name a guide that the operator has registered, and numbers for it; never a folder, never code:

    {"radq_guide": "toxicity", "radq_beta": -50.0, "radq_top_k": 20}

Requests come, go, change places and start over. A state belongs to the tokens it has read, so a `Batch` carries on
with the rows whose text grew by a token, reads the others anew, and joins them. Axes: b requests, v vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.steering import Steering, propose
from radq.errors import DataError, OptionError
from radq.guides import Guide
from radq.guides.spec import GEDI_OPTIONS, guide_maker, parse_guide

PREFIX = "radq_"
ARGUMENTS = ("radq_guide", "radq_beta", "radq_top_k", "radq_top_p", "radq_kl_budget")
FIXED = GEDI_OPTIONS[1:]  # numbers of a specification that are the operator's alone
GREEDY_BELOW = 1e-5  # engines take the best token below this temperature


@dataclass(frozen=True)
class Guidance:
    """What a request asks for. Requests that ask for the same are decoded as one batch."""

    guide: str
    beta: tuple[float, ...]
    steering: Steering


MakeGuide = Callable[..., Guide]  # (name, β)


class Registry:
    """The guides that clients may name, each one specification or a list of them, which add up."""

    def __init__(self, specifications: Mapping[str, str | Sequence[str]]):
        self.specifications = {name: [s] if isinstance(s, str) else list(s) for name, s in specifications.items()}
        self._parts = {name: [parse_guide(s) for s in texts] for name, texts in self.specifications.items()}

    @classmethod
    def read(cls, path: str | Path) -> "Registry":
        """From a YAML file: `name: DIR:attribute=weight`, or a list of such."""
        try:
            stored = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DataError(f"cannot read the guides in {str(path)!r}: {error}.", "give a YAML file.") from error
        entries = list(stored.values()) if isinstance(stored, dict) else [None]
        texts = [text for entry in entries for text in (entry if isinstance(entry, list) else [entry])]
        if [] in entries or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{str(path)!r} is no list of guides.", "write each line as name: DIR:attribute=weight.")
        return cls({str(name): entry for name, entry in stored.items()})

    def weights(self, name: str) -> list[tuple[str, float]]:
        """The numbers of a guide that a client may replace, in the order of `radq_beta`."""
        pairs = [pair for _, numbers in self._parts[name] for pair in numbers.items()]
        return [(key, value) for key, value in pairs if key not in FIXED]

    def guidance(self, arguments: Mapping[str, Any] | None, temperature: float) -> Guidance | None:
        """What a request's arguments ask for, checked; None without a guide."""
        given = {name: value for name, value in (arguments or {}).items() if name.startswith(PREFIX)}
        unknown = [name for name in given if name not in ARGUMENTS]
        if unknown:
            raise OptionError(f"there is no argument {unknown[0]!r}.", f"there are {', '.join(ARGUMENTS)}.")
        if not given:
            return None
        name = given.get("radq_guide")
        if not isinstance(name, str) or name not in self._parts:
            raise OptionError(f"there is no guide {name!r}.", f"there are {', '.join(self._parts) or 'none'}.")
        steering = Steering(
            top_k=_read_count(given.get("radq_top_k", 20), "radq_top_k") or None,
            top_p=_read_number(given.get("radq_top_p"), "radq_top_p"),
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            kl_budget=_read_number(given.get("radq_kl_budget"), "radq_kl_budget"),
        )
        return Guidance(name, self._read_beta(name, given.get("radq_beta")), steering)

    def _read_beta(self, name: str, beta: Any) -> tuple[float, ...]:
        weights = self.weights(name)
        if beta is None:
            return tuple(value for _, value in weights)
        numbers = beta if isinstance(beta, list) else [beta]
        if len(numbers) != len(weights) or not all(_is_number(number) for number in numbers):
            keys = ", ".join(key for key, _ in weights)
            raise OptionError(f"radq_beta is {beta!r}.", f"give {name!r} one number for each of {keys}.")
        return tuple(float(number) for number in numbers)

    def load(self, device: str = "cpu", dtype: str = "auto") -> MakeGuide:
        """Load all models, each once; what it returns makes a guide of a name and β, the registered one by default."""
        folders = {folder for parts in self._parts.values() for folder, _ in parts}
        makers = {folder: guide_maker(folder, device, dtype) for folder in folders}

        def make(name: str, beta: Sequence[float] | None = None) -> Guide:
            left = iter(self._read_beta(name, None) if beta is None else beta)
            parts = [
                makers[folder]({key: old if key in FIXED else next(left) for key, old in numbers.items()})
                for folder, numbers in self._parts[name]
            ]
            return reduce(add, parts)

        return make


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_number(value: Any, name: str) -> float | None:
    if value is not None and not _is_number(value):
        raise OptionError(f"{name} is {value!r}.", "give a number.")
    return None if value is None else float(value)


def _read_count(value: Any, name: str) -> int:
    if not _is_number(value) or value != int(value) or value < 0:
        raise OptionError(f"{name} is {value!r}.", "give a whole number; 0 for the whole vocabulary.")
    return int(value)


@dataclass(eq=False)  # two requests for the same are two
class Request:
    """A text that the engine extends in place."""

    guidance: Guidance
    prompt: Sequence[int]
    output: list[int]  # the engine's own list, or a copy kept up to date

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class Slots:
    """Which request stands at which row of the engine's batch."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # of the guided ones

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, Request | None]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> None:
        """Changes in the order that vLLM prescribes. A move is from, to, and whether it swaps the two."""
        for slot in removed:
            self.requests.pop(slot, None)
        for slot, request in added:
            self.requests.pop(slot, None)
            if request is not None:
                self.requests[slot] = request
        for source, target, swaps in moved:
            moving, replaced = self.requests.pop(source, None), self.requests.pop(target, None)
            if moving is not None:
                self.requests[target] = moving
            if swaps and replaced is not None:
                self.requests[source] = replaced


class Steerer:
    """Steers the rows of a batch of logits, whoever stands there."""

    def __init__(self, make_guide: MakeGuide):
        self._make_guide = make_guide
        self._batches: dict[Guidance, Batch] = {}

    @torch.no_grad()
    def steer(self, logits: Float[Tensor, "b v"], requests: Mapping[int, Request]) -> None:
        """Write the guided logits over the rows of these requests; other rows stay as they are."""
        groups: dict[Guidance, dict[Request, int]] = {}
        for row, request in requests.items():
            groups.setdefault(request.guidance, {})[request] = row
        self._batches = {guidance: self._batches.get(guidance) or self._open(guidance) for guidance in groups}
        for guidance, rows in groups.items():
            batch = self._batches[guidance]
            batch.follow(list(rows))
            places = torch.tensor([rows[request] for request in batch.requests], device=logits.device)
            logits[places] = batch.steer(logits[places])

    def _open(self, guidance: Guidance) -> "Batch":
        return Batch(self._make_guide(guidance.guide, guidance.beta), guidance.steering)


class Batch:
    """Requests that share a guide and a steering, and the guide's state of their texts."""

    def __init__(self, guide: Guide, steering: Steering):
        self.guide, self.steering = guide, steering
        self.requests: list[Request] = []  # in the order of the state's rows
        self._outputs: list[list[int]] = []  # what the state has read of them
        self._state: Any = None

    def follow(self, requests: Sequence[Request]) -> None:
        """Bring the state to the present texts of these requests."""
        present = set(requests)
        resting: list[int] = []  # rows to keep as they are: an engine may show a text twice
        growing: list[int] = []
        for row, request in enumerate(self.requests):
            if request in present:
                steps = _count_steps(self._outputs[row], request.output)
                if steps in (0, 1):
                    (growing if steps else resting).append(row)
        kept = [self.requests[row] for row in resting + growing]
        new = [request for request in requests if request not in set(kept)]
        parts = []
        if resting:
            parts.append(self._select(resting))
        if growing:
            tokens = torch.tensor([self.requests[row].output[-1] for row in growing])
            parts.append(self.guide.advance(self._select(growing), tokens))
        if new:
            parts.append(self._start(new))
        same = len(parts) == 1 and kept == self.requests
        self._state = parts[0] if same else self.guide.join(parts)
        self.requests = kept + new
        self._outputs = [list(request.output) for request in self.requests]

    def steer(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """From base logits to logits which, divided by the temperature, are the guided ones; −∞ beside candidates."""
        top_k = None if self.steering.top_k is None else min(self.steering.top_k, logits.shape[1])
        proposal = propose(logits.float(), self.guide, self._state, replace(self.steering, top_k=top_k))
        scaled = proposal.logits * (self.steering.temperature or 1.0)
        guided = torch.full_like(logits, -torch.inf)
        return guided.scatter(1, proposal.candidates, scaled.to(logits.dtype))

    def _select(self, rows: list[int]) -> Any:
        everything = rows == list(range(len(self.requests)))
        return self._state if everything else self.guide.select(self._state, torch.tensor(rows))

    def _start(self, requests: Sequence[Request]) -> Any:
        texts = [tuple(request.text) for request in requests]
        unique = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # samples of a prompt begin as equals
        state = self.guide.start(*_pad_left(list(unique)))
        if len(unique) == len(texts):
            return state
        return self.guide.select(state, torch.tensor([unique[text] for text in texts]))


def _count_steps(read: list[int], output: list[int]) -> int | None:
    """How many tokens the output has grown by; None where it is another text."""
    return len(output) - len(read) if output[: len(read)] == read else None


def _pad_left(texts: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    longest = max(map(len, texts))
    tokens = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return tokens, mask
