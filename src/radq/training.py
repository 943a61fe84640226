"""Training and distillation of reward models, on transformers' Trainer.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

The loss of an optimizer step is the loss of its whole batch, however that is cut: sums are divided by the utterances
and positions of all micro-batches of all processes. Random tokens of the regulariser depend on row, position and epoch.
So padding, micro-batches and the number of processes change nothing but the draws of a backbone's dropout, and a killed
run resumes to the same weights.
"""

import json
import shutil
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from radq.data import DataColumns, GlobalBatches, RewardData, load_data
from radq.errors import DataError, ModelError, OptionError, VocabularyError
from radq.losses import LOSSES, baseline_loss, distillation_loss, prefix_weights
from radq.models import RadQ, RadV, RewardModel
from radq.settings import RewardTrainingConfig

CHECKPOINTS_KEPT = 2


class RewardTrainer(Trainer):
    """transformers' Trainer for reward models: their losses and metrics, exact accumulation, whole checkpoints."""

    def __init__(
        self,
        model: RewardModel,
        config: RewardTrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        teacher: RewardModel | None = None,
        progress: bool = False,
    ):
        self.config = config
        self.teacher = teacher  # outside the module: never trained, never saved
        self.tokens_seen = 0
        arguments = _training_arguments(config, eval_dataset is not None, progress)
        super().__init__(
            model=model,
            args=arguments,
            data_collator=_whole,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._metrics,
        )
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(self.args.device)  # pyright: ignore[reportArgumentType]
        self.model_accepts_loss_kwargs = True  # the loss is divided by what the whole optimizer step holds,
        self.loss_is_scaled_for_ga = True  # so the Trainer must not divide it again
        self.batches = GlobalBatches(
            train_dataset.lengths,
            config.batch_size,
            self.args.gradient_accumulation_steps,
            self.args.process_index,
            self.args.world_size,
            config.seed,
        )
        self.add_callback(_EpochCallback(self.batches))
        if not progress:
            self.remove_callback(PrinterCallback)
        if self.is_world_process_zero():
            self.add_callback(_MetricsCallback(Path(config.out) / "metrics.jsonl"))

    def get_train_dataloader(self) -> DataLoader:
        # not prepared by accelerate, which would repeat rows to fill the last batch
        data: Any = self.train_dataset
        return DataLoader(
            data,
            batch_sampler=self.batches,
            collate_fn=_whole,
            pin_memory=self.args.device.type == "cuda",
        )

    # --- losses ---

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Utterances and positions of the whole optimizer step, over all micro-batches and processes."""
        counts = torch.stack([_count(batch["loss_mask"]) for batch in batch_samples]).sum(0).to(device)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        mask = inputs["loss_mask"]
        here = _count(mask)
        share = here / (here if num_items_in_batch is None else num_items_in_batch).clamp(min=1)
        share = share * (1 if num_items_in_batch is None else self.args.world_size)  # processes are averaged later
        output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **self._extra(inputs))
        if self.config.teacher:
            loss = distillation_loss(output.rewards, mask, self._targets(inputs)) * share[1]
        else:
            response_loss = LOSSES[self.config.loss](output.rewards, mask, inputs["responses"], inputs["weights"])
            loss = response_loss * len(mask) / here[0].clamp(min=1) * share[0]
        if output.marginals is not None:
            loss = loss + self.config.reg_weight * baseline_loss(output.marginals, mask) * share[1]
        self.tokens_seen += inputs["attention_mask"].numel()
        return (loss, output) if return_outputs else loss

    def _extra(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        model: Any = self.model
        if self.config.kind == "v" or self.config.reg_weight == 0 or not model.training:
            return {}
        epoch = int(self.state.epoch or 0)
        return {"random_tokens": random_tokens(inputs, model.vocabulary.size, self.config.seed, epoch)}

    def _targets(self, inputs: dict[str, Tensor]) -> Float[Tensor, "b t a"]:
        if "targets" in inputs:
            return inputs["targets"]
        assert self.teacher is not None
        with torch.no_grad():
            return self.teacher.token_rewards(inputs["input_ids"], inputs["attention_mask"])

    # --- evaluation ---

    @torch.no_grad()
    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and of each utterance: rewards at its last token, weighted squared errors, distance to the teacher."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        reward_model: Any = self.model
        rewards = reward_model.link(output.rewards)
        mask, responses = inputs["loss_mask"], inputs["responses"]
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        last_rewards = rewards[torch.arange(len(last), device=last.device), last]
        columns = [last_rewards]
        if responses.shape[1]:
            errors = (rewards - responses[:, None]).square() * prefix_weights(mask)[..., None]
            columns.append(errors.sum(1))
        if self.config.teacher:
            distance = (rewards - self._targets(inputs)).square().mean(-1) * mask
            columns += [distance.sum(1, keepdim=True), mask.sum(1, keepdim=True).float()]
        return loss.detach(), torch.cat(columns, dim=1), responses

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        return compute_metrics(prediction.predictions, prediction.label_ids, self.model.config.attributes)  # pyright: ignore

    # --- log, checkpoints ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and start_time is not None:
            logs["tokens_per_second"] = round(self.tokens_seen * self.args.world_size / (time.time() - start_time))
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.config.out) / ".saving")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Beside, then in one move to its place: a checkpoint is whole or not there."""
        saving = Path(self._get_output_dir(trial))
        if self.is_world_process_zero():
            shutil.rmtree(saving, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(Path(self.config.out) / name, ignore_errors=True)
            (saving / name).rename(Path(self.config.out) / name)
            shutil.rmtree(saving, ignore_errors=True)
            for old in find_checkpoints(self.config.out)[:-CHECKPOINTS_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()


def find_checkpoints(run: str | Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def random_tokens(inputs: dict[str, Tensor], vocab_size: int, seed: int, epoch: int) -> Int[Tensor, "b t"]:
    """One token per position, uniform, from a hash of row, position, epoch and seed: the same on every machine."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device)
    state = inputs["rows"][:, None] * 0x9E3779B1 + positions * 0x85EBCA77 + (epoch * 0x27D4EB2F + seed * 0x165667B1)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # integer mixing in 32 bits, held in 64
        state = state & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * factor) & 0xFFFFFFFF
        state = state ^ (state >> 13)
    return state % vocab_size


def compute_metrics(stats: np.ndarray, responses: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """From what `prediction_step` returns to means over the utterances; AUC and accuracy where labels are binary."""
    a = len(attributes)
    metrics: dict[str, float] = {}
    if responses.shape[1]:
        last, errors = stats[:, :a], stats[:, a : 2 * a]
        metrics["weighted_mse"] = float(errors.mean())
        metrics["last_token_mse"] = float(((last - responses) ** 2).mean())
        for column, attribute in enumerate(attributes):
            label = responses[:, column]
            if set(np.unique(label)) == {0.0, 1.0}:
                metrics[f"auc_{attribute}"] = area_under_curve(last[:, column], label)
                metrics[f"accuracy_{attribute}"] = float(((last[:, column] > 0.5) == (label > 0.5)).mean())
    rest = stats[:, a * (2 if responses.shape[1] else 1) :]
    if rest.shape[1]:
        metrics["distillation_mse"] = float(rest[:, 0].sum() / rest[:, 1].sum())
    return metrics


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """The probability that a positive scores above a negative; ties count half."""
    positive = labels > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))


def _whole(batch: Any) -> Any:
    """In place of a collator: the data set returns whole batches."""
    return batch


def _count(mask: Tensor) -> Float[Tensor, "2"]:
    """Utterances and positions."""
    return torch.stack([mask.any(1).sum(), mask.sum()]).float()


def _training_arguments(config: RewardTrainingConfig, evaluates: bool, progress: bool) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "output_dir": config.out,
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": config.warmup_steps,
        "optim": "adamw_torch_fused" if cuda else "adamw_torch",
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.precision == "bfloat16" or (config.precision == "auto" and cuda),
        "gradient_checkpointing": config.gradient_checkpointing,
        "seed": config.seed,
        "logging_steps": config.log_steps,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": config.eval_steps,
        "save_strategy": "steps",
        "save_steps": config.save_steps,
        "report_to": config.report_to,
        "disable_tqdm": not progress,
        "remove_unused_columns": False,
        "label_names": ["responses"],
        "ddp_find_unused_parameters": False,
        "use_cpu": not cuda,
    }
    arguments |= config.trainer
    settings = TrainingArguments(**arguments)
    micro = config.micro_batch_size or -(-config.batch_size // settings.world_size)
    settings.per_device_train_batch_size = micro
    settings.per_device_eval_batch_size = micro
    settings.gradient_accumulation_steps = -(-config.batch_size // (micro * settings.world_size))
    return settings


class _EpochCallback(TrainerCallback):
    """Tells the batches which epoch it is."""

    def __init__(self, batches: GlobalBatches):
        self.batches = batches

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)


class _MetricsCallback(TrainerCallback):
    """metrics.jsonl: a line per log. A resumed run drops the lines of steps it takes again."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= state.global_step]
        self.file.write_text("".join(f"{line}\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **(logs or {})}) + "\n")


# --- a run ---


def train(
    config: RewardTrainingConfig, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> dict[str, float]:
    """Train or distil as the configuration says; returns the final metrics. The run folder is then a reward model."""
    config.check()
    out = Path(config.out)
    processes = PartialState()  # of a launch of several; alone, the only one
    checkpoint = _open_run(out, resume, overwrite)
    processes.wait_for_everyone()  # all have looked before one writes
    teacher = None if not config.teacher else RadV.from_pretrained(config.teacher)
    torch.manual_seed(config.seed)
    model = _make_model(config, teacher)
    with processes.main_process_first():  # the others find the data tokenised
        data, eval_data = _load(config, model, progress and processes.is_main_process)
    if processes.is_main_process:
        _begin_run(out, config, fresh=checkpoint is None)
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


def _open_run(out: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; refuses to write over a run by accident."""
    if not (out / "config.yaml").exists():
        return None
    if resume:
        checkpoints = find_checkpoints(out)
        return checkpoints[-1] if checkpoints else None
    if not overwrite:
        raise OptionError(f"{str(out)!r} holds a run already.", "go on with --resume, or start anew with --overwrite.")
    return None


def _begin_run(out: Path, config: RewardTrainingConfig, fresh: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if fresh:
        for checkpoint in find_checkpoints(out):
            shutil.rmtree(checkpoint)
        (out / "metrics.jsonl").unlink(missing_ok=True)
    (out / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))


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
        options: dict[str, Any] = {"num_layers": config.num_layers, "loss": "mse" if config.teacher else config.loss}
        if config.kind == "q":
            model = RadQ.from_backbone(config.backbone, wanted, config.head, **options)
        else:
            model = RadV.from_backbone(config.backbone, wanted, **options)
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
        model.add_lora(config.lora_rank, config.backbone or config.init)
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
    max_length = min(config.max_length, model.max_tokens or config.max_length)

    columns = DataColumns(
        config.text, config.attributes, config.prompt, config.weight, config.label_range, config.skip_empty
    )

    def load(sources: list[str]) -> RewardData:
        assert model.tokenizer is not None
        return load_data(sources, model.tokenizer, columns, max_length, config.cache, progress)

    data = load(config.data)
    _check_labels(config, data)
    if not config.teacher:
        model.config.response_range = list(data.response_range)
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
