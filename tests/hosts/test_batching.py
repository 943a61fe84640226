"""Requests in a running batch: whoever comes, goes, moves or starts over, each row is steered by its own text."""

import random
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from baselines import make_guide as make_baseline
from families import BOS, EOS, VOCAB, make_reward
from gpu import on_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radq.decoding.steering import Proposal, RowSettings, Steering, propose
from radq.errors import OptionError
from radq.guides.base import Advice, Guide
from radq.guides.meter import Meter
from radq.guides.reward import RewardGuide
from radq.hosts.batching import Steerer
from radq.hosts.details import RecordedRow
from radq.hosts.drafts import DraftRequest, Drafts, DraftSteerer, check_drafts
from radq.hosts.follower import DeviceRequest, HostRequest
from radq.models.cuda_graph import StepGraphs
from radq.registry.loaded_guides import LoadedGuides
from radq.registry.strengths import Guidance

KINDS = ["q", "v", "dexperts", "gedi"]
NOTHING: Any = ()
LENGTH = 63  # of texts, with the BOS that guides put before them


def make_guide(kind: str, folder: Path) -> Guide:
    if kind in ("q", "v"):
        return RewardGuide(make_reward(kind, folder), {"nice": 4.0, "rude": -6.0})
    return make_baseline(kind, filter_p=0.4) if kind == "gedi" else make_baseline(kind)


def make_loaded(guides: dict[str, Guide]) -> LoadedGuides:
    """Every strength has a name of its own, such as q.0 and q.1."""
    places = {f"{kind}.{n}": (place, n) for place, kind in enumerate(guides) for n in range(len(guides[kind].beta))}
    return LoadedGuides(list(guides.values()), places)


def make_steerer(guides: dict[str, Guide], capacity: int = 8) -> Steerer:
    return Steerer(make_loaded(guides), capacity, LENGTH)


@pytest.fixture(scope="module")
def guides(lm_folders: dict[str, Path]) -> dict[str, Guide]:
    return {kind: make_guide(kind, lm_folders["gpt2"]) for kind in KINDS}


def base_logits(text: list[int]) -> Tensor:
    """Of a base model that needs no weights; some tokens it forbids, as a grammar would."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    logits = 3 * torch.randn(VOCAB, generator=generator)
    return logits.masked_fill(torch.rand(VOCAB, generator=generator) < 0.2, -torch.inf)


def find_stops(guidance: Guidance) -> tuple[int, ...]:
    """Some requests have no stop tokens, and others up to three."""
    return (EOS, 7, 20)[: len(guidance.strengths) % 4]


def propose_alone(guides: dict[str, Guide], text: list[int], guidance: Guidance) -> Proposal:
    """The proposal for one text, read from scratch by the sum of its guides."""
    used = {name.split(".")[0] for name in guidance.strengths}
    parts = [kind for kind in guides if kind in used]
    betas = [guidance.strengths.get(f"{kind}.{n}", 0.0) for kind in parts for n in range(len(guides[kind].beta))]
    guide = reduce(add, [guides[kind] for kind in parts]) if parts else None
    strengths = RowSettings.stack([guidance.steering], [betas], VOCAB, "cpu", stops=[find_stops(guidance)])
    state = None if guide is None else guide.start(torch.tensor([text]))
    return propose(base_logits(text)[None], guide, state, strengths)


def alone(guides: dict[str, Guide], text: list[int], guidance: Guidance) -> Tensor:
    """The guided logits of one text alone, times the temperature."""
    proposal = propose_alone(guides, text, guidance)
    scaled = proposal.logits * (guidance.steering.temperature or 1.0)
    return torch.full((1, VOCAB), -torch.inf).scatter(1, proposal.candidates, scaled)[0]


def check_record(steerer: Steerer, guides: dict[str, Guide], text: list[int], request: Any) -> None:
    """Candidates of requests with details are recorded, and those of no others."""
    found = steerer.records.take(request.ticket)
    if not request.guidance.details:
        assert found == []
        return
    (packed,) = [row for row in found if (row["choice"], row["position"]) == (request.choice, len(text))]
    row, expected = RecordedRow.unpack(packed), propose_alone(guides, text, request.guidance)
    used = [kind for kind in guides if any(name.startswith(f"{kind}.") for name in request.guidance.strengths)]
    names = [f"{kind}.{n}" for kind in used for n in range(len(guides[kind].beta))]
    rewards = torch.cat(expected.rewards or (torch.zeros(1, VOCAB, 0),), dim=2)[0]
    likelihoods = base_logits(text).log_softmax(-1)
    assert set(row.candidates.rewards) == set(request.guidance.strengths)
    for place, token in enumerate(expected.candidates[0].tolist()):
        if expected.base[0, place].isneginf():
            continue
        drawn = row.draw(token, "")
        assert drawn is not None
        numbers = [drawn.logprob, drawn.base_logprob, drawn.kl]
        wanted = [expected.logits[0].log_softmax(-1)[place], likelihoods[token], expected.kl[0]]
        assert numbers == pytest.approx([float(one) for one in wanted], abs=1e-4)
        assert drawn.rewards == pytest.approx(
            {name: float(rewards[place, names.index(name)]) for name in request.guidance.strengths}, abs=1e-4
        )


def check(
    steerer: Steerer, requests: dict[int, HostRequest], texts: dict[int, list[int]], guides: dict[str, Guide]
) -> None:
    """One step: every row of the engine's batch, guided or not."""
    size = max(texts, default=-1) + 1
    base = torch.stack([base_logits(texts.get(row, [])) for row in range(size)]) if size else torch.zeros(0, VOCAB)
    logits = base.clone()
    steerer.steer(logits, requests)
    for row in range(size):
        request = requests.get(row)
        if request is None:
            assert torch.equal(logits[row], base[row])
        else:
            assert request.tokens().tolist() == texts[row]
            expected = alone(guides, texts[row], request.guidance)
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
            assert logits[row][base[row].isneginf()].isneginf().all()  # what the base forbids stays forbidden
            check_record(steerer, guides, texts[row], request)


