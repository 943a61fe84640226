"""Settings of training runs: dataclasses whose docstrings are the help, read from YAML and the command line."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro
import yaml

from radq.errors import OptionError


@dataclass
class TrainingConfig:
    """What every training run is told."""

    data: list[str] = field(default_factory=list)
    """Files (csv, tsv, jsonl, parquet, each also .gz .xz .zst) or hub data sets (name or name:split)."""
    labels: str = ""
    """Columns with the responses, separated by commas."""
    out: str = ""
    """Run folder: what was trained, config.yaml, metrics.jsonl and checkpoints."""
    backbone: str = ""
    """Language model to start from: hub name or folder."""
    num_layers: int | None = None
    """Keep only the first layers of the backbone."""
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
    trainer: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Any other field of transformers' TrainingArguments."""

    @property
    def attributes(self) -> list[str]:
        return [name.strip() for name in self.labels.split(",") if name.strip()]

    def check(self) -> None:
        if not self.data:
            raise OptionError("there is no data.", "give --data FILE.")
        if not self.out:
            raise OptionError("there is no run folder.", "give --out DIR.")
        for name in ("batch_size", "max_length", "log_steps", "eval_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}.", "give 1 or more.")
        if not 0 <= self.eval_share < 1:
            raise OptionError(f"eval_share is {self.eval_share}.", "give 0 or more and less than 1.")


@dataclass
class RewardTrainingConfig(TrainingConfig):
    """Settings of the training of a reward model. The defaults are the paper's recipe."""

    labels: str = ""
    """Columns with the responses, separated by commas; they become the attributes."""
    backbone: str = ""
    """Language model to start from: hub name or folder. A student may go without: it starts from its teacher's."""
    init: str = ""
    """Reward model to start from instead of a backbone: the second stage of a training."""
    teacher: str = ""
    """RAD-V folder to distil from, in place of labels."""
    kind: Literal["q", "v"] = "q"
    """RAD-Q scores all next tokens in one forward; RAD-V reads each as an input."""
    head: Literal["linear", "linear-nobaseline", "mlp"] = "linear"
    """Of RAD-Q."""
    lora_rank: int = 0
    """Train adapters of this rank beside a frozen backbone; 0 trains the backbone."""
    loss: Literal["mse", "ce"] = "mse"
    """Squared error, or cross-entropy for responses in [0, 1]."""
    head_learning_rate: float | None = None
    """Of the head, where it is to differ. A product of two long vectors wants smaller steps than adapters do."""
    reg_weight: float = 1.0
    """Of the regulariser that keeps marginal rewards of random tokens near 0; RAD-Q only."""
    cache_targets: bool = False
    """Distillation: compute the teacher's rewards once, on disk, instead of online."""

    def check(self) -> None:
        super().check()
        if not self.attributes and not self.teacher:
            raise OptionError("there are no labels.", "give --labels with one or more columns.")
        if not self.backbone and not self.init and not self.teacher:
            raise OptionError("there is no model to start from.", "give --backbone or --init.")
        if self.lora_rank and not self.backbone:
            raise OptionError(f"lora_rank is {self.lora_rank}.", "adapters stand beside a --backbone; name it.")
        if self.teacher and self.kind != "q":
            raise OptionError("kind is 'v'.", "distillation trains RAD-Q.")


@dataclass
class ExpertTrainingConfig(TrainingConfig):
    """Settings of the training of the language models that DExperts and GeDi need."""

    labels: str = ""
    """Column with the response."""
    method: Literal["dexperts", "gedi"] = "dexperts"
    """Two language models, one for each class; or one with two control codes."""
    threshold: float = 0.5
    """Responses from here on make a text one of the high class, those below one of the low class."""
    code_high: str = "positive"
    """GeDi: control code of the high class."""
    code_low: str = "negative"
    """GeDi: control code of the low class."""
    gen_weight: float = 0.8
    """GeDi: λ, the share of the generative loss; the rest is discriminative."""

    def check(self) -> None:
        super().check()
        if len(self.attributes) != 1:
            raise OptionError(f"labels are {self.labels!r}.", "give --labels with one column.")
        if not self.backbone:
            raise OptionError("there is no model to start from.", "give --backbone.")
        if not 0 <= self.gen_weight <= 1:
            raise OptionError(f"gen_weight is {self.gen_weight}.", "give a number from 0 to 1.")


Settings = TypeVar("Settings", bound=TrainingConfig)


def load_settings(file: str | Path, kind: type[Settings] = RewardTrainingConfig) -> Settings:
    """A configuration from YAML."""
    try:
        stored = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read {str(file)!r}: {str(error).splitlines()[0]}.", "give a YAML file.") from error
    known = {option.name: option for option in fields(kind)}
    for name in stored:
        if name not in known:
            raise OptionError(f"{str(file)!r} sets {name!r}, which is no option.", f"there are {', '.join(known)}.")
        stored[name] = _converted(stored[name], known[name].type, f"{str(file)!r} sets {name!r} to {stored[name]!r}.")
    return kind(**stored)


def _converted(value: Any, wanted: Any, problem: str) -> Any:
    """What YAML means by a value: it reads 1e-5 as text, and knows no tuples."""
    try:
        if wanted in (int, float):
            return wanted(value)
        if wanted == float | None and value is not None:
            return float(value)
        if wanted == tuple[float, float] | None and value is not None:
            low, high = value
            return float(low), float(high)
    except (TypeError, ValueError) as error:
        raise OptionError(problem, "numbers are needed there.") from error
    if get_origin(wanted) is Literal and value not in get_args(wanted):
        raise OptionError(problem, f"choose one of {', '.join(get_args(wanted))}.")
    return value
