"""Captured training steps: padding to few shapes changes no loss, no step waits for the device, and graphs add up.

A machine without a GPU runs the same code with "graphs" that compute their step anew. Tests that need a real graph are
skipped there.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from families import VOCAB, make_lm
from gpu import on_gpu
from instruments import WAITING, CountWaiting
from reward_data import make_data
from torch import Tensor
from training_runs import changed, losses, weights
from transformers import TrainingArguments

from radq.data.dataset import RewardData, pad_batch
from radq.data.pairs import PairData
from radq.models.kinds import RadQ, RadV
from radq.toy import make_reviews
from radq.training import capture, trainer
from radq.training.candidates import CandidateFeed, CandidateSet
from radq.training.capture import MOST_TOKENS, CapturedSteps, PackedBatch, can_capture
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
from radq.training.experts import ExpertTrainer, TextFormat, train_experts
from radq.training.reward import train
from radq.training.reward_trainer import RewardTrainer

pytestmark = pytest.mark.slow

KINDS = ["q", "v", "ce", "mlp", "lora", "distilled", "cached", "candidates", "pairs", "dexperts", "gedi"]
KINDS += ["mlp teacher"]
DISTILLED = ("distilled", "cached", "candidates", "mlp teacher")


class RepeatedSteps(CapturedSteps):
    """Captured steps without a GPU: a replay computes the step anew, from inputs and into gradients at fixed places."""

    replays = 0

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        yield

    def _capture(self, inputs: dict[str, Tensor]) -> Any:
        loss = torch.zeros((), dtype=self.parameters[0].dtype, device=self.device)
        places = [parameter.grad.data_ptr() for parameter in self.parameters if parameter.grad is not None]

        def replay() -> None:
            RepeatedSteps.replays += 1
            loss.copy_(self.step(inputs))
            assert places == [parameter.grad.data_ptr() for parameter in self.parameters if parameter.grad is not None]

        return capture.CapturedStep(replay, loss)


@contextlib.contextmanager
def never_waiting() -> Iterator[list[str]]:
    yield []


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers capture steps on a CPU."""
    monkeypatch.setattr(trainer, "can_capture", lambda arguments: True)
    monkeypatch.setattr(trainer, "CapturedSteps", RepeatedSteps)
    monkeypatch.setattr(capture, "notice_waiting", never_waiting)
    monkeypatch.setattr(RepeatedSteps, "replays", 0)


def make_rows(folder: Path, num_rows: int = 7, num_labels: int = 1) -> RewardData:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 12, num_rows)
    texts = [random.integers(3, VOCAB, length).tolist() for length in lengths]
    prompts = [int(random.integers(0, length)) for length in lengths]
    weights = random.uniform(0.5, 2.0, num_rows).tolist()
    return make_data(folder, texts, random.random((num_rows, num_labels)).round().tolist(), prompts, weights)


