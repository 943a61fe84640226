"""Guidance for serving engines, whose running batch holds requests with different guides and settings.

Requests may join, leave, change places and start over at any step. A `Follower` for each guide keeps its state of their
texts, and a `Steerer` turns base logits into guided ones. If a request cannot be guided, the others go on, and it ends:
the only token that it may still draw is one that ends it.
Axes: b requests, k candidates, v vocabulary, s strengths.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.steering import Proposal, RowSettings, propose
from radq.guides.base import Advice, Guide
from radq.hosts.base_states import ShownFollower, reads_shown
from radq.hosts.details import RecordedRow, Records
from radq.hosts.follower import Follower, GuidedRequest
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
        """The sums of a request, which are then forgotten."""
        return self._tickets.pop(ticket, None)


def update_slots(
    requests: dict[int, Any],
    removed: Iterable[int],
    added: Iterable[tuple[int, Any]],
    moved: Iterable[tuple[int, int, bool]],
) -> None:
    """Remove, add and move the requests in the slots of an engine's batch, in this order, as vLLM prescribes.

    An added request is None if it is not guided. A move has a source, a target, and whether it swaps the two.
    """
    for slot in removed:
        requests.pop(slot, None)
    for slot, request in added:
        requests.pop(slot, None)
        if request is not None:
            requests[slot] = request
    for source, target, swaps in moved:
        moving, replaced = requests.pop(source, None), requests.pop(target, None)
        if moving is not None:
            requests[target] = moving
        if swaps and replaced is not None:
            requests[source] = replaced


@dataclass(frozen=True)
class _Group:
    """Requests whose candidates are chosen and scored together."""

    requests: list[GuidedRequest]
    places: Int[Tensor, " b"]  # their rows of the logits
    settings: RowSettings
    temperature: Float[Tensor, "b 1"]  # 1 where the best token is taken
    ends: Int[Tensor, "b 1"]
    members: "list[_Member]"
    sums: Float[Tensor, "b n"]  # figures of the steps that were not counted yet
    told: dict[int, Mapping[str, int]]  # rows with details: the places of their guides among the strengths

    def advise(self, state: Any, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None) -> Advice:
        """Add up the shifts of all guides, each of which advises on its own rows alone."""
        assert beta is not None
        shift = torch.zeros(candidates.shape, device=candidates.device)
        clipped = torch.zeros_like(shift, dtype=torch.bool)
        filters = []
        rewards = shift.new_zeros(*shift.shape, beta.shape[1]) if self.told else None
        for member in self.members:
            own = beta[member.rows][:, member.columns]
            advice = member.follower.advise(member.texts, candidates[member.rows], own)
            shift.index_add_(0, member.rows, advice.shift.to(shift))
            if advice.clipped is not None:
                clipped[member.rows] |= advice.clipped
            if advice.allowed is not None:
                filters.append((member.rows, advice.allowed))
            if rewards is not None and advice.rewards is not None:
                rewards[member.rows, :, member.columns] = torch.cat(advice.rewards, dim=2).to(rewards)

        def allowed(logits: Float[Tensor, "b k"]) -> Tensor:
            kept = torch.ones_like(clipped)
            for rows, allow in filters:
                kept[rows] &= allow(logits[rows]).to(kept.device)
            return kept

        return Advice(shift, None, clipped, None if rewards is None else (rewards,), allowed if filters else None)


@dataclass(frozen=True)
class _Member:
    """A guide of a group."""

    follower: Follower
    rows: Int[Tensor, " r"]  # of the group
    texts: Int[Tensor, " r"]  # their rows in the follower
    columns: slice  # of all strengths


class Steerer:
    """Steers the logits of the guided requests in a batch."""

    def __init__(
        self,
        loaded: LoadedGuides,
        capacity: int,
        length: int,
        device: torch.device | str = "cpu",
        shown: tuple[int, ...] = (),
    ):
        """The engine runs at most `capacity` requests of `length` tokens at once, and shows some layers' states."""
        self.loaded, self.device, self.capacity = loaded, torch.device(device), capacity
        self.followers = [
            ShownFollower(guide, capacity, length, self.device, shown)
            if reads_shown(guide, shown)
            else self._make_follower(guide, length)
            for guide in loaded.guides
        ]
        sizes = [len(guide.beta) for guide in loaded.guides]
        self.columns = [slice(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
        self._figures, self.records = Figures(), Records()
        self._plan: tuple[Any, list[_Group]] = (None, [])
        self._steps = 0  # since the figures were counted

    def _make_follower(self, guide: Guide, length: int) -> Follower:
        return Follower(guide, self.capacity, length, self.device)

    @property
    def nbytes(self) -> int:
        return sum(follower.nbytes for follower in self.followers)

    def plan_bytes(self) -> int:
        """Compute the largest number of bytes that the guides' states take up."""
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
    def steer(
        self, logits: Float[Tensor, "b v"], requests: Mapping[int, GuidedRequest], last: Int[Tensor, " b"] | None = None
    ) -> None:
        """Overwrite the rows of these requests with guided logits; other rows stay as they are.

        The logits are multiplied by the temperature, by which the engine divides them later. Errors are logged and not
        raised: a request that fails ends.

        Args:
            requests: the guided requests by their rows.
            last: the last token of the text of each row, where only the device knows it.
        """
        try:
            self._steer(logits, requests, last)
        except Exception as error:
            for follower in self.followers:
                follower.clear()
            self._end(dict.fromkeys(requests.values(), error))
        for row, request in requests.items():
            if request.ended:
                logits[row] = -torch.inf
                logits[row, request.end] = 0.0

    def _steer(self, logits: Float[Tensor, "b v"], requests: Mapping[int, GuidedRequest], last: Tensor | None) -> None:
        self._follow({request: row for row, request in requests.items() if not request.ended}, last)
        running = {row: request for row, request in requests.items() if not request.ended}
        groups = self._make_groups(running, logits.shape[1])
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

    def _follow(self, requests: Mapping[GuidedRequest, int], last: Int[Tensor, " b"] | None) -> None:
        """Bring all guides up to date. A guide that fails reads all its texts again, once."""
        for number, follower in enumerate(self.followers):
            own = {request: row for request, row in requests.items() if number in self._select(request).guides}
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
                kinds.setdefault(self._kind(request), {})[row] = request
            self._plan = (key, [self._make_group(rows, vocab_size) for rows in kinds.values()])
        return self._plan[1]

    def _kind(self, request: GuidedRequest) -> int:
        """Number the kind of a request; requests of one kind are one group.

        A guide that reads candidates reads those of all its texts at once, so these texts are of one kind.
        """
        if any(self.followers[number].reads_candidates for number in self._select(request).guides):
            return -1
        return sum(request.width > limit for limit in (NARROW, WIDE))

    def _make_group(self, rows: Mapping[int, GuidedRequest], vocab_size: int) -> _Group:
        requests = list(rows.values())
        selections = [self._select(request) for request in requests]
        settings = self._stack(requests, vocab_size)
        temperature = torch.where(settings.temperature == 0, 1.0, settings.temperature)[:, None].float()
        members: list[_Member] = []
        for number, follower in enumerate(self.followers):
            own = [row for row, selection in enumerate(selections) if number in selection.guides]
            if own:
                texts = [follower.rows[requests[row]] for row in own]
                members.append(_Member(follower, self._index(own), self._index(texts), self.columns[number]))
        ends = self._index([request.end for request in requests])[:, None]
        sums = torch.zeros(len(requests), len(FIGURE_NAMES), dtype=torch.float64, device=self.device)
        told = {
            row: selection.places
            for row, (request, selection) in enumerate(zip(requests, selections, strict=True))
            if request.guidance.details and request.ticket is not None
        }
        return _Group(requests, self._index(list(rows)), settings, temperature, ends, members, sums, told)

    def _stack(self, requests: Iterable[GuidedRequest], vocab_size: int) -> RowSettings:
        """Make the settings of requests, with their strengths of all guides."""
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
        proposal = propose(base.float(), group, None, group.settings)
        logits[group.places] = self._write(base, proposal, group.temperature, group.ends)
        fine = proposal.finite.double()
        group.sums.add_(torch.stack([fine, proposal.kl * fine, proposal.clipped * fine, 1 - fine], dim=1))
        if group.told:
            self._record(group, base, proposal)

    def _write(
        self,
        base: Float[Tensor, "b v"],
        proposal: Proposal,
        temperature: Float[Tensor, "b 1"],
        ends: Int[Tensor, "b 1"],
    ) -> Float[Tensor, "b v"]:
        """Write the guided logits of all tokens, multiplied by the temperature.

        A row for which a guide gave no finite numbers may only draw the token that ends it.
        """
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
