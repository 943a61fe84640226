"""Guidance for serving engines, in whose running batch requests come and go, each with its own guide and settings.

A client names a guide that the operator of the server has registered, and gives settings for it. It cannot name files:

    {"radq_guide": "toxicity", "radq_beta": -50.0, "radq_top_k": 20}

Requests may join, leave, change places and start over at any step. A `Batch` advances the guide's state of texts that
grew by one token, reads all other texts anew, and joins the two. Axes: b requests, v vocabulary.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor

from radq.decoding.steering import Steering, Strengths, propose
from radq.errors import DataError, OptionError
from radq.guides import Guide
from radq.guides.spec import GUIDES, guide_maker, parse_guide
from radq.numerics import pad_left

PREFIX = "radq_"
ARGUMENTS = ("radq_guide", "radq_beta", "radq_top_k", "radq_top_p", "radq_kl_budget")
OPTIONS = [name for kind in GUIDES.values() for name in kind.options]  # only the operator sets these
GREEDY_BELOW = 1e-5  # below this temperature, engines take the best token


@dataclass(frozen=True)
class Guidance:
    """The guide that a request asks for, with its strengths and steering."""

    guide: str
    beta: tuple[float, ...]
    steering: Steering


class Registry:
    """The guides that clients may name. Each has one specification, or a list of them, whose guides are added."""

    def __init__(self, specifications: Mapping[str, str | Sequence[str]]):
        self.specifications = {name: [s] if isinstance(s, str) else list(s) for name, s in specifications.items()}
        self._parts = {name: [parse_guide(s) for s in texts] for name, texts in self.specifications.items()}

    @classmethod
    def read(cls, path: str | Path) -> "Registry":
        """Read a YAML file with lines `name: DIR:attribute=beta`, or with a list of such specifications for a name."""
        try:
            stored = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DataError(
                f"cannot read the guides in {str(path)!r}: {error}.",
                "give a YAML file with lines name: DIR:attribute=beta.",
            ) from error
        entries = list(stored.values()) if isinstance(stored, dict) else [None]
        texts = [text for entry in entries for text in (entry if isinstance(entry, list) else [entry])]
        if [] in entries or not all(isinstance(text, str) for text in texts):
            raise DataError(f"{str(path)!r} must map names to guides.", "write each line as name: DIR:attribute=beta.")
        return cls({str(name): entry for name, entry in stored.items()})

    def strengths(self, name: str) -> list[tuple[str, float]]:
        """Names and values of the strengths β of a guide, which a client may replace, in the order of `radq_beta`."""
        pairs = [pair for _, numbers in self._parts[name] for pair in numbers.items()]
        return [(key, number) for key, number in pairs if key not in OPTIONS]

    def guidance(self, arguments: Mapping[str, Any] | None, temperature: float) -> Guidance | None:
        """Read and check what a request's arguments ask for; None if they name no guide."""
        given = {name: value for name, value in (arguments or {}).items() if name.startswith(PREFIX)}
        unknown = [name for name in given if name not in ARGUMENTS]
        if unknown:
            raise OptionError(f"there is no argument {unknown[0]!r}.", f"choose from {', '.join(ARGUMENTS)}.")
        if not given:
            return None
        name = given.get("radq_guide")
        if not isinstance(name, str) or name not in self._parts:
            raise OptionError(
                f"there is no guide {name!r}.", f"the registered guides are {', '.join(self._parts) or 'none'}."
            )
        steering = Steering(
            top_k=_read_count(given.get("radq_top_k", 20), "radq_top_k") or None,
            top_p=_read_number(given.get("radq_top_p"), "radq_top_p"),
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            kl_budget=_read_number(given.get("radq_kl_budget"), "radq_kl_budget"),
        )
        return Guidance(name, self._read_beta(name, given.get("radq_beta")), steering)

    def _read_beta(self, name: str, beta: Any) -> tuple[float, ...]:
        strengths = self.strengths(name)
        if beta is None:
            return tuple(number for _, number in strengths)
        numbers = beta if isinstance(beta, list) else [beta]
        if len(numbers) != len(strengths) or not all(_is_number(number) for number in numbers):
            keys = ", ".join(key for key, _ in strengths)
            raise OptionError(
                f"radq_beta must be one number for each of {keys}, got {beta!r}.",
                f"these are the strengths of guide {name!r}.",
            )
        return tuple(float(number) for number in numbers)

    def load(self, device: str = "cpu", dtype: str = "auto") -> dict[str, Guide]:
        """Load the models of all guides, each folder once."""
        folders = {folder for parts in self._parts.values() for folder, _ in parts}
        makers = {folder: guide_maker(folder, device, dtype) for folder in folders}
        guides = {
            name: reduce(add, [makers[folder](numbers) for folder, numbers in parts])
            for name, parts in self._parts.items()
        }
        for name, guide in guides.items():
            if len(guide.beta) != len(self.strengths(name)):
                raise OptionError(
                    f"guide {name!r} has an attribute named {' or '.join(OPTIONS)}, which are names of options.",
                    "give the attribute another name.",
                )
        return guides


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_number(value: Any, name: str) -> float | None:
    if value is not None and not _is_number(value):
        raise OptionError(f"{name} must be a number, got {value!r}.", "leave it out for the default.")
    return None if value is None else float(value)


