"""Requests in a running batch: whoever comes, goes, moves or starts over, each row is steered by its own text."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from baselines import make_guide as make_baseline
from families import BOS, VOCAB, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radq.decoding.steering import Steering, Strengths, propose
from radq.errors import DataError, OptionError, UnknownAttributeError
from radq.guides import Guide, RewardGuide
from radq.guides.meter import Meter
from radq.hosts.batching import Guidance, Registry, Request, Slots, Steerer

KINDS = ["q", "v", "dexperts", "gedi", "sum"]
NOTHING: Any = ()


def make_guide(kind: str, folder: Path) -> Guide:
    if kind == "sum":
        return make_guide("q", folder) + make_guide("v", folder) + make_baseline("gedi", filter_p=0.4)
    if kind in ("q", "v"):
        return RewardGuide(make_reward(kind, folder), {"nice": 4.0, "rude": -6.0})
    return make_baseline(kind, filter_p=0.4) if kind == "gedi" else make_baseline(kind)


@pytest.fixture(scope="module")
def guides(lm_folders: dict[str, Path]) -> dict[str, Guide]:
    return {kind: make_guide(kind, lm_folders["gpt2"]) for kind in KINDS}


def base_logits(text: list[int]) -> Tensor:
    """Of a base model that needs no weights; some tokens it forbids, as a grammar would."""
    generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
    logits = 3 * torch.randn(VOCAB, generator=generator)
    return logits.masked_fill(torch.rand(VOCAB, generator=generator) < 0.2, -torch.inf)


def alone(guide: Guide, text: list[int], guidance: Guidance) -> Tensor:
    """The guided logits of one text, read from scratch, times the temperature."""
    steering = guidance.steering
    strengths = Strengths.stack([steering], [guidance.beta], VOCAB, "cpu")
    proposal = propose(base_logits(text)[None], guide, guide.start(torch.tensor([text])), strengths)
    scaled = proposal.logits * (steering.temperature or 1.0)
    return torch.full((1, VOCAB), -torch.inf).scatter(1, proposal.candidates, scaled)[0]


def check(steerer: Steerer, slots: Slots, texts: dict[int, list[int]], guides: dict[str, Guide]) -> None:
    """One step: every row of the engine's batch, guided or not."""
    size = max(texts, default=-1) + 1
    base = torch.stack([base_logits(texts.get(row, [])) for row in range(size)]) if size else torch.zeros(0, VOCAB)
    logits = base.clone()
    steerer.steer(logits, slots.requests)
    for row in range(size):
        request = slots.requests.get(row)
        if request is None:
            assert torch.equal(logits[row], base[row])
        else:
            assert request.text == texts[row]
            expected = alone(guides[request.guidance.guide], texts[row], request.guidance)
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
            assert logits[row][base[row].isneginf()].isneginf().all()  # what the base forbids stays forbidden


STEERINGS = [Steering(5), Steering(None, temperature=0.5), Steering(8, 0.7, 0), Steering(6, kl_budget=0.2)]


class Engine:
    """A host that shuffles its rows as vLLM does, at random."""

    def __init__(self, seed: int, kinds: list[str], guides: dict[str, Guide]):
        self.rng, self.kinds, self.guides, self.slots = random.Random(seed), kinds, guides, Slots()
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
            kind = self.rng.choice([*self.kinds, None])
            self.params[row] = kind and self._guidance(kind)
            self.lists[row] = (prompt, [])
            added.append((row, self._request(row)))
        self.slots.update(NOTHING, added, NOTHING)

    def start_over(self, row: int) -> None:
        """Preempted, and back with a list of its own that holds the same tokens."""
        prompt, output = self.lists[row]
        self.lists[row] = (prompt, list(output))
        self.slots.update([row], [(row, self._request(row))], NOTHING)

    def rewrite(self, row: int) -> None:
        """Other tokens in the same list: a placeholder filled in late, a rollback."""
        output = self.lists[row][1]
        output[-2:] = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(3))]

    def leave(self, row: int) -> None:
        """The last row takes the empty place."""
        last = max(self.lists)
        self.slots.update([row], NOTHING, [(last, row, False)] if last != row else NOTHING)
        for table in (self.lists, self.params):
            table[row] = table[last]  # pyright: ignore
            del table[last]

    def swap(self, a: int, b: int) -> None:
        self.slots.update(NOTHING, NOTHING, [(a, b, True)])
        for table in (self.lists, self.params):
            table[a], table[b] = table[b], table[a]  # pyright: ignore

    def _guidance(self, kind: str) -> Guidance:
        """Every request has strengths of its own."""
        beta = tuple(self.rng.choice([-3.0, 0.0, 0.5, 2.0]) for _ in self.guides[kind].beta)
        return Guidance(kind, beta, self.rng.choice(STEERINGS))

    def _request(self, row: int) -> Request | None:
        guidance = self.params[row]
        return None if guidance is None else Request(guidance, *self.lists[row])


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), kinds=st.sampled_from([[kind] for kind in KINDS] + [["q", "v"]]))
def test_every_row_is_steered_by_its_own_text(seed: int, kinds: list[str], guides: dict[str, Guide]) -> None:
    engine, steerer = Engine(seed, kinds, guides), Steerer(guides)
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
        check(steerer, engine.slots, engine.texts(), guides)
        engine.extend()


