"""Label columns of all kinds become numbers in one way, which is decided over the whole column."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import (
    LabelCells,
    LabelRules,
    LabelScale,
    find_scales,
    join_cells,
    parse_map,
    read_cells,
    read_scale,
    scale_labels,
    suggest_map,
)
from radq.errors import DataError, ModelError, OptionError


def cells_of(
    values: Sequence[Any], source: str = "rows.csv", dtype: Any = object, may_miss: bool = False
) -> LabelCells:
    table = pandas.DataFrame({"y": pandas.Series(list(values), dtype=dtype)})
    table.index = np.arange(1, len(table) + 1)
    return read_cells(source, table, ["y"], may_miss)


def numbers_of(values: Sequence[Any], rules: LabelRules | None = None, dtype: Any = object) -> tuple[list[float], str]:
    """The labels of a column, and the sentence about them."""
    cells = cells_of(values, dtype=dtype)
    scales = find_scales(cells, ["y"], rules or LabelRules())
    return scale_labels(cells, ["y"], scales)[:, 0].tolist(), scales[0].describe("y")


@pytest.mark.parametrize(
    ("values", "labels", "sentence"),
    [
        (["negative", " Positive "], [0, 1], "negative → 0, positive → 1 (change this with --label-map)"),
        (["POS", "neg", "pos"], [1, 0, 1], "neg → 0, pos → 1 (change this with --label-map)"),
        (["toxic", "Non-Toxic"], [1, 0], "non-toxic → 0, toxic → 1 (change this with --label-map)"),
        (["nontoxic", "toxic"], [0, 1], "nontoxic → 0, toxic → 1 (change this with --label-map)"),
        (["not  funny", "funny"], [0, 1], "not funny → 0, funny → 1 (change this with --label-map)"),
        (["safe", "unsafe"], [1, 0], "unsafe → 0, safe → 1 (change this with --label-map)"),
        (["spam", "ham"], [1, 0], "ham → 0, spam → 1 (change this with --label-map)"),
        (["no", "yes"], [0, 1], "no → 0, yes → 1 (change this with --label-map)"),
        (["correct", "wrong"], [1, 0], "wrong → 0, correct → 1 (change this with --label-map)"),
        (["good", "good"], [1, 1], "bad → 0, good → 1 (change this with --label-map)"),
        ([True, False], [1, 0], "false → 0, true → 1 (change this with --label-map)"),
        (["TRUE", "False"], [1, 0], "false → 0, true → 1 (change this with --label-map)"),
        (["85%", "0 %"], [0.85, 0], "0% to 100% → 0 to 1 (change this with --label-range)"),
        ([1, 3, 5], [0, 0.5, 1], "1 to 5 → 0 to 1 (change this with --label-range)"),
        (["2", "5"], [0.25, 1], "1 to 5 → 0 to 1 (change this with --label-range)"),
        ([0, 2, 4], [0, 0.5, 1], "0 to 4 → 0 to 1 (change this with --label-range)"),
        ([1, 2], [0, 1], "1 to 2 → 0 to 1 (change this with --label-range)"),
        ([1, 7], [0, 1], "1 to 7 → 0 to 1 (change this with --label-range)"),
        ([1, 10], [0, 1], "1 to 10 → 0 to 1 (change this with --label-range)"),
        ([0, 9.5], [0, 0.95], "0 to 10 → 0 to 1 (change this with --label-range)"),
        ([10, 90], [0.1, 0.9], "0 to 100 → 0 to 1 (change this with --label-range)"),
        ([-0.8, 0.9], [0.1, 0.95], "-1 to 1 → 0 to 1 (change this with --label-range)"),
        ([3, 1000], [0, 1], "3 to 1000 → 0 to 1 (change this with --label-range)"),
        ([0.2, "0.7", 1], [0.2, 0.7, 1], "numbers from 0 to 1 stay as they are"),
        (["0", "1"], [0, 1], "numbers from 0 to 1 stay as they are"),
    ],
)
def test_columns_as_people_have_them(values: list[Any], labels: list[float], sentence: str) -> None:
    assert numbers_of(values) == (pytest.approx(labels), f"label 'y': {sentence}")


@pytest.mark.parametrize(
    ("values", "dtype", "labels"),
    [
        ([None, "bad", "", "good"], object, [np.nan, 0, np.nan, 1]),
        (["", "85%", "nan"], object, [np.nan, 0.85, np.nan]),
        ([np.nan, 1.0, 5.0], float, [np.nan, 0, 1]),
        ([3, None, 1, 5], "Int64", [0.5, np.nan, 0, 1]),
        ([True, None, False], object, [1, np.nan, 0]),
    ],
)
def test_labels_may_be_missing(values: list[Any], dtype: Any, labels: list[float]) -> None:
    """The labels that are there have the scale that they have alone."""
    cells = cells_of(values, dtype=dtype, may_miss=True)
    scales = find_scales(cells, ["y"], LabelRules())
    np.testing.assert_allclose(scale_labels(cells, ["y"], scales)[:, 0], labels)
    assert scales == find_scales(
        cells_of([v for v, y in zip(values, labels, strict=True) if y == y]), ["y"], LabelRules()
    )
    with pytest.raises(DataError, match=r"row \d: 'y' has no label, got .* go on without it by --missing-labels"):
        cells_of(values, dtype=dtype)
    nothing = cells_of([None, ""], may_miss=True)
    with pytest.raises(DataError, match="no row has a label 'y'"):
        find_scales(nothing, ["y"], LabelRules())
    assert np.isnan(scale_labels(nothing, ["y"], scales)).all()  # later data, by a known scale


def test_real_booleans_of_parquet_are_words_too() -> None:
    assert numbers_of([True, False], dtype=bool)[0] == [1, 0]


@pytest.mark.parametrize(
    ("values", "rules", "labels"),
    [
        (["bad", "OK", "good"], LabelRules.parse("bad=0, ok=0.5,good=1"), [0, 0.5, 1]),
        (["a,b", "c"], LabelRules.parse('"a,b=1",c=0'), [1, 0]),
        ([True, False], LabelRules.parse("true=0,false=1"), [0, 1]),
        ([1, 2.0, "2"], LabelRules.parse("1=0,2=1"), [0, 1, 1]),
        (["none", "much"], LabelRules.parse("none=0,much=1"), [0, 1]),
        (["10%", "good"], LabelRules.parse("10%=0.1,good=1"), [0.1, 1]),
        ([1, 4], LabelRules.parse("good=1"), None),
        ([2, 3], LabelRules.parse("", (1, 5)), [0.25, 0.5]),
        ([1, 5], LabelRules.parse("", None, True), [1, 5]),
        (["150%"], LabelRules.parse("", None, True), [1.5]),
        (["bad", "good"], LabelRules.parse("bad=-1,good=1", None, True), [-1, 1]),
    ],
)
def test_options_win(values: list[Any], rules: LabelRules, labels: list[float] | None) -> None:
    if labels is None:
        with pytest.raises(OptionError, match="label_map names good, and none of them is a label in y"):
            numbers_of(values, rules)
    else:
        assert numbers_of(values, rules)[0] == pytest.approx(labels)


def test_a_map_leaves_columns_without_its_words_alone() -> None:
    table = pandas.DataFrame({"mood": ["ok", "bad"], "stars": [1, 5], "spam": ["ham", "spam"]})
    cells = read_cells("a.csv", table, list(table.columns))
    scales = find_scales(cells, list(table.columns), LabelRules.parse("ok=1,bad=0.2"))
    np.testing.assert_allclose(scale_labels(cells, list(table.columns), scales), [[1, 0, 0], [0.2, 1, 1]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", "b", "c"], "'y' has the words a, b, c.*--label-map a=0,b=0.5,c=1"),
        (["negative", "mixed", "positive"], "--label-map negative=0,mixed=0.5,positive=1"),
        ([f"word {n}" for n in range(30)], "word 0, word 1, .* and 20 more.*name a column with labels"),
        (["once"], "has the word once, whose"),
        (["zebra", "ant"], "has the words ant, zebra, whose numbers are not known.*--label-map ant=0,zebra=1"),
        (["👍", "👎"], "has the words 👍, 👎, whose numbers are not known.*--label-map"),
        (["★☆☆☆☆", "★★★★★"], "whose numbers are not known"),
        (["ja", "nein"], "has the words ja, nein, whose numbers are not known"),
        (["1 star", "5 stars"], "1 star, 5 stars.*--label-map '1 star=0,5 stars=1'"),
        (["0,5", "1,5"], "numbers are not known"),
        ([1, "good"], "row 2: 'y' is the word 'good', but in rows.csv, row 1 it is the number '1'"),
        (["5%", 3], "row 2: 'y' is the number '3', but .* row 1 it is the percentage '5%'"),
        ([1, ""], "row 2: 'y' has no label, got ''"),
        (["good", None], "row 2: 'y' has no label, got None"),
        ([0.5, np.nan], "row 2: 'y' has no label, got nan"),
        (["good", "N/A"], "row 2: 'y' is 'n/a', which reads like a missing label.*--label-map n/a=0"),
        ([1, "inf"], "row 2: 'y' must be a finite number or a word, got 'inf'"),
        ([1, [2]], "row 2: 'y' must be a finite number or a word, got \\[2\\]"),
        ([1, 10**400], "row 2: 'y' must be a finite number"),
        ([5, 5], "runs from 5 to 5, which gives no scale"),
        ([-1e308, 1e308], "gives no scale"),
        (["50%", "150%"], "row 2: 'y' must be a percentage from 0% to 100%, got '150%'"),
        ([f"text {n}" for n in range(2000)], "more than 1000 different words.*name a column with labels"),
    ],
)
def test_columns_that_are_not_clear_are_refused(values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbers_of(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("good",), "different words with their numbers, got 'good'"),
        (("good=much",), "got 'good=much'"),
        (("good=nan",), "got 'good=nan'"),
        (("=1",), "got '=1'"),
        (("good=1,Good=0",), "got 'Good=0'"),
        (("1=1,1.0=0",), "got '1.0=0'"),
        (("good=2",), "numbers from 0 to 1, got 2 for 'good'"),
        (("a\nb=1",), "cannot be read"),
        (("", (5, 1)), "label_range must be two finite"),
        (("", (0, float("nan"))), "label_range must be two finite"),
        (("", (0, 1), True), "both --label-range and --keep-labels"),
    ],
)
def test_wrong_options_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LabelRules.parse(*arguments)


@given(
    st.lists(
        st.text(min_size=1).map(lambda text: " ".join(text.split()).casefold()), min_size=1, max_size=9, unique=True
    )
)
def test_a_suggested_map_can_be_copied(words: list[str]) -> None:
    import shlex

    words = [word for word in words if word and parse_map(f'"{word.replace(chr(34), chr(34) * 2)}=1"') == {word: 1.0}]
    if words:
        (text,) = shlex.split(suggest_map(words))
        assert parse_map(text).keys() == set(words)


@given(st.lists(st.floats(-1e300, 1e300), min_size=2, unique=True))
def test_numbers_keep_their_order_and_fill_at_most_the_unit_interval(values: list[float]) -> None:
    labels = np.array(numbers_of(values)[0])
    assert labels.min() >= 0
    assert labels.max() <= 1
    assert (np.diff(labels[np.argsort(values)]) >= 0).all()


def test_outliers_do_not_set_the_scale() -> None:
    values = [*np.linspace(-1, 1.5, 200).tolist(), -30.0, 40.0]
    (labels, sentence), scale = numbers_of(values), find_scales(cells_of(values), ["y"], LabelRules())[0]
    assert (scale.low, scale.high) == tuple(float(f"{q:.4g}") for q in np.quantile(values, (0.01, 0.99)))
    assert labels[-2:] == [0, 1]
    assert labels[100] == pytest.approx((values[100] - scale.low) / (scale.high - scale.low), abs=1e-6)
    assert "to 1.487 → 0 to 1, smaller ones → 0 and larger ones → 1 (change this with" in sentence
    stored = read_scale(json.loads(json.dumps(asdict(scale))), "config.json")
    assert scale_labels(cells_of([99]), ["y"], [stored]).tolist() == [[1]]
    whole = find_scales(cells_of([*range(15), 900]), ["y"], LabelRules())[0]  # few numbers are ratings
    assert (whole.low, whole.high, whole.clips) == (0, 900, False)


# --- pieces, files, later data ---


def test_all_files_decide_and_an_error_names_the_right_one() -> None:
    cells = join_cells([cells_of(["ham", "ham"], "1.csv"), cells_of([], "2.csv"), cells_of(["spam", "ham"], "3.csv")])
    scales = find_scales(cells, ["y"], LabelRules())
    assert scale_labels(cells, ["y"], scales)[:, 0].tolist() == [0, 0, 1, 0]
    mixed = join_cells([cells_of(["ham"], "1.csv"), cells_of([], "2.csv"), cells_of(["spam", 3], "3.csv")])
    with pytest.raises(DataError, match="3.csv, row 2: 'y' is the number '3', but in 1.csv, row 1"):
        find_scales(mixed, ["y"], LabelRules())


@pytest.mark.parametrize(
    ("first", "later", "outcome"),
    [
        ([1, 5], [2, 3], [0.25, 0.5]),
        ([1, 5], [6], "row 1: 'y' must be a number from 1 to 5, got '6'"),
        ([0, 1], [1.5], "must be a number from 0 to 1, got '1.5'"),
        ([0, 1], ["yes"], "must be a number from 0 to 1, got 'yes'"),
        (["0%"], [0.5], "must be a percentage from 0% to 100%, got '0.5'"),
        (["dull", "not dull"], ["dull"], [1]),
        (["dull", "not dull"], ["dull", "cat"], "row 2: 'y' must be one of not dull, dull, got 'cat'"),
        (["no", "yes"], [1], "must be one of no, yes, got '1'"),
    ],
)
def test_later_data_are_read_by_the_scale_of_earlier_data(
    first: list[Any], later: list[Any], outcome: list[float] | str
) -> None:
    (found,) = find_scales(cells_of(first), ["y"], LabelRules())
    scale = read_scale(json.loads(json.dumps(asdict(found))), "config.json")
    assert scale == found
    cells = cells_of(later)
    assert find_scales(cells, ["y"], LabelRules(), [scale]) == [scale]
    if isinstance(outcome, list):
        assert scale_labels(cells, ["y"], [scale])[:, 0].tolist() == outcome
    else:
        with pytest.raises(DataError, match=outcome):
            scale_labels(cells, ["y"], [scale])


@pytest.mark.parametrize("stored", [None, 3, {"low": 1, "high": 1}, {"low": "x"}, {"words": 1}, {"new": 1}])
def test_damaged_scales_are_refused(stored: Any) -> None:
    with pytest.raises(ModelError, match="scale of the labels in 'model' is damaged"):
        read_scale(stored, "model")


def test_one_cache_serves_all_scales(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radq.data.tables.ROWS_PER_PIECE", 2)
    rows = pandas.DataFrame({"text": ["film", "", "plot", "cast", "scene"], "y": [1, 9, 2, 4, 5]})
    rows.to_csv(tmp_path / "stars.csv", index=False)

    def load(*rules: Any) -> list[float]:
        columns = DataColumns(labels=["y"], label_rules=LabelRules.parse(*rules), skip_empty=True)
        data = load_data([tmp_path / "stars.csv"], toy_tokenizer, columns, cache_folder=tmp_path / "cache")
        assert data.row_numbers.tolist() == [1, 3, 4, 5]
        return data.labels[:, 0].tolist()

    assert load() == [0, 0.25, 0.75, 1]
    assert load("", (0, 10)) == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert load("", None, True) == [1, 2, 4, 5]
    assert load("1=0,2=1,4=0,5=1") == [0, 1, 0, 1]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(DataError, match=r"stars\.csv, row 3: 'y' must be one of 1, got '2'"):
        load("1=0")


def test_a_scale_says_nothing_of_a_hint_where_nothing_changes() -> None:
    assert LabelScale(bounded=False).describe("y") == "label 'y': numbers stay as they are"
