"""Training and distillation of reward models, on transformers' Trainer.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

The loss of an optimizer step is the loss of its whole batch, however that is cut: sums are divided by the utterances and
positions of all micro-batches of all processes. Random tokens of the regulariser depend on row, position and epoch. So
padding, micro-batches and the number of processes change nothing, and a run that was killed resumes to the same weights.
"""

import json
import shutil
import time
import warnings
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from jaxtyping import Float, Int
from scipy.stats import rankdata
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from radq.data import DataColumns, GlobalBatches, RewardData, load_data
from radq.errors import DataError, ModelError, OptionError, VocabularyError
from radq.losses import LOSSES, baseline_loss, distillation_loss, prefix_weights
from radq.models import RadQ, RadV, RewardModel

CHECKPOINTS_KEPT = 2


@dataclass
class RewardTrainingConfig:
    """Settings of a training run. The defaults are the paper's recipe."""

    data: list[str] = field(default_factory=list)
    """Files (csv, tsv, jsonl, parquet, each also .gz .xz .zst) or hub data sets (name or name:split)."""
    labels: str = ""
    """Columns with the responses, separated by commas; they become the attributes."""
    out: str = ""
    """Run folder: the reward model, config.yaml, metrics.jsonl and checkpoints."""
    backbone: str = ""
    """Language model to start from: hub name or folder."""
    init: str = ""
    """Reward model to start from instead of a backbone: the second stage of a training."""
    teacher: str = ""
    """RAD-V folder to distil from, in place of labels."""
    kind: Literal["q", "v"] = "q"
    """RAD-Q scores all next tokens in one forward; RAD-V reads each as an input."""
    head: Literal["linear", "linear-nobaseline", "mlp"] = "linear"
    """Of RAD-Q."""
    num_layers: int | None = None
    """Keep only the first layers of the backbone."""
    lora_rank: int = 0
    """Train adapters of this rank beside a frozen backbone; 0 trains the backbone."""
    loss: Literal["mse", "ce"] = "mse"
    """Squared error, or cross-entropy for responses in [0, 1]."""
    reg_weight: float = 1.0
    """Of the regulariser that keeps marginal rewards of random tokens near 0; RAD-Q only."""
    text: str = "text"
    """Column with the texts."""
    prompt: str | None = None
    """Column with context before each text; it carries no loss."""
    weight: str | None = None
    """Column with the weight of each row."""
    label_range: tuple[float, float] | None = None
    """Low and high of the labels, to be mapped to [0, 1]; by default labels stay as they are."""
    skip_empty: bool = False
    """Leave rows with an empty text out, and say how many."""
    max_length: int = 512
    """Longer texts are cut off; how many is said."""
    eval_data: list[str] = field(default_factory=list)
    """Files to evaluate on during training."""
    eval_share: float = 0.0
    """Without eval data: hold this share of the rows out."""
    cache: str | None = None
    """Folder for tokenised data; by default in the user's cache."""
    cache_targets: bool = False
    """Distillation: compute the teacher's rewards once, on disk, instead of online."""
    epochs: float = 5.0
    """Passes over the data."""
    max_steps: int = -1
    """Stop after so many optimizer steps; -1 goes by epochs."""
    batch_size: int = 100
    """Texts per optimizer step, over all processes."""
    micro_batch_size: int | None = None
    """Texts per forward and process; the rest is accumulated. By default all at once."""
    learning_rate: float = 1e-5
    """Falls linearly to 0."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0."""
    weight_decay: float = 0.01
    """Of AdamW."""
    adam_beta1: float = 0.9
    """Of AdamW."""
    adam_beta2: float = 0.95
    """Of AdamW."""
    adam_epsilon: float = 1e-12
    """Of AdamW."""
    max_grad_norm: float = 2.0
    """Longer gradients are cut to this norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forwards; weights stay float32. auto is bfloat16 on a GPU."""
    gradient_checkpointing: bool = False
    """Compute activations twice, to save memory."""
    seed: int = 0
    """Of initialisation, order of the data and random tokens."""
    log_steps: int = 10
    """Steps between lines of metrics.jsonl."""
    eval_steps: int = 500
    """Steps between evaluations."""
    save_steps: int = 500
    """Steps between checkpoints."""
    report_to: str = "none"
    """tensorboard or wandb, where installed."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Any other field of transformers' TrainingArguments."""

    @property
    def attributes(self) -> list[str]:
        return [name.strip() for name in self.labels.split(",") if name.strip()]

    @property
    def columns(self) -> DataColumns:
        return DataColumns(self.text, self.attributes, self.prompt, self.weight, self.label_range, self.skip_empty)

    def check(self) -> None:
        if not self.data:
            raise OptionError("there is no data.", "give --data FILE.")
        if not self.out:
            raise OptionError("there is no run folder.", "give --out DIR.")
        if not self.attributes and not self.teacher:
            raise OptionError("there are no labels.", "give --labels with one or more columns.")
        if not self.backbone and not self.init:
            raise OptionError("there is no model to start from.", "give --backbone or --init.")
        if self.teacher and self.kind != "q":
            raise OptionError("kind is 'v'.", "distillation trains RAD-Q.")
        for name in ("batch_size", "max_length", "log_steps", "eval_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}.", "give 1 or more.")
        if not 0 <= self.eval_share < 1:
            raise OptionError(f"eval_share is {self.eval_share}.", "give 0 or more and less than 1.")