STEERINGS = [Steering(5), Steering(None, temperature=0.5), Steering(8, 0.7, 0), Steering(6, kl_budget=0.2)]


def update_slots(requests: dict[int, Any], removed: Any, added: Any, moved: Any) -> None:
    """Remove, add and move requests, in this order; an added one is None if it is not guided."""
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


class Engine:
    """A host that shuffles its rows as vLLM does, at random."""

    def __init__(self, seed: int, kinds: list[str], guides: dict[str, Guide]):
        self.rng, self.kinds, self.guides = random.Random(seed), kinds, guides
        self.requests: dict[int, HostRequest] = {}
        self.lists: dict[int, tuple[list[int], list[int]]] = {}  # prompt and output of each row
        self.params: dict[int, Guidance | None] = {}

    def texts(self) -> dict[int, list[int]]:
        return {row: prompt + output for row, (prompt, output) in self.lists.items()}

    def extend(self) -> None:
        for _, output in self.lists.values():
            if self.rng.random() < 0.9:  # else a row that is shown as it was
                output.append(self.rng.randrange(3, VOCAB))

    def come(self, rows: list[int], prompt: list[int]) -> None:
        """Requests with one prompt; rows that are taken change hands."""
        added = []
        for row in rows:
            self.params[row] = self._guidance() if self.rng.random() < 0.8 else None
            self.lists[row] = (prompt, [])
            added.append((row, self._request(row)))
        update_slots(self.requests, NOTHING, added, NOTHING)

    def start_over(self, row: int) -> None:
        """Preempted, and back with a list of its own that holds the same tokens."""
        prompt, output = self.lists[row]
        self.lists[row] = (prompt, list(output))
        update_slots(self.requests, [row], [(row, self._request(row))], NOTHING)

    def rewrite(self, row: int) -> None:
        """Other tokens in the same list: a placeholder filled in late, a rollback."""
        output = self.lists[row][1]
        output[-2:] = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(3))]

    def leave(self, row: int) -> None:
        """The last row takes the empty place."""
        last = max(self.lists)
        update_slots(self.requests, [row], NOTHING, [(last, row, False)] if last != row else NOTHING)
        for table in (self.lists, self.params):
            table[row] = table[last]  # pyright: ignore
            del table[last]

    def swap(self, a: int, b: int) -> None:
        update_slots(self.requests, NOTHING, NOTHING, [(a, b, True)])
        for table in (self.lists, self.params):
            table[a], table[b] = table[b], table[a]  # pyright: ignore

    def _guidance(self) -> Guidance:
        """Every request has one or two guides, and strengths of its own."""
        used = self.rng.sample(self.kinds, self.rng.randint(1, min(2, len(self.kinds))))
        names = [f"{kind}.{n}" for kind in used for n in range(len(self.guides[kind].beta))]
        numbers = {name: self.rng.choice([-3.0, 0.0, 0.5, 2.0]) for name in names}
        details = self.rng.random() < 0.5
        strengths = {name: number for name, number in numbers.items() if number or details}
        return Guidance(strengths, self.rng.choice(STEERINGS), details)

    def _request(self, row: int) -> HostRequest | None:
        guidance = self.params[row]
        if guidance is None:
            return None
        known = {"ticket": str(self.rng.random()), "choice": self.rng.randrange(3), "stops": find_stops(guidance)}
        return HostRequest(guidance, *self.lists[row], **known)


