"""Hidden states on disk: training from them is training without them, and they are never those of something else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_data import make_data
from training_runs import changed, losses, weights

from radq.cli import main
from radq.data.dataset import RewardData
from radq.errors import OptionError, WriteError
from radq.files import fingerprint_tensors
from radq.models.kinds import RadQ, RadV
from radq.models.readout import Readout
from radq.models.reward import RewardModel
from radq.training import token_cache as states_module
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train
from radq.training.token_cache import TokenCache, prepare_states

TEXTS = [[5, 6, 7], [8], [0, 9, 10, 11, 12], [13, 14], [6, 5, 6, 5, 6, 5, 6]]


@pytest.fixture
def settings(settings: RewardTrainingConfig) -> RewardTrainingConfig:
    return changed(settings, reads="base", readout_layers=2, readout_width=24, learning_rate=3e-3, eval_share=0.2)


@pytest.fixture
def base_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of texts, one for each time that a base model is run over texts."""
    found: list[int] = []
    read_base = Readout.read_base

    def count(self: Readout, backbone: Any, input_ids: torch.Tensor) -> torch.Tensor:
        found.append(len(input_ids))
        return read_base(self, backbone, input_ids)

    monkeypatch.setattr(Readout, "read_base", count)
    return found


def make_model(
    toy: Path, dtype: torch.dtype = torch.float32, prepend_bos: bool = False, kind: Any = RadQ, **options: Any
) -> RewardModel:
    model = kind.from_base(toy, ["praise"], dtype=dtype, **options)
    model.readout.float()  # pyright: ignore[reportOptionalMemberAccess]
    model.config.prepend_bos, model.config.bos_token_id = prepend_bos, 0
    return model


def make_cache(model: RewardModel, data: RewardData, folder: Path) -> TokenCache:
    base = fingerprint_tensors(sorted(model.backbone.named_parameters()))
    (cache,) = prepare_states(model, [data], str(folder), base, "float32")
    return cache


@pytest.fixture
def data(tmp_path: Path) -> RewardData:
    return make_data(tmp_path / "data", TEXTS, [0, 1, 0, 1, 0])


# --- equality ---


@pytest.mark.parametrize("prepend_bos", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_states_give_the_same_rewards(
    prepend_bos: bool, dtype: torch.dtype, data: RewardData, calm_toy: Path, tmp_path: Path
) -> None:
    model = make_model(calm_toy, dtype, prepend_bos)
    texts = [4, 2, 0]
    batch = data.batch(texts)
    read = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**read, random_tokens=batch["input_ids"].flip(0))
    make_cache(model, data, tmp_path / "states").make()
    states = data.batch(texts)["states"]
    assert states.dtype == torch.float32
    found = model(**read, random_tokens=batch["input_ids"].flip(0), states=states)
    is_token = batch["attention_mask"].bool()
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found.rewards[is_token], expected.rewards[is_token], **tolerance)
    torch.testing.assert_close(found.marginals[is_token], expected.marginals[is_token], **tolerance)
    assert not torch.allclose(model(**read, states=states.flip(0)).rewards[is_token], expected.rewards[is_token])


@pytest.mark.parametrize("prepend_bos", [False, True])
def test_stored_states_give_the_same_values(
    prepend_bos: bool, data: RewardData, calm_toy: Path, tmp_path: Path
) -> None:
    """RAD-V scores a token from its own state. Without a BOS, these are the states that RAD-Q stores."""
    model = make_model(calm_toy, prepend_bos=prepend_bos, kind=RadV)
    batch = data.batch([4, 2, 0])
    read = {name: batch[name] for name in ("input_ids", "attention_mask")}
    cache = make_cache(model, data, tmp_path / "states")
    cache.make()
    states, is_token = data.batch([4, 2, 0])["states"], batch["attention_mask"].bool()
    found, expected = model(**read, states=states).rewards, model(**read).rewards
    torch.testing.assert_close(found[is_token], expected[is_token], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(**read, states=states.flip(0)).rewards[is_token], expected[is_token])
    other = make_cache(make_model(calm_toy, prepend_bos=prepend_bos), data, tmp_path / "states")
    assert (other.folder == cache.folder) is not prepend_bos


@pytest.mark.parametrize(
    "kind", ["labels", "values", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("teacher", "pairs"))]
)
def test_training_from_stored_states_is_training_without_them(
    kind: str, settings: RewardTrainingConfig, base_reads: list[int], tmp_path: Path
) -> None:
    settings = changed(settings, max_steps=6, epochs=3, **prepare(kind, settings, tmp_path))
    without = train(settings)
    base_reads.clear()
    stored = train(changed(settings, out=str(tmp_path / "stored"), cache_states=True))
    np.testing.assert_allclose(losses(tmp_path / "stored"), losses(settings.out), rtol=1e-4)
    one, other = weights(settings.out), weights(tmp_path / "stored")
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-5)
    assert stored["eval_loss"] == pytest.approx(without["eval_loss"], rel=1e-4)
    assert stored["state_tokens_per_second"] > 0
    base_reads.clear()
    train(changed(settings, out=str(tmp_path / "again"), cache_states=True))
    assert losses(tmp_path / "again") == losses(tmp_path / "stored")
    assert {*base_reads} == {1}  # a text of one token tells the data type


