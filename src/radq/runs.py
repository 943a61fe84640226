"""A training run: from settings to a folder with a reward model, metrics and checkpoints.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

On several processes each runs this; the first one writes.
"""

import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data import DataColumns, RewardData, load_data
from radq.errors import DataError, ModelError, OptionError, VocabularyError
from radq.models import RadQ, RadV, RewardModel
from radq.settings import RewardTrainingConfig, TrainingConfig
from radq.training import RewardTrainer, find_checkpoints


def train(
    config: RewardTrainingConfig, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> dict[str, float]:
    """Train or distil as the configuration says; returns the final metrics. The run folder is then a reward model."""
    config.check()
    out = Path(config.out)
    processes = PartialState()  # of a launch of several; alone, the only one
    checkpoint = open_run(out, resume, overwrite)
    processes.wait_for_everyone()  # all have looked before one writes
    teacher = None if not config.teacher else RadV.from_pretrained(config.teacher)
    torch.manual_seed(config.seed)
    model = _make_model(config, teacher)
    with processes.main_process_first():  # the others find the data tokenised
        data, eval_data = _load(config, model, progress and processes.is_main_process)
    if processes.is_main_process:
        begin_run(out, config, fresh=checkpoint is None)
    trainer = RewardTrainer(model, config, data, eval_data, teacher, progress)
    if teacher is not None and config.cache_targets:
        for part in (data, eval_data):
            if part is not None:
                part.targets = _cache_targets(part, teacher, config, trainer, progress)
    result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    metrics = dict(result.metrics) | (trainer.evaluate() if eval_data is not None else {})
    if trainer.is_fsdp_enabled:
        trainer.save_model(str(out))  # gathers the shards
    elif trainer.is_world_process_zero():
        model.save_pretrained(out)
    return metrics


def open_run(out: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; refuses to write over a run by accident."""
    if not (out / "config.yaml").exists():
        return None
    if resume:
        checkpoints = find_checkpoints(out)
        return checkpoints[-1] if checkpoints else None
    if not overwrite:
        raise OptionError(f"{str(out)!r} holds a run already.", "go on with --resume, or start anew with --overwrite.")
    return None


def begin_run(out: Path, config: TrainingConfig, fresh: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if fresh:
        forget_run(out)
    (out / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))


def forget_run(out: Path) -> None:
    """Without what an earlier run has left for one to go on from."""
    for checkpoint in find_checkpoints(out):
        shutil.rmtree(checkpoint)
    (out / "metrics.jsonl").unlink(missing_ok=True)


def _make_model(config: RewardTrainingConfig, teacher: Any) -> RewardModel:
    if config.init:
        model = RewardModel.from_pretrained(config.init)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(f"{config.init!r} is a {type(model).__name__}.", f"kind is {config.kind!r}; set --kind.")
        wanted = config.attributes or model.config.attributes
    elif teacher is not None and not config.backbone:
        model = RadQ.from_teacher(teacher, config.head)
        wanted = config.attributes or model.config.attributes
    else:
        wanted = config.attributes or (teacher.config.attributes if teacher is not None else [])
        if config.kind == "q":
            model = RadQ.from_backbone(config.backbone, wanted, config.head, config.num_layers)
        else:
            model = RadV.from_backbone(config.backbone, wanted, config.num_layers)
    model.config.loss = "mse" if config.teacher else config.loss  # also of a model that was trained otherwise before
    if model.tokenizer is None:
        source = config.backbone or config.init or config.teacher
        raise ModelError(f"{source!r} has no tokenizer.", "put its files into the folder.")
    if list(wanted) != list(model.config.attributes):
        raise OptionError(
            f"labels are {', '.join(wanted)}.",
            f"{config.init or config.teacher!r} has {', '.join(model.config.attributes)}.",
        )
    if teacher is not None:
        _check_teacher(teacher, model, config)
        model.config.response_range = teacher.config.response_range
    if config.lora_rank:
        model.add_lora(config.lora_rank, config.backbone)
    return model


def _check_teacher(teacher: RewardModel, student: RewardModel, config: RewardTrainingConfig) -> None:
    if teacher.config.attributes != student.config.attributes:
        raise OptionError(
            f"the teacher's attributes are {', '.join(teacher.config.attributes)}, "
            f"the student's {', '.join(student.config.attributes)}.",
            "leave --labels out, or name the teacher's.",
        )
    if teacher.vocabulary != student.vocabulary:
        raise VocabularyError(
            f"the vocabulary of the teacher {config.teacher!r} is not that of {config.backbone or config.init!r}.",
            "student and teacher need one tokenizer.",
        )


def _load(config: RewardTrainingConfig, model: RewardModel, progress: bool) -> tuple[RewardData, RewardData | None]:
    assert model.tokenizer is not None
    data, eval_data = load_parts(config, model.tokenizer, model.max_tokens, progress)
    _check_labels(config, data)
    if not config.teacher:
        model.config.response_range = data.attribute_ranges
    return data, eval_data


def load_parts(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, progress: bool
) -> tuple[RewardData, RewardData | None]:
    """What to train on and what to evaluate on."""
    max_length = min(config.max_length, max_tokens or config.max_length)
    columns = DataColumns(
        config.text, config.attributes, config.prompt, config.weight, config.label_range, config.skip_empty
    )

    def load(sources: list[str]) -> RewardData:
        return load_data(sources, tokenizer, columns, max_length, config.cache, progress)

    data = load(config.data)
    if progress:
        counts = data.counts
        print(f"{counts.rows} rows, {counts.tokens} tokens; {counts.truncated} cut off, {counts.empty} empty left out")
    if config.eval_data:
        return data, load(config.eval_data)
    if config.eval_share:
        return data.split(config.eval_share, config.seed)
    return data, None


def _check_labels(config: RewardTrainingConfig, data: RewardData) -> None:
    for attribute, low, high in zip(config.attributes, data.counts.label_low, data.counts.label_high, strict=True):
        if low == high:
            warnings.warn(f"label {attribute!r} is {low:g} in every row: there is nothing to learn.", stacklevel=2)
        if config.loss == "ce" and not (low >= 0 and high <= 1):
            raise DataError(
                f"label {attribute!r} runs from {low:g} to {high:g}.",
                "cross-entropy needs responses in [0, 1]; map them with --label-range, or use --loss mse.",
            )


@torch.no_grad()
def _cache_targets(
    data: RewardData, teacher: RewardModel, config: RewardTrainingConfig, trainer: RewardTrainer, progress: bool
) -> np.ndarray:
    """The teacher's rewards of all tokens, (tokens, a), computed once and mapped from the run folder."""
    file = Path(config.out) / "targets" / f"{data.folder.name}-{len(data)}.npy"
    with trainer.args.main_process_first():
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(".tmp")
            shape = (len(data.tokens), len(teacher.config.attributes))
            targets = np.lib.format.open_memmap(temporary, "w+", np.float32, shape)
            order = np.argsort(data.lengths, kind="stable")
            chunks = np.array_split(order, -(-len(order) // config.batch_size))
            for chunk in tqdm(chunks, desc="teacher", disable=not progress):
                batch = data.batch(chunk.tolist())
                mask = batch["attention_mask"]
                rewards = teacher.token_rewards(batch["input_ids"].to(teacher.device), mask.to(teacher.device)).cpu()
                starts = data.offsets[batch["rows"].numpy()]
                where = (starts[:, None] + np.arange(mask.shape[1]))[mask.bool().numpy()]
                targets[where] = rewards[mask.bool()].numpy()
            targets.flush()
            temporary.replace(file)
    return np.load(file, mmap_mode="r")
