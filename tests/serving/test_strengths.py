import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radq.errors import OptionError
from radq.serving.strengths import read_strengths, write_strengths

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


@pytest.mark.parametrize(
    "value",
    [3, [1], "a=1,a=2", "a=x", {"a": None}, {"a": "nan"}, {"a": 1e999}, {"a": [1]}, {1: 2}, "a=1" * 3000],
)
def test_wrong_values(value: object) -> None:
    with pytest.raises(OptionError):
        read_strengths(value)