class Unrecorded(StepGraphs):
    """Steps that are prepared as those of a GPU, for few different numbers of texts, and then run from Python."""

    def run(self, shape: Any, step: Any) -> Any:
        return step()


def prepare_steps(steerer: Steerer) -> None:
    for follower in steerer.followers:
        follower.graphs = Unrecorded(not follower.reads_candidates)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.sampled_from([[kind] for kind in KINDS] + [["q", "v"], KINDS]),
    prepared=st.booleans(),
)
def test_every_row_is_steered_by_its_own_text(
    seed: int, kinds: list[str], prepared: bool, guides: dict[str, Guide]
) -> None:
    engine, steerer = Engine(seed, kinds, guides), make_steerer(guides)
    if prepared:
        prepare_steps(steerer)
    rng = engine.rng
    engine.come([0, 1, 2], [5, 9])
    for _ in range(10):
        size = len(engine.lists)
        change = rng.choice(["come", "come", "leave", "swap", "start over", "rewrite", "rewrite", "nothing"])
        if change == "come" and size < 7:
            prompt = [BOS] * rng.randrange(2) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 7))]
            engine.come([rng.randrange(size + 1)] if size and rng.random() < 0.3 else [size, size + 1], prompt)
        elif change == "leave" and size:
            engine.leave(rng.randrange(size))
        elif change == "swap" and size > 1:
            engine.swap(*rng.sample(range(size), 2))
        elif change == "start over" and size:
            engine.start_over(rng.randrange(size))
        elif change == "rewrite" and size:
            engine.rewrite(rng.randrange(size))
        check(steerer, engine.requests, engine.texts(), guides)
        engine.extend()


@pytest.mark.parametrize("kind", ["q", "v"])
def test_a_batch_is_one_forward_and_equal_prompts_are_read_once(kind: str, guides: dict[str, Guide]) -> None:
    """Whatever their strengths, temperatures, budgets and numbers of candidates are."""
    steerings = [Steering(5), Steering(9, temperature=0.5), Steering(3, 0.9, 0), Steering(7, kl_budget=0.1)]
    guidances = [Guidance({f"{kind}.0": row + 1.0}, steering) for row, steering in enumerate(steerings)]
    requests = {row: HostRequest(guidances[row], [5, 9, 3] if row < 3 else [7, 8, 6], []) for row in range(4)}
    with Meter(guides[kind]) as meter:
        steerer = make_steerer({kind: meter})
        steerer.steer(torch.randn(4, VOCAB), requests)
        assert meter.prompts.calls == 1
        bos = 1
        assert int(meter.prompts.tokens) == 2 * (3 + bos)
        before = meter.continuations.calls
        steps = 5
        for _ in range(steps):
            logits = torch.randn(4, VOCAB)
            steerer.steer(logits, requests)
            for row, request in requests.items():
                request.output.append(int(logits[row].argmax()))
        assert meter.prompts.calls == 1
        assert meter.continuations.calls - before == (steps if kind == "v" else steps - 1)