def make_pairs(folder: Path) -> PairData:
    """Seven pairs of the texts of `make_rows`, of which some occur in several pairs."""
    random = np.random.default_rng(0)
    texts = [random.integers(3, VOCAB, length).tolist() for length in random.integers(1, 12, 6)]
    scores, weights = [0.5, 0.0, 2.0, 1.0, 3.0, 1.0], [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    make_data(folder, texts, scores, [0] * 6, weights, rows=[1, 1, 1, 1, 2, 2])
    return PairData(folder)


def make_trainer(kind: str, folder: Path, lm_folder: Path) -> tuple[Any, Any]:
    """A trainer of each kind over the same rows, in float64, and its model."""
    data = make_pairs(folder / "rows") if kind == "pairs" else make_rows(folder / "rows")
    options: dict[str, Any] = {"data": ["rows"], "out": str(folder / "run"), "batch_size": 7, "learning_rate": 1e-3}
    options |= {"epochs": 1.0, "warmup_steps": 0, "max_length": 12, "trainer": {"use_cpu": True}}
    torch.manual_seed(0)
    if kind in ("dexperts", "gedi"):
        config = ExpertTrainingConfig(labels="label", backbone="lm", method=kind, **options)  # pyright: ignore
        text_format = TextFormat([[1]] if kind == "dexperts" else [[1, 4, 5], [1, 6]], 2, 12)
        model: Any = make_lm("llama").double()
        return ExpertTrainer(model, config, text_format, data), model
    teacher: Any = RadV.from_backbone(lm_folder, ["label"]).double() if kind in DISTILLED else None
    if kind == "mlp teacher":
        teacher = RadQ.from_backbone(lm_folder, ["label"], "mlp").double()
    config = RewardTrainingConfig(
        labels="label",
        pairs="chosen,rejected" if kind == "pairs" else "",
        backbone="lm",
        kind="v" if kind == "v" else "q",
        loss="ce" if kind == "ce" else "mse",
        teacher="teacher" if teacher is not None else "",
        **options,
    )
    if kind == "v":
        model = RadV.from_backbone(lm_folder, ["label"])
    else:
        model = RadQ.from_backbone(lm_folder, ["label"], "mlp" if kind == "mlp" else "linear")
    if kind == "lora":
        model.add_lora(2, str(lm_folder))
    if kind == "cached":
        targets = np.random.default_rng(1).random((len(data.token_ids), 1)).astype(np.float32)
        data.stored["targets"] = lambda texts: np.where(
            data.find_tokens(texts)[0][..., None], targets[data.find_tokens(texts)[1]], 0
        )
    model = model.double()
    found = RewardTrainer(model, config, data, teacher=teacher)
    if kind == "candidates":
        found.feed = feed = CandidateFeed(make_candidates(), data.rows, 0.6, 0)
        found.collate = lambda batch: batch | feed.batch(batch["rows"].numpy(), 0, len(batch["rows"]))
    return found, model


def make_candidates() -> CandidateSet:
    """Random prefixes, some of whose places and candidates are not used."""
    random = np.random.default_rng(2)
    candidates = random.integers(-1, VOCAB, (5, 2, 3)).astype(np.int32)
    candidates[1, 1] = -1
    lengths, places = np.array([4, 6, 5, 6, 6], np.int32), np.array([[1, 4], [3, 0], [4, 5], [2, 6], [1, 3]], np.int32)
    tokens, targets = random.integers(3, VOCAB, (5, 6)).astype(np.int32), random.random((5, 2, 3, 1))
    return CandidateSet(tokens, lengths, places, candidates, targets.astype(np.float32))


def add_gradients(found: Any, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a batch, which counts as a whole optimizer step, and the gradients."""
    model.zero_grad()
    loss = found.add_gradients(model, batch, found._get_num_items_in_batch([batch], torch.device("cpu")))
    return loss, {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


# --- shapes ---


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_neither_loss_nor_gradients(kind: str, tmp_path: Path, lm_folders: dict[str, Path]) -> None:
    found, model = make_trainer(kind, tmp_path, lm_folders["llama"])
    batch = found.train_dataset.batch([0, 2, 5])
    padded = pad_batch(batch, 7, batch["input_ids"].shape[1] + 5)
    assert padded["input_ids"].shape == (14 if kind == "pairs" else 7, batch["input_ids"].shape[1] + 5)
    assert padded["rows"].tolist() == [0, 2, 5, -1, -1, -1, -1]
    loss, gradients = add_gradients(found, model, found.collate(batch))
    padded_loss, padded_gradients = add_gradients(found, model, found.collate(padded))
    torch.testing.assert_close(padded_loss, loss)
    assert gradients.keys() == padded_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, msg=name)


def test_batches_have_few_shapes_and_are_no_longer_than_the_longest_text(
    tmp_path: Path, lm_folders: dict[str, Path], repeated: None
) -> None:
    found, _ = make_trainer("q", tmp_path, lm_folders["llama"])
    longest = int(found.train_dataset.lengths.max())
    assert 8 < longest < 16
    short = np.flatnonzero(found.train_dataset.lengths <= 8)[:2].tolist()
    shapes = [
        found.collate_for_training(found.train_dataset.batch(rows))["input_ids"].shape for rows in (short, [], range(7))
    ]
    assert shapes == [(7, 8), (7, 8), (7, longest)]


# --- waiting ---


@pytest.mark.parametrize("kind", KINDS)
def test_no_training_step_waits_for_the_device(kind: str, tmp_path: Path, lm_folders: dict[str, Path]) -> None:
    found, model = make_trainer(kind, tmp_path, lm_folders["llama"])
    batch = found.collate(found.train_dataset.batch([0, 2, 5]))
    inputs = batch | {"epoch": torch.tensor(0)}
    items = found._get_num_items_in_batch([batch], torch.device("cpu"))
    found._compute_gradients(model, inputs, items)  # the first step may compute what others keep
    with CountWaiting((*WAITING, "lift_fresh")) as count:  # also no tensors of Python's numbers, which are copied
        found._compute_gradients(model, inputs, items)
    assert count.found == []


def test_masks_are_as_before_outside_of_a_step(lm_folders: dict[str, Path]) -> None:
    from transformers import masking_utils

    from radq.models.kv_cache import known_positions

    before = masking_utils.find_packed_sequence_indices
    with known_positions():
        assert masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0]])) is None
    assert masking_utils.find_packed_sequence_indices is before


def test_tokens_are_counted_without_padding(tmp_path: Path, lm_folders: dict[str, Path]) -> None:
    found, model = make_trainer("q", tmp_path, lm_folders["llama"])
    batch = found.train_dataset.batch([0, 2, 5])
    for inputs in (batch, pad_batch(batch, 7, 16)):
        assert found.count_tokens(inputs) == found.train_dataset.lengths[[0, 2, 5]].sum()
    gedi, _ = make_trainer("gedi", tmp_path / "gedi", lm_folders["llama"])
    ended = gedi.collate(batch)
    assert gedi.count_tokens(ended) == 2 * int(ended["attention_mask"].sum())  # read after both codes


# --- captured steps ---


def make_steps(model: torch.nn.Linear) -> RepeatedSteps:
    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(batch["input_ids"].double()).square().sum()
        loss.backward()
        return loss.detach()

    return RepeatedSteps(step, model.parameters(), torch.device("cpu"))


def test_captured_gradients_add_up_over_micro_batches(repeated: None) -> None:
    model = torch.nn.Linear(3, 1).double()
    steps = make_steps(model)
    random = torch.Generator().manual_seed(0)
    for number in range(12):  # optimizer steps of one, two or three micro-batches in two shapes
        model.zero_grad()
        batches = [torch.randint(9, (1 + (number + n) % 2, 3), generator=random) for n in range(1 + number % 3)]
        losses = [steps.run({"input_ids": batch}) for batch in batches]
        gradient = model.weight.grad.clone()  # pyright: ignore[reportOptionalMemberAccess]
        expected = [model(batch.double()).square().sum() for batch in batches]
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach())
        torch.testing.assert_close(torch.autograd.grad(sum(expected), model.weight)[0], gradient)  # pyright: ignore
    assert RepeatedSteps.replays > 12


def test_a_parameter_without_a_gradient_keeps_none(repeated: None) -> None:
    model = torch.nn.Linear(3, 1).double()
    steps = make_steps(model)
    steps.parameters.append(unused := torch.nn.Parameter(torch.ones(2)))
    for _ in range(4):
        model.zero_grad()
        steps.run({"input_ids": torch.ones(1, 3)})
        assert unused.grad is None


def test_large_batches_are_not_captured(repeated: None) -> None:
    steps = make_steps(torch.nn.Linear(MOST_TOKENS + 1, 1).double())
    for _ in range(4):
        steps.run({"input_ids": torch.ones(1, MOST_TOKENS + 1)})
    assert RepeatedSteps.replays == 0


def test_steps_are_not_captured_where_memory_is_short(repeated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatedSteps, "_has_room", lambda self: False)
    model = torch.nn.Linear(3, 1).double()
    steps, batch = make_steps(model), torch.ones(2, 3)
    for _ in range(4):
        model.zero_grad()
        steps.run({"input_ids": batch})
        expected = model(batch.double()).square().sum()
        torch.testing.assert_close(torch.autograd.grad(expected, model.weight)[0], model.weight.grad)
    assert RepeatedSteps.replays == 0


@pytest.mark.parametrize("fails", ["waiting", "capturing"])
def test_a_step_that_cannot_be_captured_is_computed(
    fails: str, repeated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def waiting() -> Iterator[list[str]]:
        yield ["model.py:7"]

    def refuse(self: Any, inputs: Any) -> Any:
        raise RuntimeError("no graph")

    if fails == "waiting":
        monkeypatch.setattr(capture, "notice_waiting", waiting)
    else:
        monkeypatch.setattr(RepeatedSteps, "_capture", refuse)
    model = torch.nn.Linear(3, 1).double()
    steps = make_steps(model)
    batch = torch.ones(2, 3)

    def run_six() -> None:
        for _ in range(6):
            model.zero_grad()
            loss = steps.run({"input_ids": batch})
            expected = model(batch.double()).square().sum()
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(torch.autograd.grad(expected, model.weight)[0], model.weight.grad)

    with pytest.warns(UserWarning, match="cannot be captured as CUDA graphs.*(model.py:7|no graph)") as caught:
        run_six()
    assert len(caught) == 1
    assert not steps.on


def test_a_packed_batch_holds_every_shape_and_type() -> None:
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "weights": torch.rand(3),
        "none": torch.empty(2, 0, dtype=torch.float64),
        "labels": torch.rand(2, 1, dtype=torch.float64),
        "epoch": torch.tensor(3),
    }
    packed = PackedBatch(batch, torch.device("cpu"))
    first = packed.fill(batch)
    torch.testing.assert_close(first, batch)
    other = {name: values + 1 for name, values in batch.items()}
    assert packed.fill(other) is first
    torch.testing.assert_close(first, other)


@pytest.mark.parametrize(
    ("setting", "captures"),
    [
        ({}, True),
        ({"fp16": True}, False),
        ({"gradient_checkpointing": True}, False),
        ({"world_size": 2}, False),
        ({"n_gpu": 2}, False),
        ({"torch_compile": True}, False),
        ({"device": torch.device("cpu")}, False),
    ],
)
def test_steps_are_captured_on_one_gpu(setting: dict[str, Any], captures: bool) -> None:
    usual = {"device": torch.device("cuda"), "world_size": 1, "n_gpu": 1, "fp16": False, "torch_compile": False}
    usual |= {"gradient_checkpointing": False, "torch_empty_cache_steps": None, "optim": "adamw_torch_fused"}
    arguments = object.__new__(type("Arguments", (TrainingArguments,), usual | setting))
    assert can_capture(arguments) == captures


# --- whole runs ---


@pytest.fixture
def settings(settings: RewardTrainingConfig, tmp_path: Path) -> RewardTrainingConfig:
    file = tmp_path / "reviews.csv"
    pandas.DataFrame(make_reviews(100), columns=["text", "praise"]).to_csv(file, index=False)
    return changed(
        settings,
        data=[str(file)],
        epochs=4,
        batch_size=24,  # and a last batch of 4
        adam_epsilon=1e-5,  # gradients that are rounding errors must not become whole steps
        precision="float32",
    )


def assert_same_run(one: str | Path, other: str | Path) -> None:
    """Both have the losses and the weights of the other, up to rounding."""
    assert losses(one) == pytest.approx(losses(other), abs=1e-5)
    first, second = weights(one), weights(other)
    for name, values in first.items():
        torch.testing.assert_close(values, second[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 7}, {"lora_rank": 2}, {"kind": "v", "eval_share": 0.2}])
@pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat")
def test_a_run_of_captured_steps_is_the_same_run(
    options: dict[str, Any], settings: RewardTrainingConfig, repeated: None
) -> None:
    plain = changed(settings, **options, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    assert RepeatedSteps.replays == 0
    train(changed(settings, **options))
    assert RepeatedSteps.replays >= 10
    assert_same_run(settings.out, plain.out)


def test_a_captured_run_that_is_resumed_is_the_same_run(settings: RewardTrainingConfig, repeated: None) -> None:
    plain = changed(settings, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    train(changed(settings, save_steps=7))
    (Path(settings.out) / "model.safetensors").unlink()
    for late in Path(settings.out).glob("checkpoint-2*"):
        late.rename(late.with_name(f"gone-{late.name}"))
    train(changed(settings, save_steps=7), resume=True)
    assert_same_run(settings.out, plain.out)


@pytest.mark.parametrize("method", ["dexperts", "gedi"])
def test_captured_experts_are_the_same(method: Any, settings: RewardTrainingConfig, repeated: None) -> None:
    names = (
        "data",
        "labels",
        "backbone",
        "cache",
        "epochs",
        "batch_size",
        "learning_rate",
        "adam_epsilon",
        "log_steps",
    )
    shared = {name: getattr(settings, name) for name in names}
    options = {"method": method, "code_high": "good", "code_low": "bad", **shared}
    plain = ExpertTrainingConfig(**options, capture_steps=False, out=settings.out + "-plain")
    train_experts(plain)
    train_experts(ExpertTrainingConfig(**options, out=settings.out))
    assert RepeatedSteps.replays > 0
    part = "expert" if method == "dexperts" else ""
    assert_same_run(Path(settings.out) / part, Path(plain.out) / part)


# --- on a GPU ---


@on_gpu
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_size": 7}, {"lora_rank": 2}, {"kind": "v", "eval_share": 0.2}, {"head": "mlp"}]
)
@pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat")
def test_a_gpu_trains_the_same_with_graphs(options: dict[str, Any], settings: RewardTrainingConfig) -> None:
    plain = changed(settings, **options, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    train(changed(settings, **options))  # a warning, which would be an error here, says if nothing is captured
    assert_same_run(settings.out, plain.out)


@on_gpu
def test_a_gpu_distils_the_same_with_graphs(settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path) -> None:
    RadV.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(tmp_path / "teacher")
    distilled = changed(settings, teacher=str(tmp_path / "teacher"))
    plain = changed(distilled, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    train(distilled)
    assert_same_run(settings.out, plain.out)


def with_candidates(settings: RewardTrainingConfig, calm_toy: Path, folder: Path) -> RewardTrainingConfig:
    RadV.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(folder)
    small = {"num_prefixes": 12, "prefix_tokens": 6, "prefix_positions": 2, "candidates": 5, "rounds": 2}
    return changed(settings, teacher=str(folder), base=str(calm_toy), candidate_share=0.4, **small)


@pytest.mark.filterwarnings("ignore:on the held-out texts")
def test_captured_steps_compare_candidates_as_others_do(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path, repeated: None
) -> None:
    distilled = with_candidates(settings, calm_toy, tmp_path / "teacher")
    plain = changed(distilled, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    assert not RepeatedSteps.replays
    train(distilled)
    assert RepeatedSteps.replays > 10
    assert_same_run(settings.out, plain.out)


@on_gpu
@pytest.mark.filterwarnings("ignore:on the held-out texts")
def test_a_gpu_compares_candidates_the_same_with_graphs(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    distilled = with_candidates(settings, calm_toy, tmp_path / "teacher")
    plain = changed(distilled, capture_steps=False, out=settings.out + "-plain")
    train(plain)
    train(distilled)
    assert_same_run(settings.out, plain.out)


@on_gpu
def test_a_gpu_goes_on_from_a_checkpoint_with_graphs(settings: RewardTrainingConfig) -> None:
    test_a_captured_run_that_is_resumed_is_the_same_run(settings, None)


@on_gpu
def test_steps_on_a_gpu_are_replayed(settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), replay(self))[1])
    train(settings)
    assert len(replays) >= 10  # of 20 steps in two or three shapes


@on_gpu
def test_a_gpu_draws_new_dropout_in_every_replay(settings: RewardTrainingConfig, toy: Path) -> None:
    train(changed(settings, backbone=str(toy), learning_rate=0.0, batch_size=100, epochs=6, reg_weight=0.0))
    found = sorted(losses(settings.out))  # of the same rows and weights, with other dropout
    assert len(found) == 6
    assert len(set(found)) == 6


def let_forwards_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every forward of RAD-Q ask the device for a number."""
    forward = RadQ.forward

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.rewards.sum().item()
        return output

    monkeypatch.setattr(RadQ, "forward", wait)


@on_gpu
def test_a_gpu_goes_on_without_graphs_after_a_step_that_waits(
    settings: RewardTrainingConfig, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_forwards_wait(monkeypatch)
    with pytest.warns(UserWarning, match="it waits for the GPU in .*test_capture.py"):
        train(changed(settings, backbone=str(toy)))
    assert len(losses(settings.out)) == 20


@on_gpu
def test_a_gpu_goes_on_without_graphs_after_a_failed_capture(
    settings: RewardTrainingConfig, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "notice_waiting", never_waiting)
    let_forwards_wait(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be captured as CUDA graphs"):
        train(changed(settings, backbone=str(toy)))
    assert len(losses(settings.out)) == 20
