"""Files → examples → batches: every format, mistakes by file, row and value, and every row once an epoch."""

import gzip
import json
import lzma
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radq.data import DataColumns, GlobalBatches, RewardData, load_data, read_table
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
    np.testing.assert_allclose(batch["responses"][:, 0], rows["praise"])
    np.testing.assert_allclose(batch["weights"], rows["times"])


def test_several_files_and_pieces(
    toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radq.data.ROWS_PER_PIECE", 7)
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
    monkeypatch.setattr("radq.data.read_table", lambda source: calls.append(source) or read_table(source))

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
    rows["praise"] = rows["praise"].astype(object)
    rows.loc[33, "praise"] = "much"
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
        columns = DataColumns(labels=["stars"], label_range=label_range)
        return load_data([tmp_path / "stars.csv"], toy_tokenizer, columns, cache_folder=tmp_path / "cache")

    assert load(None).response_range == (1.0, 5.0)
    assert load((1, 5)).response_range == (0.0, 1.0)
    assert load((1, 5)).labels[:, 0].tolist() == [0.0, 1.0]
    assert load((0, 10)).response_range == (0.0, 1.0)


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
        ("text,praise\nfilm,\n", "row 1: 'praise' is ''"),
        ("text,praise\nfilm,1\nplot,much\n", "row 2: 'praise' is 'much'"),
        ("text,praise\nfilm,1\nplot,1\ncast,inf\n", "row 3: 'praise' is 'inf'"),
        ("text,praise\nfilm,nan\n", "row 1: 'praise' is 'nan'"),
        ("text,praise\nfilm,1\n  ,1\n", "row 2: 'text' is empty"),
        ("text,praise\n", "no rows"),
        ("", "cannot be read"),
        ("text,toxicity\nfilm,1\n", "no column 'praise'.*it has text, toxicity"),
        ("body,praise\nfilm,1\n", "no column 'text'"),
    ],
)
def test_mistakes_are_named_by_place_and_value(
    content: str, message: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(content)
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