def test_a_text_that_left_makes_room(lm_folders: dict[str, Path]) -> None:
    """The positions of a long text that has gone do not count against those that stay."""
    long, short = (HostRequest(Guidance({"q.0": 1.0}, Steering(5)), [5] * n, []) for n in (LENGTH, 2))
    steerer = make_steerer({"q": make_guide("q", lm_folders["gpt2"])})
    steerer.steer(torch.randn(2, VOCAB), {0: long, 1: short})
    for _ in range(10):
        short.output.append(7)
        steerer.steer(torch.randn(1, VOCAB), {0: short})
    assert not short.ended


def test_more_candidates_than_tokens_are_all_of_them(guides: dict[str, Guide]) -> None:
    logits = torch.randn(1, VOCAB)
    make_steerer(guides).steer(logits, {0: HostRequest(Guidance({"q.0": 1.0}, Steering(1000)), [5], [])})
    assert logits.isfinite().all()


def test_the_last_request_gives_the_memory_back(guides: dict[str, Guide]) -> None:
    steerer = make_steerer(guides)
    requests = [HostRequest(Guidance({f"{kind}.0": 1.0}, Steering(5)), [5, 6], []) for kind in KINDS]
    steerer.steer(torch.randn(4, VOCAB), dict(enumerate(requests)))
    assert steerer.nbytes == steerer.plan_bytes()  # all of it, of which pages are taken when they are written
    steerer.retain(requests[:1])
    assert steerer.nbytes > 0
    steerer.retain([])
    assert steerer.nbytes == 0


def test_memory_that_captured_steps_use_stays_for_others(guides: dict[str, Guide]) -> None:
    steerer = make_steerer({"q": guides["q"]})
    prepare_steps(steerer)
    for text in ([5, 6], [7], [8, 9, 10]):
        guidance = Guidance({"q.0": 1.0}, Steering(5))
        request = HostRequest(guidance, text, [], stops=find_stops(guidance))
        logits = base_logits(text)[None].clone()
        steerer.steer(logits, {0: request})
        torch.testing.assert_close(logits[0], alone({"q": guides["q"]}, text, request.guidance), atol=1e-4, rtol=1e-4)
        held = steerer.nbytes
        steerer.retain([])
        assert steerer.nbytes == held == steerer.plan_bytes()


@on_gpu
@pytest.mark.parametrize("kind", ["q", "dexperts", "gedi"])
def test_captured_steps_give_the_logits_of_others(kind: str, lm_folders: dict[str, Path]) -> None:
    """Texts of different lengths come, grow and go, again and again."""
    found: list[list[Tensor]] = []
    for captures in (True, False):
        torch.manual_seed(0)
        guide: Any = make_guide(kind, lm_folders["llama"])
        for model in [guide.model] if kind == "q" else [reader.model for reader in guide.readers]:
            model.cuda()
        steerer = Steerer(make_loaded({kind: guide}), 8, LENGTH, "cuda")
        (follower,) = steerer.followers
        assert follower.graphs.on
        follower.graphs.on = captures
        steps: list[Tensor] = []
        for count in (1, 3, 5, 2, 5):
            guidance = Guidance({f"{kind}.0": 2.0}, Steering(5))
            requests = {row: HostRequest(guidance, [5 + row] * (row + 1), []) for row in range(count)}
            for _ in range(6):
                logits = torch.randn(count, VOCAB).cuda()
                steerer.steer(logits, requests)
                steps.append(logits.cpu())
                for row, request in requests.items():
                    request.output.append(3 + (row + len(steps)) % 30)
        assert (follower.graphs.replays > 0) == captures
        found.append(steps)
    for captured, other in zip(*found, strict=True):
        torch.testing.assert_close(captured, other, atol=1e-5, rtol=1e-5)


# --- requests that cannot be guided ---

FINE = Guidance({"q.0": 1.0}, Steering(5))


class BrokenGuide(Guide):
    """A guide that fails on texts with a certain token: it raises, or its shift is no number."""

    def __init__(self, guide: Guide, raises: bool):
        self.guide, self.beta, self.raises = guide, guide.beta, raises

    @property
    def readers(self) -> Any:
        return self.guide.readers

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        if self.raises and bool((input_ids == 13).any()):
            raise MemoryError("no room")
        return self.guide.start(input_ids, attention_mask)

    def advise(self, state: Any, candidates: Tensor, beta: Tensor | None = None) -> Advice:
        advice = self.guide.advise(state, candidates, beta)
        assert beta is not None
        return replace(advice, shift=torch.where(beta[:, :1] == 13, torch.nan, advice.shift))

    def advance(self, state: Any, tokens: Tensor) -> Any:
        if self.raises and bool((tokens == 13).any()):
            raise MemoryError("no room")
        return self.guide.advance(state, tokens)


