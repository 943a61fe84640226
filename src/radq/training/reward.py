"""A training run: from settings to a folder with a reward model, metrics and checkpoints.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

On several processes each runs this; the first one writes.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import DataColumns, RewardData, load_data
from radq.errors import DataError, ModelError, OptionError, RadqError, VocabularyError
from radq.files import explained_writing, fingerprint_tensors, fingerprint_values, whole_file
from radq.models.reward import RadQ, RadV, RewardModel, simplify_ranges
from radq.numerics import without_emulation_notice
from radq.training.config import RewardTrainingConfig, TrainingConfig
from radq.training.reward_trainer import RewardTrainer
from radq.training.run_folder import begin_run, check_resumed, find_resumed_checkpoint, open_run
from radq.training.trainer import BatchTrainer


def train(
    config: RewardTrainingConfig, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> dict[str, float]:
    """Train or distil as the configuration says; returns the final metrics. The run folder is then a reward model."""
    config.check()
    out = Path(config.out)
    processes = PartialState()  # of a launch of several; alone, the only one
    open_run(out, resume, overwrite)
    processes.wait_for_everyone()  # all have looked before one writes
    teacher = None if not config.teacher else RadV.from_pretrained(config.teacher)
    torch.manual_seed(config.seed)
    model = _make_model(config, teacher)
    with processes.main_process_first():  # the others find the data tokenised
        data, eval_data = _load(config, model, progress and processes.is_main_process)
    contents = _identify_contents(data, eval_data, model, teacher)
    if resume:
        check_resumed(out, config, contents)
    checkpoint = find_resumed_checkpoint(out, resume)
    trainer = RewardTrainer(model, config, data, eval_data, teacher, progress)
    if processes.is_main_process:
        begin_run(out, config, contents, resume)
    if teacher is not None and config.cache_targets:
        for part in (data, eval_data):
            if part is not None:
                part.targets = _cache_targets(part, teacher, contents["teacher"], config, trainer, progress)
    metrics = run_trainer(trainer, checkpoint)
    with explained_writing(out):
        if trainer.is_fsdp_enabled:
            trainer.save_model(str(out))  # gathers the shards
        elif trainer.is_world_process_zero():
            model.save_pretrained(out)
    if trainer.is_world_process_zero():
        _compare_with_constants(metrics)
    return metrics


def run_trainer(trainer: BatchTrainer, checkpoint: Path | None) -> dict[str, float]:
    """Train, from a checkpoint if there is one, and evaluate what training ends with."""
    with without_emulation_notice():
        try:
            result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            metrics = dict(result.metrics) | (trainer.evaluate() if trainer.eval_dataset is not None else {})
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            if isinstance(error, RadqError) or not trainer.settings.trainer:
                raise
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            raise OptionError(
                f"the Trainer failed with settings of `trainer:`: {reason}", f"they are {trainer.settings.trainer}."
            ) from error
    if trainer.settings.chooses_best and trainer.state.best_global_step:
        metrics["best_step"] = trainer.state.best_global_step
    return metrics


def _identify_contents(
    data: RewardData, eval_data: RewardData | None, model: RewardModel, teacher: RewardModel | None
) -> dict[str, str]:
    """Fingerprints of what a run depends on, beside its settings. Weights that are trained lie in its checkpoints."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    contents = {"data": data.fingerprint, "backbone": fingerprint_tensors(sorted(frozen.items()))}
    if eval_data is not None:
        contents["eval_data"] = eval_data.fingerprint
    if teacher is not None:
        contents["teacher"] = _identify_teacher(teacher)
    return contents


def _identify_teacher(teacher: RewardModel) -> str:
    """A fingerprint of all that the teacher's rewards depend on; its folder may be another one."""
    settings = [teacher.config.attributes, teacher.config.loss, teacher.config.prepend_bos, teacher.config.bos_token_id]
    backbone: Any = teacher.config.backbone
    elsewhere = ("_name_or_path", "transformers_version", "dtype")
    shape = {name: value for name, value in backbone.to_dict().items() if name not in elsewhere}
    return fingerprint_values(settings, shape, fingerprint_tensors(sorted(teacher.state_dict().items())))