@pytest.mark.parametrize("kind", ["q", "v"])
def test_a_batch_is_one_forward_and_equal_prompts_are_read_once(kind: str, guides: dict[str, Guide]) -> None:
    """Whatever their strengths, temperatures and numbers of candidates are."""
    guidances = [Guidance(kind, (row,) * 2, Steering(5 + row, temperature=row / 2)) for row in range(4)]
    requests = {row: Request(guidances[row], [5, 9, 3] if row < 3 else [7, 8], []) for row in range(4)}
    with Meter(guides[kind]) as meter:
        steerer = Steerer({kind: meter})
        steerer.steer(torch.randn(4, VOCAB), requests)
        assert meter.prompts.calls == 1
        bos = 1
        assert int(meter.prompts.tokens) == 3 + 2 + 2 * bos
        for step in range(3):
            logits = torch.randn(4, VOCAB)
            for row, request in requests.items():
                request.output.append(step + row)
            steerer.steer(logits, requests)
        assert meter.prompts.calls == 1
        assert meter.continuations.calls <= 3 + 4  # RAD-V may read candidates and, where others were drawn, tokens


def test_a_text_that_left_makes_room(lm_folders: dict[str, Path]) -> None:
    """The positions of a long text that has gone do not count against those that stay."""
    guide = make_guide("q", lm_folders["gpt2"])
    long, short = (Request(Guidance("q", guide.beta, Steering(5)), [5] * n, []) for n in (63, 2))
    steerer = Steerer({"q": guide})
    steerer.steer(torch.randn(2, VOCAB), {0: long, 1: short})
    for _ in range(10):
        short.output.append(7)
        steerer.steer(torch.randn(1, VOCAB), {0: short})


def test_more_candidates_than_tokens_are_all_of_them(guides: dict[str, Guide]) -> None:
    logits = torch.randn(1, VOCAB)
    Steerer(guides).steer(logits, {0: Request(Guidance("q", guides["q"].beta, Steering(1000)), [5], [])})
    assert logits.isfinite().all()


# --- places ---


def make_requests(count: int) -> list[Request]:
    return [Request(Guidance("q", (), Steering()), [row], []) for row in range(count)]


def test_slots_follow_the_order_of_changes() -> None:
    a, b, c, d = make_requests(4)
    slots = Slots()
    slots.update(NOTHING, [(0, a), (1, None), (2, b)], NOTHING)
    assert slots.requests == {0: a, 2: b}
    slots.update([0], [(0, c), (3, d)], [(3, 1, False), (0, 2, True)])  # freed, taken, moved, swapped
    assert slots.requests == {0: b, 1: d, 2: c}
    slots.update(NOTHING, [(2, None)], [(1, 0, False)])  # both replaced: by an unguided one, and by a move
    assert slots.requests == {0: d}
    slots.update(NOTHING, NOTHING, [(5, 0, True)])  # swapped with an unguided one
    assert slots.requests == {5: d}
    slots.update(NOTHING, NOTHING, [(4, 5, False)])  # an unguided one takes the place
    assert slots.requests == {}


# --- what clients ask for ---

REGISTRY = Registry(
    {
        "toxicity": "models/tox:toxicity=-50",
        "both": ["models/tox:toxicity=-20,insult=-5", "models/praise:praise=10"],
        "gedi": "models/gedi:omega=30,filter_p=0.8",
    }
)


