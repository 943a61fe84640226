"""Settings of training runs: dataclasses whose docstrings are the help, read from YAML and the command line."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from radq.errors import OptionError
from radq.settings import COUNT, Range, check_values, read_yaml

RATE, NOT_NEGATIVE = Range(0, 1_000), Range(0, 1_000_000)
BELOW_ONE = Range(0, 1, without_high=True)
DType = Literal["float32", "bfloat16", "float16"]


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
    num_layers: Annotated[int | None, COUNT] = None
    """Keep only the first layers of the backbone."""
    text: str = "text"
    """Column with the texts."""
    prompt: str | None = None
    """Column with context before each text; it carries no loss."""
    weight: str | None = None
    """Column with the weight of each row: 0 or more, and not 0 in all rows."""
    label_range: tuple[float, float] | None = None
    """Low and high of the labels, to be mapped to [0, 1]; by default labels stay as they are. None may lie outside."""
    skip_empty: bool = False
    """Leave rows with an empty text out, and say how many."""
    max_length: Annotated[int, COUNT] = 512
    """Longer texts are cut off; how many is said."""
    eval_data: list[str] = field(default_factory=list)
    """Files to evaluate on during training."""
    eval_share: Annotated[float, BELOW_ONE] = 0.0
    """Without eval data: hold this share of the rows out."""
    cache: str | None = None
    """Folder for tokenised data; by default in the user's cache."""
    epochs: Annotated[float, Range(0, 1_000_000, without_low=True)] = 5.0
    """Passes over the data."""
    max_steps: Annotated[int, Range(1, 2**31 - 1, also=-1)] = -1
    """Stop after so many optimizer steps; -1 goes by epochs."""
    batch_size: Annotated[int, COUNT] = 100
    """Texts per optimizer step, over all processes."""
    micro_batch_size: Annotated[int | None, COUNT] = None
    """Texts per forward and process; the rest is accumulated. By default all at once."""
    learning_rate: Annotated[float, RATE] = 1e-5
    """Falls linearly to 0."""
    warmup_steps: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    """Of AdamW."""
    adam_beta1: Annotated[float, BELOW_ONE] = 0.9
    """Of AdamW."""
    adam_beta2: Annotated[float, BELOW_ONE] = 0.95
    """Of AdamW."""
    adam_epsilon: Annotated[float, NOT_NEGATIVE] = 1e-12
    """Of AdamW."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 2.0
    """Longer gradients are cut to this norm; 0 cuts none."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the forwards; weights stay float32. auto is float32 on a CPU, and on a GPU bfloat16 where it computes in that,
    else float16 with scaled losses."""
    gradient_checkpointing: bool = False
    """Compute activations twice, to save memory."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Of initialisation, order of the data and random tokens."""
    log_steps: Annotated[int, COUNT] = 10
    """Steps between lines of metrics.jsonl."""
    eval_steps: Annotated[int, COUNT] = 500
    """Steps between evaluations."""
    save_steps: Annotated[int, COUNT] = 500
    """Steps between checkpoints."""
    load_best_model_at_end: bool = False
    """End with the weights of the best evaluation instead of the last ones."""
    metric: str | None = None
    """Which number of the evaluation says what is best: loss (the default), weighted_mse, auc_LABEL, …; it turns
    --load-best-model-at-end on."""
    early_stopping: Annotated[int | None, COUNT] = None
    """Stop when so many evaluations in a row were no better than the best; it turns --load-best-model-at-end on."""
    report_to: str = "none"
    """tensorboard or wandb, where installed."""
    trainer: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Any field of transformers' TrainingArguments that has no option here."""

    @property
    def attributes(self) -> list[str]:
        return [name.strip() for name in self.labels.split(",") if name.strip()]

    @property
    def chooses_best(self) -> bool:
        """Whether a run ends with the weights of its best evaluation."""
        asked = self.load_best_model_at_end or self.trainer.get("load_best_model_at_end")
        return bool(asked or self.metric is not None or self.early_stopping is not None)

    @property
    def best_metric(self) -> str:
        """The number of an evaluation that says which one is best."""
        return str(self.metric or self.trainer.get("metric_for_best_model") or "loss").removeprefix("eval_")

    def check(self) -> None:
        check_values(self)
        if not self.data:
            raise OptionError("there is no data.", "give --data FILE.")
        if not self.out:
            raise OptionError("there is no run folder.", "give --out DIR.")
        if len(set(self.attributes)) != len(self.attributes):
            raise OptionError(f"labels are {self.labels!r}.", "name each column once.")
        if self.label_range is not None and not 0 < self.label_range[1] - self.label_range[0] < math.inf:
            raise OptionError(f"label_range is {self.label_range}.", "give a low and a high that is above it.")
        if self.chooses_best and not (self.eval_data or self.eval_share):
            raise OptionError(
                "the best evaluation is asked for, and there is nothing to evaluate on.",
                "give --eval-data or --eval-share.",
            )


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
    lora_rank: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Train adapters of this rank beside a frozen backbone; 0 trains the backbone."""
    backbone_dtype: DType = "float32"
    """Of the frozen backbone under adapters, which stay float32 themselves. Half precision takes half the memory."""
    loss: Literal["mse", "ce"] = "mse"
    """Squared error, or cross-entropy for responses in [0, 1]."""
    head_learning_rate: Annotated[float | None, RATE] = None
    """Of the head, where it is to differ. A product of two long vectors wants smaller steps than adapters do."""
    reg_weight: Annotated[float, NOT_NEGATIVE] = 1.0
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
        if self.backbone_dtype != "float32" and not self.lora_rank:
            raise OptionError(
                f"backbone_dtype is {self.backbone_dtype!r}.",
                "weights that are trained stay float32; give --lora-rank.",
            )
        if self.cache_targets and not self.teacher:
            raise OptionError("cache_targets is set.", "there are targets in distillation alone; give --teacher.")
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
    gen_weight: Annotated[float, Range(0, 1)] = 0.8
    """GeDi: λ, the share of the generative loss; the rest is discriminative."""

    def check(self) -> None:
        super().check()
        if len(self.attributes) != 1:
            raise OptionError(f"labels are {self.labels!r}.", "give --labels with one column.")
        if not self.backbone:
            raise OptionError("there is no model to start from.", "give --backbone.")


Settings = TypeVar("Settings", bound=TrainingConfig)


def load_settings(file: str | Path, kind: type[Settings] = RewardTrainingConfig) -> Settings:
    """Read the settings of a training from YAML."""
    return read_yaml(file, kind)
