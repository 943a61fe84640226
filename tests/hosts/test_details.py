"""Recorded candidates: what is kept, for how long, and what is told of them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radq.hosts.details import RecordedRow, Records
from radq.registry.details import MOST_CANDIDATES, CandidateRow


def make_row(k: int, seed: int = 0) -> RecordedRow:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(10 * k)[:k]
    base, guided = rng.dirichlet(np.ones(k)), rng.dirichlet(np.ones(k))
    rewards = {"nice": rng.normal(size=k), "rude": rng.normal(size=k)}
    return RecordedRow(CandidateRow(ids, base, guided, rng.normal(size=k), rewards), np.log(base), kl=0.5)


@given(st.integers(1, 200), st.integers(0, 9), st.data())
def test_a_settled_row_tells_the_same_as_the_whole_one(k: int, seed: int, data: st.DataObject) -> None:
    row = make_row(k, seed)
    token = int(row.candidates.ids[data.draw(st.integers(0, k - 1))])
    settled = row.settle(token)
    told, whole = settled.draw(token, "x"), row.draw(token, "x")
    assert told is not None
    assert whole is not None
    assert told.describe(str) == whole.describe(str)
    assert told.candidates is not None
    assert len(settled.candidates.ids) == len(told.candidates.ids) == min(k, MOST_CANDIDATES)
    chosen = next(one for one in told.describe(str)["candidates"] if one["id"] == token)
    assert (told.shift, told.rewards) == (chosen["shift"], chosen["rewards"])
    assert told.logprob == pytest.approx(math.log(chosen["probability"]))
    packed = json.loads(json.dumps(settled.pack()))
    again = RecordedRow.unpack(packed).draw(token, "x")
    assert again is not None
    assert again.describe(str) == told.describe(str)


def test_a_token_that_was_not_drawn_from_the_row_has_no_numbers() -> None:
    row = make_row(5)
    first, second = (int(token) for token in row.candidates.ids[:2])
    assert row.draw(99, "") is None
    assert row.settle(99).draw(first, "") is None
    assert row.settle(first).draw(second, "") is None


def test_rows_are_settled_by_the_next_token_and_given_once() -> None:
    records = Records()
    rows = [make_row(100, seed) for seed in range(3)]
    tokens = [int(row.candidates.ids[0]) for row in rows]
    for place, row in enumerate(rows):
        records.add("a", 1, 7 + place, row, tokens[place - 1] if place else 5)
    records.add("b", 0, 3, rows[0], 5)
    found = records.take("a")
    assert [(row["choice"], row["position"], row["token"]) for row in found] == [
        (1, 7, tokens[0]),
        (1, 8, tokens[1]),
        (1, 9, None),
    ]
    assert [len(row["ids"]) for row in found] == [MOST_CANDIDATES, MOST_CANDIDATES, 100]
    assert records.take("a") == []
    assert records.count == 1
    records.add("b", 0, 3, rows[1], 5)  # a prompt in parts is scored again and again
    assert records.count == 1


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 20), st.booleans()), max_size=60))
def test_the_number_of_rows_is_bounded(steps: list[tuple[str, int, bool]]) -> None:
    records, row = Records(most=10), make_row(2)
    for ticket, position, takes in steps:
        if takes:
            records.take(ticket)
        else:
            records.add(ticket, 0, position, row, -1)
        assert 0 <= records.count <= 10
    assert sum(len(records.take(ticket)) for ticket in "abcd") <= 10
    assert records.count == 0


def test_requests_that_go_on_are_forgotten_last() -> None:
    records, row = Records(most=6), make_row(2)
    records.add("going", 0, 1, row, -1)
    for number in range(20):
        records.add(f"left {number}", 0, 1, row, -1)
        records.add("going", 0, 1, row, -1)
    assert len(records.take("going")) == 1
