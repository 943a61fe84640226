"""The reward matrix against a dictionary of prefixes, and the paper's examples built from utterances."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from families import make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_data import make_data
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import NO_LIMIT, load_data
from radq.data.examples import DataColumns
from radq.errors import DataError
from radq.rank.matrix import Observed, RewardMatrix, build_matrix, shuffle_labels
from radq.sources.model_source import ModelSource

VOCAB = 5


def count_prefixes(
    utterances: list[list[int]], labels: list[float], prompts: list[int], weights: list[float]
) -> dict[tuple[tuple[int, ...], int], float]:
    """R[x, v] by the definition, one prefix after the other."""
    sums: dict[Any, float] = defaultdict(float)
    totals: dict[Any, float] = defaultdict(float)
    for tokens, label, prompt, weight in zip(utterances, labels, prompts, weights, strict=True):
        length = len(tokens) - prompt
        for t in range(1, length + 1):
            share = weight * t / (length * (length + 1) / 2)
            entry = (tuple(tokens[: prompt + t - 1]), tokens[prompt + t - 1])
            if share > 0:
                sums[entry] += share * label
                totals[entry] += share
    return {entry: sums[entry] / totals[entry] for entry in totals}


def read_entries(matrix: RewardMatrix, utterances: list[list[int]]) -> dict[tuple[tuple[int, ...], int], float]:
    entries = {}
    for row in range(matrix.prefixes):
        prefix = tuple(utterances[matrix.prefix_utterance[row]][: matrix.prefix_length[row]])
        for entry in range(matrix.starts[row], matrix.starts[row + 1]):
            assert (prefix, int(matrix.tokens[entry])) not in entries
            entries[prefix, int(matrix.tokens[entry])] = float(matrix.values[entry])
    return entries


@st.composite
def data_sets(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[int], list[float]]:
    utterances = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), min_size=1, max_size=25))
    n = len(utterances)
    labels = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=n, max_size=n))
    prompts = [draw(st.integers(0, len(utterance) - 1)) for utterance in utterances]
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=n, max_size=n))
    return utterances, labels, prompts, [*weights[:-1], 1.0]


@settings(max_examples=150, deadline=None)
@given(data_sets())
def test_entries_are_those_of_the_definition(case: tuple[list[list[int]], list[float], list[int], list[float]]) -> None:
    with TemporaryDirectory() as folder:
        matrix = build_matrix(make_data(Path(folder), *case), VOCAB)
        expected = count_prefixes(*case)
        found = read_entries(matrix, case[0])
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, abs=1e-12)
        rows = {prefix for prefix, _ in expected}
        several = {prefix for prefix in rows if sum(entry[0] == prefix for entry in expected) >= 2}
        assert (matrix.prefixes, matrix.entries) == (len(rows), len(expected))
        omega2 = matrix.omega2
        inside = {entry: value for entry, value in expected.items() if entry[0] in several}
        assert omega2.shape == (len(several), len({token for _, token in inside}))
        assert len(omega2) == len(inside)
        assert omega2.values.sum() == pytest.approx(sum(inside.values()), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(data_sets(), st.integers(1, 3), st.integers(0, 1000))
def test_attributes_stand_side_by_side(
    case: tuple[list[list[int]], list[float], list[int], list[float]], count: int, seed: int
) -> None:
    """The stacked matrix holds that of each attribute alone, and each entry the weights of its utterances."""
    utterances, _, prompts, weights = case
    labels = np.random.default_rng(seed).integers(0, 3, (len(utterances), count)) / 4
    with TemporaryDirectory() as folder:
        matrix = build_matrix(make_data(Path(folder), utterances, labels.tolist(), prompts, weights), VOCAB)
        matrix.save(Path(folder) / "matrix.npz")
        again, sparse = RewardMatrix.load(Path(folder) / "matrix.npz"), scipy.sparse.load_npz(f"{folder}/matrix.npz")
    assert sparse.shape == (matrix.prefixes, count * VOCAB)
    assert len(matrix.attributes) == len(again.attributes) == count
    assert matrix.weights is not None
    assert matrix.contradictions is not None
    counted = sum(weight for weight in weights if weight > 0)
    assert matrix.weights.sum() == pytest.approx(count * counted)
    for a in range(count):
        alone = count_prefixes(utterances, labels[:, a].tolist(), prompts, weights)
        inside = matrix.columns // VOCAB == a
        rows = np.repeat(np.arange(matrix.prefixes), np.diff(matrix.starts))[inside]
        found = {}
        for row, token, value in zip(rows, matrix.tokens[inside], matrix.values[inside], strict=True):
            prefix = tuple(utterances[matrix.prefix_utterance[row]][: matrix.prefix_length[row]])
            found[prefix, int(token)] = float(value)
        assert found == pytest.approx(alone, abs=1e-12)
    for one, other in ((matrix, again), (again, matrix)):
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.columns, other.columns)
    for index, row in enumerate(matrix.omega2_rows):
        prefix = utterances[matrix.prefix_utterance[row]][: matrix.prefix_length[row]]
        assert again.omega2_prefix(index) == prefix


def test_the_rank_of_the_stacked_matrix_is_that_of_shared_hidden_states(tmp_path: Path) -> None:
    """Rewards ⟨h(x), V_a[v]⟩ of three attributes: each block and all of them side by side have rank d."""
    rng = np.random.default_rng(0)
    n, v, d = 12, 10, 2
    blocks = rng.normal(size=(n, d)) @ rng.normal(size=(3, d, v))  # (a, n, v)
    utterances = [[x + v, token] for x in range(n) for token in range(v)]
    data = make_data(tmp_path, utterances, blocks.transpose(1, 2, 0).reshape(n * v, 3).tolist())
    data.labels = blocks.transpose(1, 2, 0).reshape(n * v, 3)  # not rounded to float32
    matrix = build_matrix(data, v + n)
    rows = np.flatnonzero(matrix.prefix_length == 1)
    stacked = np.array([matrix.values[matrix.starts[row] : matrix.starts[row + 1]] for row in rows])
    assert stacked.shape == (n, 3 * v)
    assert np.linalg.matrix_rank(stacked) == d
    independent = np.concatenate(rng.normal(size=(3, n, d)) @ rng.normal(size=(3, d, v)), axis=1)
    assert np.linalg.matrix_rank(independent) == 3 * d  # where each attribute has hidden states of its own


@settings(max_examples=60, deadline=None)
@given(data_sets(), st.integers(0, 1000))
def test_shuffled_labels_are_the_same_labels(
    case: tuple[list[list[int]], list[float], list[int], list[float]], seed: int
) -> None:
    utterances, labels, prompts, weights = case
    pairs = [[label, 2 * label + 1] for label in labels]
    with TemporaryDirectory() as folder:
        data = make_data(Path(folder), utterances, pairs, prompts, weights)
        shuffled = shuffle_labels(data, seed)
        matrix, other = build_matrix(data, VOCAB), build_matrix(shuffled, VOCAB)
    counting = np.array(weights) > 0
    assert sorted(shuffled.labels[counting].tolist()) == sorted(np.array(data.labels)[counting].tolist())
    np.testing.assert_allclose(shuffled.labels[:, 1], 2 * shuffled.labels[:, 0] + 1)  # they move together
    np.testing.assert_array_equal(shuffled.labels[~counting], data.labels[~counting])
    np.testing.assert_array_equal(matrix.columns, other.columns)
    np.testing.assert_array_equal(matrix.weights, other.weights)
    assert len(matrix.omega2) == len(other.omega2)


def test_rows_that_do_not_count(tmp_path: Path) -> None:
    for weights in ([0.0, 0.0], [-1.0, 0.0]):
        with pytest.raises(DataError, match="none of the 2 rows count"):
            build_matrix(make_data(tmp_path, [[1, 2], [1, 3]], [1.0, 0.0], weights=weights), VOCAB)


def test_counts_worked_by_hand(tmp_path: Path) -> None:
    # ∅ → 1 (three utterances), 2; (1) → 2 (two, labels 1 and 0), 3; (1, 2) → 4; (2) → nothing
    data = make_data(tmp_path, [[1, 2], [1, 2, 4], [1, 3], [2]], [1.0, 0.0, 1.0, 0.0])
    matrix = build_matrix(data, VOCAB)
    assert (matrix.utterances, matrix.prefixes, matrix.entries) == (4, 3, 5)
    assert matrix.ambiguous == 2
    assert matrix.contradicting == 2
    assert matrix.omega2.shape == (2, 3)
    entries = read_entries(matrix, [[1, 2], [1, 2, 4], [1, 3], [2]])
    assert entries[(), 1] == pytest.approx((1 / 3 + 1 / 3) / (1 / 3 + 1 / 6 + 1 / 3))
    assert entries[(1,), 2] == pytest.approx((2 / 3) / (2 / 3 + 2 / 6))
    assert entries[(1, 2), 4] == 0.0
    assert matrix.contradictions is not None
    first = [1 / 3, 1 / 6, 1 / 3] @ np.square(np.array([1, 0, 1]) - entries[(), 1])
    second = [2 / 3, 2 / 6] @ np.square(np.array([1, 0]) - entries[(1,), 2])
    assert matrix.contradictions.tolist() == pytest.approx([first + second])


def test_a_single_utterance_has_no_row_with_two_continuations(tmp_path: Path) -> None:
    matrix = build_matrix(make_data(tmp_path, [[3, 1, 2]], [0.5]), VOCAB)
    assert (matrix.prefixes, matrix.entries) == (3, 3)
    assert matrix.omega2.shape == (0, 0)
    assert len(matrix.omega2) == 0


def test_saved_matrices_are_read_by_radq_and_scipy(tmp_path: Path) -> None:
    matrix = build_matrix(make_data(tmp_path / "data", [[1, 2], [1, 3], [2, 2]], [1.0, 0.5, 0.25]), VOCAB)
    matrix.save(tmp_path / "matrix.npz")
    again = RewardMatrix.load(tmp_path / "matrix.npz")
    assert again.utterances == 3
    np.testing.assert_array_equal(again.values, matrix.values)
    sparse = scipy.sparse.load_npz(tmp_path / "matrix.npz")
    assert sparse.shape == (matrix.prefixes, VOCAB)
    assert sparse.sum() == pytest.approx(matrix.values.sum())
    with pytest.raises(DataError, match="reward matrix"):
        RewardMatrix.load(tmp_path / "data" / "tokens.bin")


def test_files_of_earlier_versions_and_damaged_ones(tmp_path: Path) -> None:
    file = tmp_path / "matrix.npz"
    matrix = build_matrix(make_data(tmp_path / "data", [[1, 2], [1, 3], [2, 2]], [1.0, 0.5, 0.25]), VOCAB, ["praise"])
    matrix.save(file)
    with np.load(file) as stored:
        parts = dict(stored)
    new = ("attributes", "weights", "contradictions", "omega2_prefixes")
    np.savez(file, **{name: part for name, part in parts.items() if name not in new})
    old = RewardMatrix.load(file)
    assert (old.attributes, old.weights, old.shuffled, old.vocabulary) == (("label",), None, None, None)
    np.testing.assert_array_equal(old.omega2.values, matrix.omega2.values)
    damages = {
        "indptr": parts["indptr"][:-1],
        "indices": parts["indices"] + VOCAB,
        "data": parts["data"] * np.nan,
        "prefix_length": parts["prefix_length"][1:],
        "weights": parts["weights"][1:],
        "omega2_prefixes": np.arange(9),
        "counts": np.array([1]),
        "attributes": np.array(["a", "b"]),
        "shape": np.array([]),
    }
    for name, part in damages.items():
        np.savez(file, **(parts | {name: part}))
        with pytest.raises(DataError, match="cannot be read as a reward matrix"):
            RewardMatrix.load(file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match="cannot be read as a reward matrix"):
        RewardMatrix.load(file)


# --- the paper's examples, from utterances to ranks ---


def dense(matrix: RewardMatrix, length: int) -> np.ndarray:
    """The rows of prefixes of one length, NaN where nothing is known."""
    rows = np.flatnonzero(matrix.prefix_length == length)
    values = np.full((len(rows), matrix.vocab_size), np.nan)
    for index, row in enumerate(rows):
        part = slice(matrix.starts[row], matrix.starts[row + 1])
        values[index, matrix.tokens[part]] = matrix.values[part]
    return values


def test_sums_need_full_rank(tmp_path: Path) -> None:
    """Example 4: x + y = z over all numbers, 1 where it is true. The rows hold every one-hot vector."""
    n, plus, equals = 7, 7, 8
    triples = [(x, y, z) for x in range(n) for y in range(n) for z in range(n)]
    utterances = [[x, plus, y, equals, z] for x, y, z in triples]
    matrix = build_matrix(make_data(tmp_path, utterances, [float(x + y == z) for x, y, z in triples]), 9)
    rewards = dense(matrix, length=4)[:, :n]
    assert not np.isnan(rewards).any()
    assert np.linalg.matrix_rank(rewards) == n


def test_name_pairs_need_full_rank(tmp_path: Path) -> None:
    """Example 3: a first name i before a last name j ≤ i is fine for i = j only. Every completion is triangular."""
    n = 12
    pairs = [(i, j) for i in range(n) for j in range(i + 1)]
    matrix = build_matrix(
        make_data(tmp_path, [[i, n + j] for i, j in pairs], [float(i == j) for i, j in pairs]), vocab_size=2 * n
    )
    rewards = dense(matrix, length=1)[:, n:]
    rng = np.random.default_rng(0)
    for _ in range(20):
        completed = np.where(np.isnan(rewards), rng.normal(size=rewards.shape), rewards)
        assert np.linalg.matrix_rank(completed) == n


def test_yet_their_epsilon_rank_is_one() -> None:
    """Unknown entries may be huge: δ^(i − j) is 1 on the diagonal and as small as wanted below it."""
    n, delta = 12, 1e-3
    pairs = Observed.of(np.where(np.tri(n) == 0, np.nan, np.eye(n)))
    powers = delta ** np.arange(n, dtype=np.float64)
    product = np.outer(powers, 1 / powers)
    assert np.linalg.matrix_rank(product) == 1
    assert np.mean((product[pairs.rows, pairs.columns] - pairs.values) ** 2) <= delta**2


# --- real data ---


def sst2_matrix(file: Path, tokenizer: PreTrainedTokenizerBase, cache: Path) -> RewardMatrix:
    """Build the matrix of a file with SST-2's columns, and compare it with `count_prefixes`."""
    data = load_data([file], tokenizer, DataColumns(text="sentence", labels=["label"]), NO_LIMIT, cache)
    matrix = build_matrix(data, len(tokenizer))
    utterances = [data.token_ids[data.offsets[row] : data.offsets[row + 1]].tolist() for row in range(len(data))]
    expected = count_prefixes(utterances, data.labels[:, 0].tolist(), [0] * len(data), [1.0] * len(data))
    assert len(expected) == matrix.entries
    assert matrix.values.sum() == pytest.approx(sum(expected.values()), rel=1e-12)
    return matrix


def test_an_excerpt_of_sst2_under_a_tokenizer_of_bytes(excerpts: Path, tmp_path: Path) -> None:
    tokenizer = ModelSource.find(make_byte_tokenizer(tmp_path / "bytes")).tokenizer
    assert tokenizer.decode(tokenizer("a café", add_special_tokens=False).input_ids) == "a café"
    matrix = sst2_matrix(excerpts / "sst2.tsv", tokenizer, tmp_path)
    assert matrix.omega2.shape == (17, 24)


@pytest.mark.slow
def test_sst2_under_the_tokenizer_of_gpt2(shared_file: Callable[[str], Path], tmp_path: Path) -> None:
    tokenizer = ModelSource.find(shared_file("models/gpt2-tokenizer")).tokenizer
    assert tokenizer("Hello world", add_special_tokens=False).input_ids == [15496, 995]
    assert tokenizer.decode([15496, 995]) == "Hello world"
    matrix = sst2_matrix(shared_file("data/sentiment/sst2_train.tsv.gz"), tokenizer, tmp_path)
    assert (matrix.prefixes, matrix.entries, matrix.omega2.shape) == (443097, 490033, (10555, 10822))
