"""Files → examples → batches: every format, mistakes by file, row and value, and every row once an epoch."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radq.data.dataset import GlobalBatches, RewardData, load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import LabelRules
from radq.data.tables import read_table
from radq.errors import DataError, OptionError
from radq.toy import make_reviews

PRAISE = DataColumns(labels=["praise"])


def table(count: int = 40) -> pandas.DataFrame:
    rows = make_reviews(count)
    return pandas.DataFrame(
        {
            "text": [text + "  " for text, _ in rows],  # trailing whitespace is lost
            "praise": [praise for _, praise in rows],
            "context": ["this movie" if n % 2 else "" for n in range(count)],
            "times": [n % 3 + 0.5 for n in range(count)],
        }
    )


def compress(data: bytes, ending: str) -> bytes:
    if ending == ".zst":
        return pyarrow.compress(data, codec="zstd", asbytes=True)
    return {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[ending](data)


WRITERS: dict[str, Callable[[pandas.DataFrame], bytes]] = {
    ".csv": lambda t: t.to_csv(index=False).encode(),
    ".tsv": lambda t: t.to_csv(index=False, sep="\t", quoting=3).encode(),
    ".jsonl": lambda t: t.to_json(orient="records", lines=True).encode(),
    ".parquet": lambda t: t.to_parquet(index=False),
}


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_rows(
    kind: str, compression: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = table()
    file = tmp_path / f"reviews{kind}{compression}"
    file.write_bytes(compress(WRITERS[kind](rows), compression))
    columns = DataColumns(labels=["praise"], prompt="context", weight="times")
    data = load_data([file], toy_tokenizer, columns, cache_folder=tmp_path / "cache")
    batch = data.batch(range(40))
    for n, row in enumerate(rows.itertuples()):
        context = toy_tokenizer(row.context, add_special_tokens=False).input_ids
        text = toy_tokenizer(row.text.rstrip(), add_special_tokens=False).input_ids
        length = len(context) + len(text)
        assert batch["input_ids"][n, :length].tolist() == context + text
        assert batch["attention_mask"][n].tolist() == [int(t < length) for t in range(batch["input_ids"].shape[1])]
        assert batch["loss_mask"][n].sum() == len(text)
        assert not batch["loss_mask"][n, : len(context)].any()
    np.testing.assert_allclose(batch["labels"][:, 0], rows["praise"])
    np.testing.assert_allclose(batch["weights"], rows["times"])


def test_several_files_and_pieces(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radq.data.tables.ROWS_PER_PIECE", 7)
    for n in range(2):
        table(10 + n).to_csv(tmp_path / f"{n}.csv", index=False)
    data = load_data([tmp_path / "0.csv", tmp_path / "1.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    assert len(data) == data.counts.rows == 21
    assert data.counts.tokens == data.lengths.sum()
    np.testing.assert_allclose(data.labels[10:, 0], table(11)["praise"])


def test_tokens_are_cached_until_something_changes(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reviews.csv"
    table().to_csv(file, index=False)
    calls = []
    monkeypatch.setattr("radq.data.examples.read_table", lambda source: calls.append(source) or read_table(source))

    def load(**options: int) -> RewardData:
        return load_data([file], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache", **options)

    load()
    load()
    assert len(calls) == 1
    load(max_length=5)
    assert len(calls) == 2
    table(41).to_csv(file, index=False)
    assert len(load()) == 41
    assert len(calls) == 3


def test_a_failure_leaves_no_half_cache(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = table()
    rows.loc[33, "praise"] = None
    rows.to_csv(tmp_path / "reviews.csv", index=False)
    for _ in range(2):
        with pytest.raises(DataError, match="row 34"):
            load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_long_texts_are_cut_and_counted(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = pandas.DataFrame({"text": ["the film was good .", "film"], "context": ["this really this", "very"]})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    columns = DataColumns(prompt="context")

    def cut(max_length: int) -> tuple[list[str], int]:
        data = load_data([tmp_path / "rows.csv"], toy_tokenizer, columns, max_length, tmp_path / "cache")
        return toy_tokenizer.batch_decode(data.batch([0])["input_ids"]), data.counts.truncated

    assert cut(8) == (["this really this the film was good ."], 0)
    assert cut(6) == (["this the film was good ."], 1)  # the context loses its beginning first
    assert cut(3) == (["the film was"], 1)


def test_labels_may_be_mapped_and_their_range_is_known(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pandas.DataFrame({"text": ["film", "plot"], "stars": [1, 5]}).to_csv(tmp_path / "stars.csv", index=False)

    def load(label_range: tuple[float, float] | None) -> RewardData:
        columns = DataColumns(labels=["stars"], label_rules=LabelRules.parse("", label_range))
        return load_data([tmp_path / "stars.csv"], toy_tokenizer, columns, cache_folder=tmp_path / "cache")

    assert load(None).labels[:, 0].tolist() == [0.0, 1.0]
    assert load((1, 5)).label_ranges == [(0.0, 1.0)]
    assert load((1, 5)).labels[:, 0].tolist() == [0.0, 1.0]
    assert load((0, 10)).label_ranges == [(0.0, 1.0)]


def test_an_empty_batch_weighs_nothing(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    table().to_csv(tmp_path / "reviews.csv", index=False)
    data = load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    batch = data.batch([])
    assert batch["input_ids"].shape == (1, 1)
    assert not batch["loss_mask"].any()
    train, held_out = data.split(0.25, seed=3)
    assert len(train) == 30
    assert len(held_out) == 10
    assert sorted([*train.rows, *held_out.rows]) == list(range(40))
    assert train.batch([0])["rows"].tolist() == [train.rows[0]]


# --- mistakes ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,praise\nfilm,\n", "row 1: 'praise' has no label, got ''"),
        ("text,praise\nfilm,1\nplot,much\n", "row 2: 'praise' is the word 'much', but in .*row 1 it is the number '1'"),
        ("text,praise\nfilm,1\nplot,1\ncast,inf\n", "row 3: 'praise' must be a finite number or a word, got 'inf'"),
        ("text,praise\nfilm,nan\n", "row 1: 'praise' has no label, got 'nan'"),
        ("text,praise\nfilm,1\n  ,1\n", "row 2: 'text' is empty"),
        ("text,praise\n", "no rows"),
        ("", "cannot be read"),
        ("text,toxicity\nfilm,1\n", "no column 'praise'.*it has text, toxicity"),
        ("body,praise\nfilm,1\n", "no column 'text'"),
        (" text , Praise\nfilm,1\n", "no column 'text'.*did you mean ' text '"),
        ("text,prasie\nfilm,1\n", "no column 'praise'.*did you mean 'prasie'"),
        ("text;praise\nfilm;1\n", "no column 'text'.*separated by ';': save the table with commas"),
        ("text,praise\nfilm,1\n".encode("utf-16"), "cannot be read as csv.*save it as UTF-8"),
        ("text,praise\ncafé,1\n".encode("latin-1"), "cannot be read as csv.*save it as UTF-8"),
    ],
)
def test_mistakes_are_named_by_place_and_value(
    content: str | bytes, message: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=rf"rows\.csv.*{message}") as caught:
        load_data([tmp_path / "rows.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    assert caught.value.hint


def test_empty_texts_may_be_left_out(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,praise\nfilm,1\n ,wrong\nplot,0\n")
    columns = DataColumns(labels=["praise"], skip_empty=True)
    data = load_data([tmp_path / "rows.csv"], toy_tokenizer, columns, cache_folder=tmp_path / "cache")
    assert data.labels[:, 0].tolist() == [1.0, 0.0]
    assert data.counts.empty == 1


def test_words_that_look_like_missing_values_stay_words(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nNA\nnull\n1.0\n")
    assert list(next(read_table(tmp_path / "rows.csv"))["text"]) == ["NA", "null", "1.0"]


def test_files_that_are_none(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("film")
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"text,praise\nfilm,1\n")[:-9])
    (tmp_path / "rows.jsonl").write_text('{"text": "film"')
    (tmp_path / "rows.parquet").write_bytes(b"no")
    cases = {"rows.txt": "no ending", "rows.csv.gz": "cannot be read", "rows.jsonl": "cannot be read"}
    for name, message in (cases | {"rows.parquet": "cannot be read", "absent.csv": "no file|neither a file"}).items():
        with pytest.raises(DataError, match=message):
            load_data([tmp_path / name], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    with pytest.raises(OptionError, match="no data"):
        load_data([], toy_tokenizer, PRAISE)


def test_data_sets_by_name(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="hub data sets need the package datasets, an extra of radq")
    (tmp_path / "reviews").mkdir()
    table().to_parquet(tmp_path / "reviews" / "train.parquet")  # a folder is a data set of its own
    for name in (f"{tmp_path}/reviews", f"{tmp_path}/reviews:train"):
        assert len(load_data([name], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")) == 40


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("rows.csv", "text,praise\nhello, the plot was bad .,0\n", "line 2: 3 fields in a table of 2 columns"),
        ("rows.csv", "text,praise\nfilm,1\nplot\n", "line 3: 1 field in"),
        ("rows.csv", 'text,praise\n"the\n\nfilm",1\n\nplot,1,2\n', "line 6: 3 fields"),  # lines, not rows
        ("rows.csv", 'text,praise\n"film"s,1\n', "cannot be read as csv: ',' expected after '\"'"),
        ("rows.csv", 'praise,text\n1,"film\n0,plot\n', "cannot be read as csv: unexpected end of data"),
        ("rows.tsv", "text\tpraise\nfilm\t1\nplot\t1\t1\n", "line 3: 3 fields"),
        ("rows.tsv", 'text\tpraise\n"film\t1\nplot\n', "line 3: 1 field"),  # a quote is a character there
    ],
)
def test_ragged_rows_are_named_by_file_and_line(
    name: str, content: str, line: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"rows\.\w+'?,? {line}"):
        load_data([tmp_path / name], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")


def test_a_text_may_hold_separators_lines_and_more_than_131072_characters(tmp_path: Path) -> None:
    texts = ['a, "b"\n\nc', "x" * 200_000, "\ufeffd\te"]
    pandas.DataFrame({"text": texts, "n": range(3)}).to_csv(tmp_path / "rows.csv", index=False)
    (found,) = read_table(tmp_path / "rows.csv")
    assert list(found["text"]) == texts
    (tmp_path / "mark.csv").write_bytes(b"\xef\xbb\xbftext\r\nfilm\r\n")  # as Excel begins files
    assert list(next(read_table(tmp_path / "mark.csv"))["text"]) == ["film"]


def test_endings_of_names_may_have_capitals(tmp_path: Path) -> None:
    (tmp_path / "ROWS.CSV.GZ").write_bytes(gzip.compress(b"text\nfilm\n"))
    assert list(next(read_table(tmp_path / "ROWS.CSV.GZ"))["text"]) == ["film"]


MESSAGES = [{"role": "user", "content": "film"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "good"}]


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ({"text": ["film", MESSAGES], "praise": [1, 0]}, {}, "row 2: 'text' does not end with an answer"),
        ({"text": ["film", ["plot"]], "praise": [1, 0]}, {}, "row 2: 'text' is a list, not a text.*chat template"),
        ({"text": [ANSWERED], "praise": [1]}, {}, "row 1: the tokenizer has no chat template"),
        ({"text": ["film", {"a": 1}], "praise": [1, 0]}, {}, "row 2: 'text' is a dict"),
        ({"text": ["film"], "context": [["a"]], "praise": [1]}, {"prompt": "context"}, "row 1: 'context' is a list"),
        (
            {"text": ["film"], "context": [[{"role": "user"}]], "praise": [1]},
            {"prompt": "context"},
            "row 1: the content of a message must be a text, got None",
        ),
        ({"text": ["film", "plot"], "praise": [1, [1]]}, {}, "row 2: 'praise' must be a finite .*, got \\[1\\]"),
        (
            {"text": ["film", "plot"], "praise": [1, 1e39]},
            {"label_rules": LabelRules(keep=True)},
            "row 2: 'praise' must be .*3.4e38, got '1e\\+39'",
        ),
        (
            {"text": ["film", "plot"], "praise": [0, 1.5]},
            {"label_rules": LabelRules(range=(0, 1))},
            "row 2: 'praise' must be a number from 0 to 1, got '1.5'",
        ),
        (
            {"text": ["film", "plot"], "praise": [0, -1]},
            {"label_rules": LabelRules(range=(0, 1))},
            "row 2: 'praise' must be a number from 0 to 1, got '-1'",
        ),
        (
            {"text": ["film", "plot"], "praise": [0, 1], "w": [1, -1]},
            {"weight": "w"},
            "row 2: 'w' must be a number from 0 to 3.4e38, got -1",
        ),
        (
            {"text": ["film", "plot"], "praise": [0, 1], "w": [1, 1e39]},
            {"weight": "w"},
            "row 2: 'w' must be .*, got 1e\\+39",
        ),
    ],
)
def test_cells_that_cannot_be_trained_on_are_named(
    rows: dict, columns: dict, message: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    wanted = DataColumns(labels=["praise"], **columns)
    with pytest.raises(DataError, match=rf"rows\.jsonl, {message}"):
        load_data([tmp_path / "rows.jsonl"], toy_tokenizer, wanted, cache_folder=tmp_path / "cache")


def test_lists_in_parquet_and_columns_twice_are_named(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    pandas.DataFrame({"text": [["a", "b"]], "praise": [1]}).to_parquet(tmp_path / "lists.parquet")
    (tmp_path / "twice.csv").write_text("text,praise,text\nfilm,1,plot\n")
    (tmp_path / "digits.jsonl").write_text('{"text": "film", "praise": 1' + "0" * 400 + "}")
    for name, message in [
        ("lists.parquet", "row 1: 'text' is a list"),
        ("twice.csv", "2 columns 'text'"),
        ("digits.jsonl", "cannot be read|row 1: 'praise' must be"),
    ]:
        with pytest.raises(DataError, match=message):
            load_data([tmp_path / name], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")


# --- what tokens depend on ---


def words(**changes: object) -> PreTrainedTokenizerFast:
    """A tokenizer of three words, whose parts may be exchanged without a change of its vocabulary."""
    backend = Tokenizer(WordLevel({"film": 0, "FILM": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in changes.items():
        setattr(backend, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_a_tokenizer_with_another_normaliser_or_pre_tokenizer_tokenises_anew(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nFILM film-film\n")

    def ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
        data = load_data([tmp_path / "rows.csv"], tokenizer, DataColumns(), cache_folder=tmp_path / "cache")
        return data.batch([0])["input_ids"][0].tolist()

    assert ids(words()) == [1, 0, 2, 0]
    assert ids(words(normalizer=Lowercase())) == [0, 0, 2, 0]
    assert ids(words(pre_tokenizer=WhitespaceSplit())) == [1, 2]
    padding = words()
    padding.backend_tokenizer.enable_padding(length=9)  # as some tokenizer.json files ask for
    padding.backend_tokenizer.enable_truncation(2)
    assert ids(padding) == [1, 0, 2, 0]


def test_tokenizers_written_in_python_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nab<x>\n")

    def ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
        data = load_data([tmp_path / "rows.csv"], tokenizer, DataColumns(), cache_folder=tmp_path / "cache")
        return data.batch([0])["input_ids"][0].tolist()

    plain, more = ByT5Tokenizer(), ByT5Tokenizer()
    more.add_tokens(["<x>"])
    assert len(ids(plain)) == 5
    assert len(ids(more)) == 3


def test_a_folder_is_known_by_its_place_and_content(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "reviews").mkdir(parents=True)
        (tmp_path / place / "reviews" / "train.csv").write_text(f"text,praise\nfilm,{int(place == 'one')}\n")

    def read(source: str) -> Iterator[pandas.DataFrame]:  # in place of the package `datasets`
        yield from read_table(Path(source.split(":")[0]) / "train.csv")

    monkeypatch.setattr("radq.data.examples.read_table", read)

    def label(place: str, source: str) -> float:
        monkeypatch.chdir(tmp_path / place)
        return load_data([source], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache").labels[0, 0]

    for source in ("reviews", "reviews:train"):
        assert label("one", source) == 1
        assert label("two", source) == 0
    (tmp_path / "two" / "reviews" / "train.csv").write_text("text,praise\nfilm,0.5\n")
    assert label("two", "reviews") == 0.5
    assert label("two", "reviews:train") == 0.5


def test_a_hub_data_set_is_known_by_its_revision(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = {"revision": "first", "praise": 0.0}  # in place of the package `datasets`
    monkeypatch.setattr("radq.data.tokens.find_revision", lambda name: hub["revision"])
    monkeypatch.setattr("radq.data.examples.read_table", lambda source: [table().assign(praise=hub["praise"])])

    def label() -> float:
        return load_data(["someone/reviews"], toy_tokenizer, PRAISE, cache_folder=tmp_path).labels[0, 0]

    assert label() == 0
    hub["praise"] = 1.0
    assert label() == 0  # the same revision is not read again
    hub["revision"] = "second"
    assert label() == 1


def test_damaged_tokens_are_named(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    table().to_csv(tmp_path / "reviews.csv", index=False)
    for name in ("tokens.bin", "label_values.npy", "labels.json", "counts.json"):
        data = load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / name)
        whole = (data.folder / name).read_bytes()
        (data.folder / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="damaged.*delete"):
            load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / name)


def test_a_split_leaves_rows_to_train_on_and_has_a_name_of_its_own(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    table().to_csv(tmp_path / "reviews.csv", index=False)
    data = load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    train, held_out = data.split(0.5, seed=0)
    assert len(train) == len(held_out)
    assert len({data.fingerprint, train.fingerprint, held_out.fingerprint}) == 3
    assert data.split(0.5, seed=0)[0].fingerprint == train.fingerprint
    with pytest.raises(DataError, match="share of 0.5 of 1 row leaves none"):
        data.where(np.arange(40) == 3).split(0.5, seed=0)


# --- batches ---


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 9)
)
def test_every_row_comes_once_an_epoch_and_steps_do_not_depend_on_processes(
    count: int, batch_size: int, micro_batches: int, world_size: int, epoch: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, count)

    def steps(micro_batches: int, world_size: int) -> list[list[int]]:
        ranks = []
        for rank in range(world_size):
            batches = GlobalBatches(lengths, batch_size, micro_batches, rank, world_size, seed)
            batches.epoch = epoch
            ranks.append(list(batches))
            assert len(ranks[-1]) == len(batches)
        parts = [list(chain.from_iterable(part)) for part in zip(*ranks, strict=True)]
        return [sorted(chain(*parts[n : n + micro_batches])) for n in range(0, len(parts), micro_batches)]

    together = steps(1, 1)
    assert sorted(chain(*together)) == list(range(count))
    assert steps(micro_batches, world_size) == together


def test_batches_hold_similar_lengths_in_an_order_that_changes() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 20_000)
    batches = GlobalBatches(lengths, 50)
    first = batches.plan()
    padded = sum(lengths[batch].max() * len(batch) for batch in first)
    assert padded < 1.1 * lengths.sum()
    batches.epoch = 1
    assert [batch.tolist() for batch in batches.plan()] != [batch.tolist() for batch in first]
    batches.epoch = 0
    assert [batch.tolist() for batch in batches.plan()] == [batch.tolist() for batch in first]


def test_a_data_loader_gets_whole_batches(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    table().to_csv(tmp_path / "reviews.csv", index=False)
    data = load_data([tmp_path / "reviews.csv"], toy_tokenizer, PRAISE, cache_folder=tmp_path / "cache")
    loader = torch.utils.data.DataLoader(data, batch_sampler=GlobalBatches(data.lengths, 8), collate_fn=lambda b: b)
    assert sorted(int(row) for batch in loader for row in batch["rows"]) == list(range(40))
    assert json.loads((data.folder / "counts.json").read_text())["counts"]["rows"] == 40