def test_arguments_become_a_guidance() -> None:
    assert REGISTRY.guidance(None, 1.0) is None
    assert REGISTRY.guidance({"other_plugin": {}}, 1.0) is None
    default = REGISTRY.guidance({"radq_guide": "toxicity"}, 0.7)
    assert default == Guidance("toxicity", (-50.0,), Steering(20, None, 0.7, None))
    full = {"radq_guide": "toxicity", "radq_beta": 3, "radq_top_k": 0, "radq_top_p": 0.9, "radq_kl_budget": 1}
    assert REGISTRY.guidance(full, 0.0) == Guidance("toxicity", (3.0,), Steering(None, 0.9, 0.0, 1.0))
    both = REGISTRY.guidance({"radq_guide": "both", "radq_beta": [1, 2.5, -3]}, 1e-6)
    assert both == Guidance("both", (1.0, 2.5, -3.0), Steering(temperature=0.0))
    gedi = REGISTRY.guidance({"radq_guide": "gedi", "radq_beta": -10.0}, 1.0)
    assert gedi is not None
    assert gedi.beta == (-10.0,)  # the filter is the operator's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"radq_guide": "models/tox"},
            "there is no guide 'models/tox'. hint: the registered guides are toxicity, both, gedi",
        ),
        ({"radq_guide": "models/tox:toxicity=-50"}, "there is no guide"),
        ({"radq_guide": ["toxicity"]}, "there is no guide"),
        ({"radq_beta": 3}, "there is no guide None"),
        ({"radq_guide": "toxicity", "radq_gide": 1}, "no argument 'radq_gide'. hint: choose from radq_guide"),
        (
            {"radq_guide": "toxicity", "radq_beta": "high"},
            "one number for each of toxicity, got 'high'",
        ),
        ({"radq_guide": "toxicity", "radq_beta": [1, 2]}, "each of toxicity"),
        ({"radq_guide": "both", "radq_beta": 1}, "each of toxicity, insult, praise"),
        ({"radq_guide": "toxicity", "radq_beta": float("nan")}, "got nan"),
        ({"radq_guide": "toxicity", "radq_beta": True}, "got True"),
        ({"radq_guide": "toxicity", "radq_top_k": 1.5}, "got 1.5"),
        ({"radq_guide": "toxicity", "radq_top_k": -1}, "got -1"),
        ({"radq_guide": "toxicity", "radq_top_p": 0}, "got 0"),
        ({"radq_guide": "toxicity", "radq_top_p": "0.9"}, "got '0.9'"),
        ({"radq_guide": "toxicity", "radq_kl_budget": -1}, "got -1"),
    ],
)
def test_what_a_client_gets_wrong_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        REGISTRY.guidance(arguments, 1.0)
    assert message in str(error.value)


def test_a_registry_is_read_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "guides.yaml"
    path.write_text("toxicity: models/tox:toxicity=-50\nboth: [a:x=1, b:y=2]\n")
    registry = Registry.read(path)
    assert registry.specifications == {"toxicity": ["models/tox:toxicity=-50"], "both": ["a:x=1", "b:y=2"]}
    for wrong in ("a: 1", "- a", "a: [1]", "a: []", "{", "a:"):
        path.write_text(wrong)
        with pytest.raises(DataError):
            Registry.read(path)
    with pytest.raises(DataError, match="nowhere.yaml"):
        Registry.read(tmp_path / "nowhere.yaml")


def test_registered_guides_share_models_and_take_other_numbers(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    make_reward("q", lm_folders["gpt2"]).save_pretrained(tmp_path / "q")
    registry = Registry({"one": f"{tmp_path / 'q'}:nice=1", "two": [f"{tmp_path / 'q'}:rude=2,nice=3"] * 2})
    guides = registry.load()
    one, two = guides["one"], guides["two"]
    assert isinstance(one, RewardGuide)
    assert (one.attributes, one.beta, two.beta) == (("nice",), (1.0,), (2.0, 3.0, 2.0, 3.0))
    assert registry.guidance({"radq_guide": "two", "radq_beta": [4, 5, 6, 7]}, 1.0).beta == (4, 5, 6, 7)
    assert {id(part.model) for part in two.guides} == {id(one.model)}  # pyright: ignore
    with pytest.raises(UnknownAttributeError):
        Registry({"wrong": f"{tmp_path / 'q'}:nicer=1"}).load()
