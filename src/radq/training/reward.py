"""A training run of a reward model: from settings to a folder with the model, metrics and checkpoints.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

If several processes are launched, each of them calls `train`, and the first one writes.
"""

import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState

from radq.data.dataset import RewardData
from radq.data.label_scale import LabelRules
from radq.errors import ModelError, OptionError
from radq.files import explained_writing, fingerprint_tensors
from radq.models.config import simplify_ranges
from radq.models.reward import RadQ, RadV, RewardModel
from radq.training.checks import check_run
from radq.training.config import RewardTrainingConfig
from radq.training.data import check_labels, load_run_data, scales_of_model
from radq.training.reward_trainer import RewardTrainer
from radq.training.run_folder import begin_run, check_resumed, find_resumed_checkpoint, read_scales
from radq.training.teacher import cache_targets, check_teacher, fingerprint_teacher, target_shape


def train(
    config: RewardTrainingConfig, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> dict[str, float]:
    """Train or distil a reward model into the folder `config.out`, and return the final metrics.

    Args:
        resume: go on from the last checkpoint of the run in that folder.
        overwrite: delete the run in that folder and start again.
        progress: print what happens.
    """
    check_run(config, resume, overwrite)
    out = Path(config.out)
    processes = PartialState()
    processes.wait_for_everyone()  # all have looked before one writes
    teacher = RadV.from_pretrained(config.teacher) if config.teacher else None
    torch.manual_seed(config.seed)
    model = _make_model(config, teacher)
    with processes.main_process_first():  # the others find the data tokenised
        data, eval_data = _load_data(config, model, resume, progress and processes.is_main_process)
    contents = _fingerprint_contents(data, eval_data, model, teacher)
    if resume:
        check_resumed(out, config, contents)
    checkpoint = find_resumed_checkpoint(out, resume)
    trainer = RewardTrainer(model, config, data, eval_data, teacher, progress)
    if processes.is_main_process:
        begin_run(out, config, contents, data.scales, resume)
    if teacher is not None and config.cache_targets:
        for part in (data, eval_data):
            if part is not None:
                part.targets = _map_targets(part, teacher, contents["teacher"], trainer, progress)
    metrics = trainer.train_and_evaluate(checkpoint)
    _save_model(model, trainer, out)
    if trainer.is_world_process_zero():
        _compare_with_constants(metrics)
    return metrics


# --- the model ---


def _make_model(config: RewardTrainingConfig, teacher: RewardModel | None) -> RewardModel:
    """The reward model with which training starts."""
    model = _start_model(config, teacher)
    model.config.loss = "mse" if config.teacher else config.loss  # also of a model that was trained otherwise before
    if model.tokenizer is None:
        source = config.backbone or config.init or config.teacher
        raise ModelError(f"{source!r} has no tokenizer.", "put the files of its tokenizer into the folder.")
    if config.attributes and config.attributes != model.config.attributes:
        raise OptionError(
            f"labels must be the attributes of {config.init or config.teacher!r}, "
            f"{', '.join(model.config.attributes)}, got {', '.join(config.attributes)}.",
            "name these columns, in this order.",
        )
    if teacher is not None:
        check_teacher(teacher, model, config.teacher, config.backbone or config.init)
        model.config.response_range = teacher.config.response_range
        model.config.label_scales = teacher.config.label_scales
    if config.lora_rank:
        _check_rank(config.lora_rank, model)
        model.add_lora(config.lora_rank, config.backbone)
    return model


def _start_model(config: RewardTrainingConfig, teacher: RewardModel | None) -> RewardModel:
    """A trained reward model, a copy of the teacher with a new head, or a new head over a language model."""
    if config.init:
        model = RewardModel.from_pretrained(config.init, dtype=torch.float32)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(
                f"kind is {config.kind!r}, but {config.init!r} is a {type(model).__name__}.", "change --kind or --init."
            )
        return model
    if isinstance(teacher, RadV) and not config.backbone:
        return RadQ.from_teacher(teacher, config.head).float()
    attributes = config.attributes or (teacher.config.attributes if teacher is not None else [])
    dtype = getattr(torch, config.backbone_dtype)
    if config.kind == "q":
        model = RadQ.from_backbone(config.backbone, attributes, config.head, config.num_layers, dtype)
    else:
        model = RadV.from_backbone(config.backbone, attributes, config.num_layers, dtype)
    model.head.float()
    return model


def _check_rank(rank: int, model: RewardModel) -> None:
    width = model.config.backbone.hidden_size  # pyright: ignore[reportOptionalMemberAccess]
    if rank > width:
        raise OptionError(
            f"lora_rank must be at most {width}, the width of the backbone's layers, got {rank}.", "lower --lora-rank."
        )


def _save_model(model: RewardModel, trainer: RewardTrainer, out: Path) -> None:
    with explained_writing(out):
        if trainer.is_fsdp_enabled:
            trainer.save_model(str(out))  # gathers the shards
        elif trainer.is_world_process_zero():
            model.save_pretrained(out)


# --- the data ---


def _load_data(
    config: RewardTrainingConfig, model: RewardModel, resume: bool, progress: bool
) -> tuple[RewardData, RewardData | None]:
    assert model.tokenizer is not None
    scales = read_scales(Path(config.out), config) if resume else None
    if scales is None and config.teacher and config.attributes and config.label_rules == LabelRules():
        scales = scales_of_model(model.config, config.teacher)  # labels are compared with the teacher's rewards
    data, eval_data = load_run_data(config, model.tokenizer, model.max_tokens, progress, scales)
    check_labels(data, config.attributes, config.loss)
    if not config.teacher:
        model.config.response_range = simplify_ranges(data.label_ranges, len(data.label_ranges))
        model.config.label_scales = [asdict(scale) for scale in data.scales]
    return data, eval_data


def _fingerprint_contents(
    data: RewardData, eval_data: RewardData | None, model: RewardModel, teacher: RewardModel | None
) -> dict[str, str]:
    """Fingerprints of the data, teacher and frozen weights of a run; trained weights are in its checkpoints."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    contents = {"data": data.fingerprint, "backbone": fingerprint_tensors(sorted(frozen.items()))}
    if eval_data is not None:
        contents["eval_data"] = eval_data.fingerprint
    if teacher is not None:
        contents["teacher"] = fingerprint_teacher(teacher)
    return contents


def _map_targets(
    data: RewardData, teacher: RewardModel, fingerprint: str, trainer: RewardTrainer, progress: bool
) -> np.ndarray:
    """The teacher's rewards of all tokens of these rows, (tokens, a), as a memory-mapped file of the run folder."""
    folder = Path(trainer.config.out) / "targets"
    with trainer.args.main_process_first():
        file = cache_targets(folder, data, teacher, fingerprint, trainer.config.batch_size, progress)
    return np.memmap(file, np.float32, "r", shape=target_shape(data, teacher))


def _compare_with_constants(metrics: dict[str, float]) -> None:
    """Warn if the model is no better than a constant: the mean of the labels or of the teacher's rewards."""
    worse = []
    for name, error in metrics.items():
        own = metrics.get(name.replace("eval_constant_", "eval_"))
        if name.startswith("eval_constant_") and own is not None and own >= error:
            worse.append(f"{name.removeprefix('eval_constant_')} is {own:.4g}, that of a constant {error:.4g}")
    if worse:
        warnings.warn(f"on the evaluation data the model does not beat a constant: {'; '.join(worse)}.", stacklevel=2)
