"""Rubrics: their scales, and answers that are scores or prose."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radq.errors import DataError
from radq.judges.llm import Rubric, find_scale, read_rubric


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("How kind is it?\nScale: 1 to 5", (1, 5)),
        ("## Scale\n\nfrom 0 to 10", (0, 10)),
        ("**Scale**: 0-100, where 100 is best", (0, 100)),
        ("Rate it on a scale of 1 (rude) to 7 (kind).", (1, 7)),
        ("Use a 1–5 scale.", (1, 5)),
        ("Give a 0..3 point scale value", (0, 3)),
        ("scale: -1 to 1", (-1, 1)),
        ("Scale: 0.5 … 2.5", (0.5, 2.5)),
        ("Say how polite the text is, from 1 to 5.", (1, 5)),
        ("A number between 0 and 1.", (0, 1)),
        ("Texts from 2010 to 2020. Scale: 1 to 4. On this scale, 1 to 4, 4 is best.", (1, 4)),
    ],
)
def test_scales(text: str, scale: tuple[float, float]) -> None:
    assert find_scale(text, "rubric.md") == scale


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Is the text kind?", 'names no scale.*"Scale: 1 to 5"'),
        ("1. Is it kind?\n2. Is it true?", "names no scale"),
        ("The scale is five stars.", "names no scale"),
        ("Scale: 1 to 5\nScale: 1 to 10", "several scales: 1 to 5, 1 to 10"),
        ("from 1 to 5, or from 0 to 1", "several scales"),
        ("Scale: 5 to 1", "is 5 to 1.*lower number first"),
        ("Scale: 3 to 3", "is 3 to 3"),
    ],
)
def test_rubrics_without_one_scale_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find_scale(text, "rubric.md")


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "rubric.md"
    file.write_text("  How kind?\n\nScale: 1 to 5\n")
    rubric = read_rubric(file)
    assert rubric == Rubric("How kind?\n\nScale: 1 to 5", (1, 5))
    assert rubric.question("a text").startswith("How kind?")
    assert "\na text\n" in rubric.question("a text")
    assert "from 1 to 5" in rubric.question("a text")
    other = Rubric("How kind? Scale: 1 to 6", (1, 6))
    assert rubric.fingerprint != other.fingerprint
    for content, message in ((b"", "is empty"), (b"\xff\xfe", "cannot be read"), (b"x" * 100_001, "100,001")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_rubric(file)
    with pytest.raises(DataError, match="No such file"):
        read_rubric(tmp_path / "nowhere.md")
    with pytest.raises(DataError, match="Is a directory"):
        read_rubric(tmp_path)


RUBRIC = Rubric("Scale: 1 to 5", (1.0, 5.0))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        *(("4", 4), (" 4.5\n", 4.5), ("**3**", 3), ("`2`", 2), ("Score: 4", 4), ("score = 4.", 4), ("Rating: 1", 1)),
        *(("4/5", 4), ("4 / 5.", 4), ('{"score": 2}', 2), ("<think>Is it 1? No, 2.</think>\n\n5", 5)),
        *(("", None), ("four", None), ("I would say 4", None), ("4 or 5", None), ("4, since it is kind", None)),
        *(("0", None), ("6", None), ("-4", None), ("4/10", None), ("3,5", None), ("1 2", None), ("nan", None)),
        *(("<think>4", None), ("4%", None), ("1e0", None)),
    ],
)
def test_answers(answer: str, score: float | None) -> None:
    assert RUBRIC.find_score(answer) == score


@given(st.text() | st.from_regex(r"\A[\d./ -]{0,12}\Z"))
def test_no_answer_is_a_score_outside_the_scale(answer: str) -> None:
    found = RUBRIC.find_score(answer)
    assert found is None or (1 <= found <= 5 and any(character.isdecimal() for character in answer))
