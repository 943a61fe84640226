import math
import re

import pytest
from calibrations import PRAISE
from hypothesis import given
from hypothesis import strategies as st

from radq.errors import OptionError
from radq.registry.config import ServeConfig
from radq.registry.strengths import note_shares, read_strengths, write_strengths

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "kl_budget")
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(st.dictionaries(NAMES, NUMBERS, max_size=8))
def test_text_and_object_say_the_same(strengths: dict[str, float]) -> None:
    text = ", ".join(f"{name} = {number!r}" for name, number in strengths.items())
    assert read_strengths(text) == read_strengths(strengths) == strengths
    assert read_strengths(write_strengths(strengths)) == strengths


@given(st.text() | st.dictionaries(st.text(), st.floats() | st.text() | st.none() | st.booleans() | st.integers()))
def test_anything_else_is_refused_by_radq_alone(value: object) -> None:
    try:
        found = read_strengths(value)
    except OptionError as error:
        found = {}
        str(error).encode()  # an answer can be written
    assert all(number is None or math.isfinite(number) for number in found.values())


def test_a_name_alone_asks_for_the_suggested_strength() -> None:
    assert read_strengths("sentiment,toxicity=-5") == {"sentiment": None, "toxicity": -5.0}
    assert read_strengths({"sentiment": True}) == {"sentiment": None}
    asked = {"sentiment": None, "kl_budget": None}
    assert read_strengths(write_strengths(asked)) == asked
    assert read_strengths("kl_budget=none") == read_strengths({"kl_budget": None}) == {"kl_budget": None}


def test_words_and_percentages_are_strengths_and_numbers_are_beta() -> None:
    known = {"praise": PRAISE}
    for strong in ("strong", "100%"):
        assert read_strengths({"praise": strong}, known) == {"praise": -30.0, "kl_budget": 0.5}
        assert read_strengths(f"praise={strong},kl_budget=none", known) == {"praise": -30.0, "kl_budget": None}
    for number in (0.5, 1, 1.5, "0.5"):
        assert read_strengths({"praise": number}, known) == {"praise": float(number)}
    assert note_shares({"praise": 0.5}, known) == note_shares("praise=0.5", known)
    assert "praise=50%" in note_shares("praise=0.5", known)[0]
    assert note_shares({"praise": "50%", "calm": 0.5}, known) == note_shares("praise=+0.5", known) == []


def test_beta_beside_a_strength_counts_with_the_default_budget() -> None:
    for value, budget in (("praise=strong,calm=3", 0.8), ("praise=strong,calm=0", 0.5), ("praise=strong,calm", 0.8)):
        assert read_strengths(value, {"praise": PRAISE}, 0.8)["kl_budget"] == budget
    assert read_strengths("praise=strong,calm=3", {"praise": PRAISE}, None)["kl_budget"] is None


@pytest.mark.parametrize(
    "value",
    [3, [1], "a=1,a=2", "a=x", {"a": None}, {"a": "nan"}, {"a": 1e999}, {"a": [1]}, {1: 2}, "a=1" * 3000],
)
def test_wrong_values(value: object) -> None:
    with pytest.raises(OptionError):
        read_strengths(value)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "null"), (False, "false"), ([None, True], "[null, true]"), ("x", "'x'")]
)
def test_errors_show_values_as_they_stand_in_json(value: object, shown: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"got {shown}.")):
        read_strengths({"a": value})
    with pytest.raises(OptionError, match=re.escape("got null.")):
        ServeConfig().check_strengths({"top_k": None})