def _read_count(value: Any, name: str) -> int:
    if not _is_number(value) or value != int(value) or value < 0:
        raise OptionError(
            f"{name} must be a whole number of at least 0, got {value!r}.", "0 takes the whole vocabulary."
        )
    return int(value)


@dataclass(eq=False)  # requests with equal contents are still different requests
class Request:
    """A guided text, which the engine extends in place."""

    guidance: Guidance
    prompt: Sequence[int]
    output: list[int]  # the engine's own list, or a copy kept up to date

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.output]


class Slots:
    """The guided requests by their slots in the engine's batch."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, Request | None]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> None:
        """Remove, add and move requests, in this order, as vLLM prescribes.

        An added request is None if it is not guided. A move has a source, a target, and whether it swaps the two.
        """
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
    """Steers the logits of the guided requests in a batch."""

    def __init__(self, guides: Mapping[str, Guide]):
        self._guides = guides
        self._batches: dict[tuple[str, bool], Batch] = {}

    @torch.no_grad()
    def steer(self, logits: Float[Tensor, "b v"], requests: Mapping[int, Request]) -> None:
        """Overwrite the rows of these requests with guided logits; other rows stay as they are.

        Requests for one guide are one batch, whatever their settings, but those over the whole vocabulary are a batch
        of their own: all rows of a batch have the same number of candidates, which would be large for the others.
        """
        groups: dict[tuple[str, bool], dict[Request, int]] = {}
        for row, request in requests.items():
            key = (request.guidance.guide, request.guidance.steering.top_k is None)
            groups.setdefault(key, {})[request] = row
        self._batches = {key: self._batches.get(key) or Batch(self._guides[key[0]]) for key in groups}
        for key, rows in groups.items():
            batch = self._batches[key]
            batch.follow(list(rows))
            places = torch.tensor([rows[request] for request in batch.requests], device=logits.device)
            logits[places] = batch.steer(logits[places])


class Batch:
    """Requests for the same guide, and the guide's state of their texts."""

    def __init__(self, guide: Guide):
        self.guide = guide
        self.requests: list[Request] = []  # in the order of the state's rows
        self._outputs: list[list[int]] = []  # the part of their outputs that the state has read
        self._state: Any = None

    def follow(self, requests: Sequence[Request]) -> None:
        """Bring the state up to date with the texts of these requests; requests that are missing leave the batch."""
        present = set(requests)
        resting: list[int] = []  # rows whose text is unchanged: an engine may show a text twice
        growing: list[int] = []  # rows whose text has one more token
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
        self._state = parts[0] if same else parts[0].join(parts)
        self.requests = kept + new
        self._outputs = [list(request.output) for request in self.requests]

    def steer(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """Turn base logits into guided logits, multiplied by the temperature, by which the engine divides them later.

        Tokens that are no candidates get −∞.
        """
        vocab_size = logits.shape[1]
        steerings = [_limit_width(request.guidance.steering, vocab_size) for request in self.requests]
        betas = [request.guidance.beta for request in self.requests]
        strengths = Strengths.stack(steerings, betas, vocab_size, logits.device)
        proposal = propose(logits.float(), self.guide, self._state, strengths).require_finite()
        self._state = proposal.state
        temperature = torch.where(strengths.temperature == 0, 1.0, strengths.temperature)[:, None]
        scaled = proposal.logits * temperature.to(proposal.logits.dtype)
        guided = torch.full_like(logits, -torch.inf)
        return guided.scatter(1, proposal.candidates, scaled.to(logits.dtype))

    def _select(self, rows: list[int]) -> Any:
        everything = rows == list(range(len(self.requests)))
        return self._state if everything else self._state.select(torch.tensor(rows))

    def _start(self, requests: Sequence[Request]) -> Any:
        texts = [tuple(request.text) for request in requests]
        unique = {
            text: row for row, text in enumerate(dict.fromkeys(texts))
        }  # samples of a prompt have the same text at first
        state = self.guide.start(*pad_left(list(unique)))
        if len(unique) == len(texts):
            return state
        return state.select(torch.tensor([unique[text] for text in texts]))


def _limit_width(steering: Steering, vocab_size: int) -> Steering:
    """Lower top_k to the size of the vocabulary where it is larger."""
    return steering if steering.top_k is None else replace(steering, top_k=min(steering.top_k, vocab_size))


def _count_steps(read: list[int], output: list[int]) -> int | None:
    """The number of tokens by which the output has grown since it was read; None if it is another text."""
    return len(output) - len(read) if output[: len(read)] == read else None
