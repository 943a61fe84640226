"""Guidance for serving engines, whose running batch holds requests with different guides and settings.

Requests may join, leave, change places and start over at any step. A `Follower` for each guide keeps its state of their
texts, and a `Steerer` turns base logits into guided ones. If a request cannot be guided, the others go on, and it ends:
the only token that it may still draw is one that ends it.
Axes: b requests, k candidates, v vocabulary, s strengths.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.guide_rows import Advisers, list_columns, spread_advice
from radq.decoding.steering import Proposal, RowSettings, propose
from radq.guides.base import Advice
from radq.hosts.base_states import ShownFollower, reads_shown
from radq.hosts.details import RecordedRow, Records
from radq.hosts.follower import Follower, GuidedRequest, place_rows
from radq.numerics import Candidates, Strengths
from radq.registry.details import StepNumbers
from radq.registry.loaded_guides import LoadedGuides, Selection

LOGGER = logging.getLogger(__name__)
NARROW = 64  # candidates; rows with more are scored apart, so that others do not wait for them
WIDE = 1024
FIGURE_STEPS = 32  # between two readings of the sums on the device
MOST_TICKETS = 4096  # requests whose figures are kept until somebody asks for them
FIGURE_NAMES = {
    "tokens": "tokens that were drawn under guidance",
    "kl": "sum over these tokens of KL(guided, unguided), in nats",
    "clipped": "sum over these tokens of the share of candidates with a clamped reward",
    "failed": "steps of requests that could not be guided and end",
}
Sums = dict[str, float]


class Figures:
    """Sums since the server has started, and those of single requests, by tickets that the server gives out."""

    def __init__(self) -> None:
        self.totals: Sums = dict.fromkeys(FIGURE_NAMES, 0.0)
        self._tickets: OrderedDict[str, Sums] = OrderedDict()

    def count(self, tickets: Sequence[str | None], sums: Float[Tensor, "b n"]) -> None:
        """Add the sums of some requests, in the order of `FIGURE_NAMES`. This waits for the device."""
        for ticket, row in zip(tickets, sums.tolist(), strict=True):
            own = self._tickets.setdefault(ticket, dict.fromkeys(FIGURE_NAMES, 0.0)) if ticket is not None else {}
            for name, number in zip(FIGURE_NAMES, row, strict=True):
                self.totals[name] += number
                own[name] = own.get(name, 0.0) + number
        while len(self._tickets) > MOST_TICKETS:
            self._tickets.popitem(last=False)

    def take(self, ticket: str) -> Sums | None:
        return self._tickets.pop(ticket, None)


@dataclass(frozen=True)
class _Group:
    """Requests whose candidates are chosen and scored together."""

    requests: list[GuidedRequest]
    places: Int[Tensor, " b"]  # their rows of the logits
    settings: RowSettings
    ends: Int[Tensor, "b 1"]
    guides: Advisers | None  # None if no request has one
    sums: Float[Tensor, "b n"]  # figures of the steps that were not counted yet
    told: dict[int, Mapping[str, int]]  # rows with details: the places of their guides among the strengths


def _advise(
    follower: Follower, rows: Int[Tensor, " r"], texts: Int[Tensor, " r"], candidates: Candidates, beta: Strengths
) -> Advice:
    """Ask a guide about its own rows of a group, which are the given ones of the follower."""
    advice = follower.advise(texts, candidates[rows], beta[rows])
    return spread_advice(advice, partial(place_rows, rows=rows, count=len(beta)), lambda logits: logits[rows])


class Steerer:
    """Steers the logits of the guided requests in a batch."""

    def __init__(
        self,
        loaded: LoadedGuides,
        capacity: int,
        length: int,
        device: torch.device | str = "cpu",
        shown: tuple[int, ...] = (),
        make: Callable[..., Follower] = Follower,
    ):
        """The engine runs at most `capacity` requests of `length` tokens at once, and shows some layers' states."""
        self.loaded, self.device, self.capacity = loaded, torch.device(device), capacity
        self.followers = [
            ShownFollower(guide, capacity, length, self.device, shown)
            if reads_shown(guide, shown)
            else make(guide, capacity, length, self.device)
            for guide in loaded.guides
        ]
        self.columns = list_columns(loaded.guides)
        self._figures, self.records = Figures(), Records()
        self._plan: tuple[Any, list[_Group]] = (None, [])
        self._steps = 0  # since the figures were counted

    @property
    def nbytes(self) -> int:
        return sum(follower.nbytes for follower in self.followers)

    def plan_bytes(self) -> int:
        return sum(follower.plan_bytes() for follower in self.followers)

    @property
    @torch.inference_mode()  # as all steps, whose tensors cannot be changed without it
    def figures(self) -> Figures:
        """The figures of all steps so far. Asking for them counts the latest steps, and waits for the device."""
        for group in self._plan[1]:
            self._figures.count([request.ticket for request in group.requests], group.sums)
            group.sums.zero_()
        self._steps = 0
        return self._figures

    @torch.inference_mode()
    def retain(self, requests: Iterable[GuidedRequest]) -> None:
        """Forget all requests but these."""
        staying = set(requests)
        for follower in self.followers:
            follower.retain(staying)
        if not staying:
            self._forget_plan()

    def _forget_plan(self) -> None:
        """Count the figures of the groups, and let go of their requests."""
        _ = self.figures
        self._plan = (None, [])

    @torch.inference_mode()
    def steer(self, logits: Float[Tensor, "b v"], requests: Mapping[int, GuidedRequest], tokens: Any = None) -> None:
        """Overwrite the rows of these requests with guided logits; other rows stay as they are.

        The logits are multiplied by the temperature, by which the engine divides them later. Errors are logged and not
        raised: a request that fails ends.

        Args:
            requests: the guided requests by their rows.
            tokens: the last token of the text of each row, where only the device knows it; see `DraftSteerer`, too.
        """
        try:
            self._steer(logits, requests, tokens)
        except Exception as error:
            for follower in self.followers:
                follower.clear()
            self._end(dict.fromkeys(requests.values(), error))
        for row, request in requests.items():
            if request.ended:
                self._write_end(logits, row, request.end, tokens)

    def _write_end(self, logits: Float[Tensor, "b v"], row: int, end: int, tokens: Any) -> None:
        logits[row] = -torch.inf
        logits[row, end] = 0.0

    def _steer(self, logits: Float[Tensor, "b v"], requests: Mapping[int, GuidedRequest], tokens: Any) -> None:
        groups = self._make_groups(self._follow(requests, tokens), logits.shape[1])
        self._steps += 1
        if self._steps >= FIGURE_STEPS:
            _ = self.figures
        for group in groups:
            try:
                self._steer_group(logits, group)
            except Exception as error:
                self._end(dict.fromkeys(group.requests, error))

    def _end(self, failures: Mapping[GuidedRequest, Exception]) -> None:
        for request, error in failures.items():
            if not request.ended:
                request.ended = True
                self._figures.count([request.ticket], torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
                LOGGER.error("radq ends a request that it cannot guide: %r", error, exc_info=error)

    def _follow(
        self, requests: Mapping[int, GuidedRequest], last: Int[Tensor, " b"] | None
    ) -> dict[int, GuidedRequest]:
        """Bring all guides up to date, and return the requests that go on.

        A guide that fails reads all its texts again, once.
        """
        for number, follower in enumerate(self.followers):
            running = {request: row for row, request in requests.items() if not request.ended}
            own = {request: row for request, row in running.items() if number in self._select(request).guides}
            widest = max((request.width for request in own), default=1)
            try:
                failures = follower.follow(own, last, widest)
            except Exception as error:
                LOGGER.warning("radq reads %d texts again after an error: %r", len(own), error, exc_info=error)
                follower.clear()
                try:
                    failures = follower.follow(own, None, widest)
                except Exception as again:
                    follower.clear()
                    failures = dict.fromkeys(own, again)
            self._end(failures)
        return {row: request for row, request in requests.items() if not request.ended}

    def _select(self, request: GuidedRequest) -> Selection:
        """Find the guides that a request uses, and its strengths among those of all guides."""
        if request.selection is None:
            request.selection = self.loaded.select(request.guidance.strengths)
        return request.selection

    # --- groups ---

    def _make_groups(self, requests: Mapping[int, GuidedRequest], vocab_size: int) -> list[_Group]:
        """Make the groups of a step, or return those of the last step if nothing has changed since then."""
        key = (tuple(requests.items()), tuple(follower.layout for follower in self.followers))
        if self._plan[0] != key:
            self._forget_plan()
            kinds: dict[int, dict[int, GuidedRequest]] = {}
            for row, request in requests.items():
                # A guide that reads candidates reads those of all its texts at once, so these texts are of one kind.
                reads = any(self.followers[number].reads_candidates for number in self._select(request).guides)
                kind = -1 if reads else sum(request.width > limit for limit in (NARROW, WIDE))
                kinds.setdefault(kind, {})[row] = request
            self._plan = (key, [self._make_group(rows, vocab_size) for rows in kinds.values()])
        return self._plan[1]

    def _make_group(self, rows: Mapping[int, GuidedRequest], vocab_size: int) -> _Group:
        requests = list(rows.values())
        selections = [self._select(request) for request in requests]
        members = {}
        for number, follower in enumerate(self.followers):
            own = [row for row, selection in enumerate(selections) if number in selection.guides]
            if own:
                texts = self._index([follower.rows[requests[row]] for row in own])
                members[number] = partial(_advise, follower, self._index(own), texts)
        ends = self._index([request.end for request in requests])[:, None]
        sums = torch.zeros(len(requests), len(FIGURE_NAMES), dtype=torch.float64, device=self.device)
        told = {
            row: selection.places
            for row, (request, selection) in enumerate(zip(requests, selections, strict=True))
            if request.guidance.details and request.ticket is not None
        }
        guides = Advisers(members, self.columns) if members else None
        places, settings = self._index(list(rows)), self._stack(requests, vocab_size)
        return _Group(requests, places, settings, ends, guides, sums, told)

    def _stack(self, requests: Iterable[GuidedRequest], vocab_size: int) -> RowSettings:
        steerings, betas, stops = [], [], []
        for request in requests:
            steering = request.guidance.steering
            steerings.append(replace(steering, top_k=min(request.width, vocab_size)) if steering.top_k else steering)
            betas.append(self._select(request).strengths)
            stops.append(request.stops)
        return RowSettings.stack(steerings, betas, vocab_size, self.device, stops=stops)

    def _index(self, numbers: list[int]) -> Int[Tensor, " r"]:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    def _steer_group(self, logits: Float[Tensor, "b v"], group: _Group) -> None:
        base = logits[group.places]
        proposal = propose(base.float(), group.guides, None, group.settings)
        logits[group.places] = self._write(base, proposal, group.settings, group.ends)
        fine = proposal.finite.double()
        group.sums.add_(torch.stack([fine, proposal.kl * fine, proposal.clipped * fine, 1 - fine], dim=1))
        if group.told:
            self._record(group, base, proposal)

    def _write(
        self, base: Float[Tensor, "b v"], proposal: Proposal, settings: RowSettings, ends: Int[Tensor, "b 1"]
    ) -> Float[Tensor, "b v"]:
        """Write the guided logits of all tokens, multiplied by the temperature.

        A row for which a guide gave no finite numbers may only draw the token that ends it.
        """
        temperature = torch.where(settings.temperature == 0, 1.0, settings.temperature)[:, None].float()
        fine = proposal.finite[:, None]
        scaled = torch.where(fine, proposal.logits * temperature, -torch.inf)
        guided = torch.full_like(base, -torch.inf).scatter_(1, proposal.candidates, scaled.to(base.dtype))
        return guided.scatter_(1, ends, torch.where(fine, guided.gather(1, ends), 0.0))

    def _record(self, group: _Group, base: Float[Tensor, "b v"], proposal: Proposal) -> None:
        """Record the candidates of requests with details. This waits for the device."""
        rows = self._index(list(group.told))
        told = proposal.map(lambda values: values[rows])
        numbers, likelihoods = StepNumbers(told), base[rows].double().log_softmax(-1).gather(1, told.candidates)
        for index, (row, columns) in enumerate(group.told.items()):
            request, logprobs = group.requests[row], likelihoods[index].cpu().numpy()
            if bool(told.finite[index]):
                record = RecordedRow(numbers.row(index, columns), logprobs, float(told.kl[index]))
                self.records.add(request.ticket or "", request.choice, request.length, record, request.last)