def _compare_with_constants(metrics: dict[str, float]) -> None:
    """Warn where the model is no better than a constant, the mean of the responses or of the teacher's rewards."""
    worse = []
    for name, error in metrics.items():
        own = metrics.get(name.replace("eval_constant_", "eval_"))
        if name.startswith("eval_constant_") and own is not None and own >= error:
            worse.append(f"{name.removeprefix('eval_constant_')} is {own:.4g}, that of a constant {error:.4g}")
    if worse:
        warnings.warn(f"on the evaluation data the model does not beat a constant: {'; '.join(worse)}.", stacklevel=2)


def _make_model(config: RewardTrainingConfig, teacher: Any) -> RewardModel:
    if config.init:
        model = RewardModel.from_pretrained(config.init, dtype=torch.float32)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(f"{config.init!r} is a {type(model).__name__}.", f"kind is {config.kind!r}; set --kind.")
        wanted = config.attributes or model.config.attributes
    elif teacher is not None and not config.backbone:
        model = RadQ.from_teacher(teacher, config.head).float()
        wanted = config.attributes or model.config.attributes
    else:
        wanted = config.attributes or (teacher.config.attributes if teacher is not None else [])
        dtype = getattr(torch, config.backbone_dtype)
        if config.kind == "q":
            model = RadQ.from_backbone(config.backbone, wanted, config.head, config.num_layers, dtype)
        else:
            model = RadV.from_backbone(config.backbone, wanted, config.num_layers, dtype)
        model.head.float()
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
        _check_rank(config.lora_rank, model)
        model.add_lora(config.lora_rank, config.backbone)
    return model


def _check_rank(rank: int, model: RewardModel) -> None:
    width = model.config.backbone.hidden_size  # pyright: ignore[reportOptionalMemberAccess]
    if rank > width:
        raise OptionError(
            f"lora_rank is {rank}.", f"the backbone has layers of width {width}; adapters are to be smaller than these."
        )


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
        model.config.response_range = simplify_ranges(data.attribute_ranges, len(data.attribute_ranges))
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
    eval_data = load(config.eval_data) if config.eval_data else None
    if eval_data is None and config.eval_share:
        data, eval_data = data.split(config.eval_share, config.seed)
    for part in (data, eval_data):
        if part is not None and not part.weights[part.rows].any():
            kind = "train" if part is data else "evaluate"
            raise DataError(f"{config.weight!r} is 0 in all rows to {kind} on.", "some weights must be above 0.")
    return data, eval_data


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
    data: RewardData,
    teacher: RewardModel,
    teacher_name: str,
    config: RewardTrainingConfig,
    trainer: RewardTrainer,
    progress: bool,
) -> np.ndarray:
    """The teacher's rewards of all tokens of these rows, (tokens, a), computed once and mapped from the run folder.

    The file is named after the contents of teacher and rows, so that no other ones can be taken for them.
    """
    shape = (len(data.tokens), len(teacher.config.attributes))
    file = Path(config.out) / "targets" / f"{fingerprint_values(teacher_name, data.fingerprint)}.bin"
    with trainer.args.main_process_first():
        if not file.exists() or file.stat().st_size != 4 * shape[0] * shape[1]:
            with explained_writing(file), whole_file(file) as temporary:
                _write_targets(temporary, shape, data, teacher, config.batch_size, progress)
    return np.memmap(file, np.float32, "r", shape=shape)


def _write_targets(
    file: Path, shape: tuple[int, int], data: RewardData, teacher: RewardModel, batch_size: int, progress: bool
) -> None:
    """Write the rewards of each row at its place; rows of other parts stay holes.

    Plain writes, since a full disk under a mapped file would crash the process.
    """
    order = np.argsort(data.lengths, kind="stable")
    chunks = np.array_split(order, -(-len(order) // batch_size))
    with file.open("wb") as stream:
        stream.truncate(4 * shape[0] * shape[1])
        for chunk in tqdm(chunks, desc="teacher", disable=not progress):
            batch = data.batch(chunk.tolist())
            ids, mask = batch["input_ids"].to(teacher.device), batch["attention_mask"].to(teacher.device)
            rewards = teacher.token_rewards(ids, mask).float().cpu().numpy()
            for row, length, found in zip(batch["rows"].tolist(), mask.sum(1).tolist(), rewards, strict=True):
                stream.seek(4 * shape[1] * int(data.offsets[row]))
                stream.write(found[:length].tobytes())