def prepare(kind: str, settings: RewardTrainingConfig, folder: Path) -> dict[str, Any]:
    if kind == "pairs":
        (folder / "pairs.csv").write_text(
            "".join(["good,bad\n", *(f"a good film {n},a bad film\n" for n in range(40))])
        )
        return {"data": [str(folder / "pairs.csv")], "pairs": "good,bad", "labels": "praise"}
    if kind == "teacher":
        plain: dict[str, Any] = {"reads": "itself", "readout_layers": None, "readout_width": None}
        train(changed(settings, kind="v", out=str(folder / "v"), max_steps=3, **plain))
        return {"teacher": str(folder / "v"), "cache_targets": True}
    return {"kind": "v"} if kind == "values" else {}


# --- interruptions ---


def test_an_interrupted_run_keeps_finished_pieces(
    data: RewardData, calm_toy: Path, tmp_path: Path, base_reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "STATE_PIECE", 1000)
    cache = make_cache(make_model(calm_toy), data, tmp_path / "states")
    assert cache.missing_bytes == sum(map(len, TEXTS)) * cache.token_bytes
    interrupt_in(2, cache, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        cache.make()
    kept = sorted(path.name for path in cache.folder.iterdir())
    assert kept == ["00000.bin"]  # nothing of the second piece
    assert not data.stored
    base_reads.clear()
    again = make_cache(make_model(calm_toy), data, tmp_path / "states")
    assert 0 < again.missing_bytes < cache.num_tokens * cache.token_bytes
    again.make()
    assert sum(base_reads) < len(TEXTS) + 1  # the first piece is not computed a second time; one token is an example
    whole = make_cache(make_model(calm_toy), data, tmp_path / "whole")
    whole.make()
    assert len(list(whole.folder.iterdir())) > 2
    assert np.array_equal(again.read(np.arange(5)), whole.read(np.arange(5)))


def interrupt_in(piece: int, cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., np.ndarray] = cache._compute_piece
    calls: list[int] = []

    def stop(*arguments: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == piece:
            raise KeyboardInterrupt
        return read(*arguments)

    monkeypatch.setattr(cache, "_compute_piece", stop)


def test_a_piece_of_the_wrong_size_is_made_again(data: RewardData, calm_toy: Path, tmp_path: Path) -> None:
    cache = make_cache(make_model(calm_toy), data, tmp_path / "states")
    cache.make()
    (file,) = cache.folder.iterdir()
    before = file.read_bytes()
    file.write_bytes(before[:-8])
    assert cache.missing_bytes == len(before)
    cache.make()
    assert file.read_bytes() == before


def test_states_belong_to_weights_layers_type_and_tokens(data: RewardData, calm_toy: Path, tmp_path: Path) -> None:
    models = [make_model(calm_toy) for _ in range(2)]
    next(models[1].backbone.parameters()).data[3, 0] += 1e-3
    models += [make_model(calm_toy, num_layers=1), make_model(calm_toy, torch.bfloat16)]
    models += [make_model(calm_toy, prepend_bos=True)]
    others = make_data(tmp_path / "others", [[5, 6, 8], *TEXTS[1:]], [0, 1, 0, 1, 0])
    folders = [make_cache(model, data, tmp_path).folder for model in models]
    assert len({*folders, make_cache(models[0], others, tmp_path).folder}) == 6
    relabelled = make_data(tmp_path / "relabelled", TEXTS, [1, 1, 0, 0, 1])
    assert make_cache(models[0], relabelled, tmp_path).folder == folders[0]


def test_parts_of_one_data_set_share_their_states(data: RewardData, calm_toy: Path, tmp_path: Path) -> None:
    parts = [*data.split(0.4, seed=0)]
    cache, other = prepare_states(make_model(calm_toy), parts, str(tmp_path), "base", "float32")
    cache.make()
    assert other.folder == cache.folder
    assert other.missing_bytes == 0
    for part in parts:
        states = part.batch([0])["states"]
        assert torch.equal(states[0], torch.from_numpy(cache.read(part.rows[:1])[0]))


# --- the disk ---


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    with pytest.raises(WriteError, match=r"the hidden states need .* KiB in .*, and 1000 bytes are free") as caught:
        train(changed(settings, cache_states=True))
    assert "--cache" in str(caught.value.hint)
    assert not Path(settings.out).exists()
    assert not (tmp_path / "cache" / "states").exists()


def test_only_readouts_have_states(settings: RewardTrainingConfig) -> None:
    with pytest.raises(OptionError, match="cache_states is for readouts"):
        train(changed(settings, reads="itself", readout_layers=None, readout_width=None, cache_states=True))


def test_the_command_says_how_much_room_states_take(
    settings: RewardTrainingConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [part for name in ("labels", "backbone", "out", "cache") for part in (f"--{name}", getattr(settings, name))]
    argv += ["--data", *settings.data, "--reads", "base", "--max-steps", "2", "--cache-states"]
    assert main(["train", *argv]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("hidden states:")]
    tokens, layers, width, itemsize = (int(word) for word in line.split("=")[0].split() if word.isdigit())
    stored = sum(file.stat().st_size for file in (Path(settings.cache or "") / "states").rglob("*.bin"))
    assert stored == tokens * layers * width * itemsize
    assert "of which 0 bytes are there" in line