def steer_alone(guides: dict[str, Guide], request: HostRequest, logits: Tensor) -> Tensor:
    expected = logits.clone()[None]
    make_steerer(guides).steer(expected, {0: HostRequest(request.guidance, request.prompt, list(request.output))})
    return expected[0]


def test_a_text_that_cannot_be_read_ends_alone(guides: dict[str, Guide], caplog: pytest.LogCaptureFixture) -> None:
    broken: dict[str, Guide] = {"q": BrokenGuide(guides["q"], raises=True)}
    requests = {row: HostRequest(FINE, prompt, [], end=7) for row, prompt in enumerate([[5, 6], [5, 13], [8, 9]])}
    steerer = make_steerer(broken)
    for step in range(3):
        logits = torch.randn(3, VOCAB)
        expected = [steer_alone(guides, requests[row], logits[row]) for row in (0, 2)]
        steerer.steer(logits, requests)
        assert logits[1].isfinite().nonzero().tolist() == [[7]]
        torch.testing.assert_close(logits[[0, 2]], torch.stack(expected), atol=1e-5, rtol=1e-5)
        requests[0].output.append(10 + step)
        requests[1].output.append(7)
        requests[2].output.append(20 + step)
    assert [request.ended for request in requests.values()] == [False, True, False]
    assert "cannot guide" in caplog.text
    requests[0].output.append(13)  # now the forward of all rows fails; the others are read again
    logits = torch.randn(3, VOCAB)
    expected_row = steer_alone(guides, requests[2], logits[2])
    steerer.steer(logits, requests)
    assert [request.ended for request in requests.values()] == [True, True, False]
    torch.testing.assert_close(logits[2], expected_row, atol=1e-5, rtol=1e-5)


def test_a_row_without_numbers_ends_alone(guides: dict[str, Guide]) -> None:
    broken: dict[str, Guide] = {"q": BrokenGuide(guides["q"], raises=False)}
    numbers = [Guidance({"q.0": beta}, Steering(5)) for beta in (1.0, 13.0)]
    requests = {row: HostRequest(guidance, [5, 6], [], end=7) for row, guidance in enumerate(numbers)}
    logits = torch.randn(2, VOCAB)
    expected = steer_alone(guides, requests[0], logits[0])
    steerer = make_steerer(broken)
    steerer.steer(logits, requests)
    torch.testing.assert_close(logits[0], expected)
    assert logits[1].isfinite().nonzero().tolist() == [[7]]
    assert steerer.figures.totals["failed"] == 1


def test_nothing_is_raised_whatever_fails(guides: dict[str, Guide], monkeypatch: pytest.MonkeyPatch) -> None:
    steerer = make_steerer(guides)
    monkeypatch.setattr(steerer, "_make_groups", lambda *_: 1 / 0)
    logits = base = torch.randn(2, VOCAB)
    steerer.steer(logits, {0: HostRequest(FINE, [5], [], end=3)})
    assert logits[0].isfinite().nonzero().tolist() == [[3]]
    assert torch.equal(logits[1], base[1])


# --- texts that only the device knows ---