def load_config(file: str | Path) -> RewardTrainingConfig:
    """A configuration from YAML."""
    try:
        stored = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read {str(file)!r}: {str(error).splitlines()[0]}.", "give a YAML file.") from error
    known = {option.name: option for option in fields(RewardTrainingConfig)}
    for name in stored:
        if name not in known:
            raise OptionError(f"{str(file)!r} sets {name!r}, which is no option.", f"there are {', '.join(known)}.")
    if "label_range" in stored and stored["label_range"] is not None:
        stored["label_range"] = tuple(stored["label_range"])
    return RewardTrainingConfig(**stored)


class RewardTrainer(Trainer):
    """transformers' Trainer for reward models: their losses, their metrics, exact accumulation and whole checkpoints."""

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
            data_collator=lambda batch: batch,  # the data set returns whole batches
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
        if self.is_world_process_zero():
            self.add_callback(_MetricsCallback(Path(config.out) / "metrics.jsonl"))

    def get_train_dataloader(self) -> DataLoader:
        # not prepared by accelerate, which would repeat rows to fill the last batch
        return DataLoader(
            self.train_dataset,
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
            pin_memory=self.args.device.type == "cuda",
        )

    # --- losses ---

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Utterances and positions of the whole optimizer step, over all micro-batches and processes."""
        counts = torch.stack([_count(batch["loss_mask"]) for batch in batch_samples]).sum(0).to(device)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def compute_loss(
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
        """Loss, and per utterance: weighted squared errors (a), rewards at the last token (a), distance to the teacher."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        rewards = self.model.link(output.rewards)  # pyright: ignore[reportCallIssue]
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
    checkpoint = _open_run(out, resume, overwrite)
    teacher = None if not config.teacher else RewardModel.from_pretrained(config.teacher)
    torch.manual_seed(config.seed)
    model = _make_model(config, teacher)
    data, eval_data = _load(config, model, progress)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))
    trainer = RewardTrainer(model, config, data, eval_data, teacher, progress)
    if teacher is not None and config.cache_targets:
        for part in (data, eval_data):
            if part is not None:
                part.targets = _cache_targets(part, teacher, config, trainer, progress)
    result = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    metrics = dict(result.metrics) | (trainer.evaluate() if eval_data is not None else {})
    trainer.save_model(str(out)) if trainer.is_fsdp_enabled else _save(trainer, out)
    return metrics


def _save(trainer: RewardTrainer, out: Path) -> None:
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(out)  # pyright: ignore[reportOptionalMemberAccess]


def _open_run(out: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to go on from; refuses to write over a run by accident."""
    if not (out / "config.yaml").exists():
        return None
    if resume:
        checkpoints = find_checkpoints(out)
        return checkpoints[-1] if checkpoints else None
    if not overwrite:
        raise OptionError(f"{str(out)!r} holds a run already.", "go on with --resume, or start anew with --overwrite.")
    for checkpoint in find_checkpoints(out):
        shutil.rmtree(checkpoint)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    return None


def _make_model(config: RewardTrainingConfig, teacher: RewardModel | None) -> RewardModel:
    if config.init:
        model = RewardModel.from_pretrained(config.init)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(f"{config.init!r} is a {type(model).__name__}.", f"kind is {config.kind!r}; set --kind.")
        wanted = config.attributes or model.config.attributes
    else:
        wanted = config.attributes or (teacher.config.attributes if teacher is not None else [])
        options: dict[str, Any] = {"num_layers": config.num_layers, "loss": "mse" if config.teacher else config.loss}
        if config.kind == "q":
            model = RadQ.from_backbone(config.backbone, wanted, config.head, **options)
        else:
            model = RadV.from_backbone(config.backbone, wanted, **options)
    if model.tokenizer is None:
        raise ModelError(f"{config.backbone or config.init!r} has no tokenizer.", "put its files into the folder.")
    if list(wanted) != list(model.config.attributes):
        raise OptionError(f"labels are {wanted}.", f"{config.init!r} has {', '.join(model.config.attributes)}.")
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

    def load(sources: list[str]) -> RewardData:
        assert model.tokenizer is not None
        return load_data(sources, model.tokenizer, config.columns, max_length, config.cache, progress)

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