def test_tokens_on_the_device_are_read_as_those_of_the_host(guides: dict[str, Guide]) -> None:
    """Requests miss steps, slots change hands, rows are in any order."""
    rng = random.Random(3)
    tokens = torch.randint(3, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    source = SimpleNamespace(gpu=tokens)
    names = ["q.0", "v.0", "gedi.0", "dexperts.0"]

    def come(slot: int) -> DeviceRequest:
        tokens[slot] = torch.randint(3, VOCAB, (LENGTH,))
        numbers = {name: rng.choice([-2.0, 3.0]) for name in rng.sample(names, 2)}
        guidance = Guidance(numbers, Steering(6), details=rng.random() < 0.5)
        known = {"stops": find_stops(guidance), "ticket": str(rng.random()), "size": rng.randint(1, 6)}
        return DeviceRequest(guidance, source, slot, **known)

    requests, steerer = [come(slot) for slot in range(4)], make_steerer(guides, capacity=4)
    for step in range(12):
        shown = rng.sample(requests, rng.randint(1, 4))
        rows = dict(enumerate(shown))
        texts = [request.tokens().tolist() for request in shown]
        logits = torch.stack([base_logits(text) for text in texts])
        steerer.steer(logits, rows, torch.tensor([text[-1] for text in texts]))
        for row, request in rows.items():
            expected = alone(guides, texts[row], request.guidance)
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
            check_record(steerer, guides, texts[row], request)
            request.size += 1 if step % 4 else 2
        if step % 3 == 0:
            slot = rng.randrange(4)
            requests[slot] = come(slot)
    assert not any(request.ended for request in requests)


# --- drafts ---


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), prepared=st.booleans())
def test_rows_of_drafts_are_steered_by_their_own_prefix(seed: int, prepared: bool, guides: dict[str, Guide]) -> None:
    """Drafts are accepted or rejected at random, requests come, miss steps and go; some are not guided."""
    rng, most = random.Random(seed), 3
    chosen = {kind: guides[kind] for kind in ("q", "dexperts")}
    check_drafts(list(chosen.values()), VOCAB)
    steerer = DraftSteerer(make_loaded(chosen), 5, LENGTH, most=most)
    if prepared:
        prepare_steps(steerer)
    tokens, lengths = torch.zeros(5, LENGTH, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    requests: dict[int, DraftRequest | None] = {}

    def come(slot: int) -> None:
        lengths[slot] = rng.randint(1, 6)
        tokens[slot, : int(lengths[slot])] = torch.tensor([rng.randrange(3, VOCAB) for _ in range(int(lengths[slot]))])
        numbers = {name: rng.choice([-2.0, 3.0]) for name in rng.sample(["q.0", "q.1", "dexperts.0"], 2)}
        guidance = Guidance(numbers, rng.choice([Steering(6), Steering(4, temperature=0.5, kl_budget=0.2)]))
        known = {"stops": find_stops(guidance), "lengths": SimpleNamespace(gpu=lengths)}
        request = DraftRequest(guidance, SimpleNamespace(gpu=tokens), slot, **known)
        requests[slot] = request if rng.random() < 0.8 else None

    for slot in range(4):
        come(slot)
    for step in range(8):
        if step % 3 == 2:
            come(rng.randrange(5))
        rows: list[tuple[int, int, list[int]]] = []
        for slot in rng.sample(list(requests), rng.randint(1, len(requests))):
            text = tokens[slot, : int(lengths[slot])].tolist()
            drafted = [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, most - 1))]
            rows += [(slot, place, text + drafted[:place]) for place in range(len(drafted) + 1)]
            tokens[slot, int(lengths[slot]) : int(lengths[slot]) + len(drafted)] = torch.tensor(drafted).int()
            if (known := requests[slot]) is not None:
                known.size = len(text) + most - 1
        shown = {slot: one for slot, _, _ in rows if (one := requests[slot]) is not None}
        base = torch.stack([base_logits(text) for _, _, text in rows])
        logits = base.clone()
        columns = [[slot for slot, _, _ in rows], [place for _, place, _ in rows]]
        columns += [[text[-1] for _, _, text in rows], [len(text) - 1 for _, _, text in rows]]
        steerer.steer(logits, shown, Drafts(*map(torch.tensor, columns)))
        for row, (slot, _, text) in enumerate(rows):
            request = requests[slot]
            expected = base[row] if request is None else alone(chosen, text, request.guidance)
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
        for slot in {slot for slot, _, _ in rows}:  # some drafts are accepted, and one token is drawn
            accepted = rng.randint(0, max(place for other, place, _ in rows if other == slot))
            lengths[slot] += accepted + 1
            tokens[slot, int(lengths[slot]) - 1] = rng.randrange(3, VOCAB)
    assert not any(request.ended for request in requests.values() if request is not None)


@pytest.mark.parametrize("kind", ["v", "gedi"])
def test_guides_that_cannot_follow_drafts_are_refused(kind: str, guides: dict[str, Guide]) -> None:
    with pytest.raises(OptionError, match="speculative"):
        check_drafts([guides[kind]], VOCAB)
