"""The settings that all training runs have, of reward models and of experts; docstrings are the help texts."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from radq.errors import OptionError
from radq.settings import COUNT, Range, check_values

if TYPE_CHECKING:
    from radq.data.label_scale import LabelRules

RATE, NOT_NEGATIVE = Range(0, 1_000), Range(0, 1_000_000)
BELOW_ONE = Range(0, 1, without_high=True)
Recipe = Literal["auto", "paper"]


@dataclass
class TrainingConfig:
    """Settings that all training runs have."""

    data: list[str] = field(default_factory=list)
    """Files (csv, tsv, jsonl or parquet, also compressed: .gz, .xz, .zst) or hub data sets (name or name:split)."""
    labels: str = ""
    """Columns with the labels, separated by commas."""
    out: str = ""
    """Folder to write: the trained model, config.yaml, metrics.jsonl and checkpoints."""
    backbone: str = ""
    """Language model to start from: a hub name, a folder, or embedded."""
    recipe: Recipe = "auto"
    """Where settings come from that are left open. auto chooses them from the number of rows and tokens, the backbone,
    LoRA or not, and CPU or GPU, and prints them; paper takes those of the paper, which need a GPU and many rows."""
    num_layers: Annotated[int | None, COUNT] = None
    """Number of the backbone's first layers to keep. By default all on a GPU; on a CPU 4 to 12, fewer for more data."""
    text: str = "text"
    """Column with the texts, or with chats: lists of messages, of which the last one is the text and the others are a
    context. The chat template of the tokenizer writes them."""
    prompt: str | None = None
    """Column with a context that is read before each text, or with the first messages of a chat; the loss does not
    count its tokens."""
    weight: str | None = None
    """Column with the weight of each row in the loss; weights are at least 0, and some are above 0."""
    label_map: str = ""
    """Numbers of words, such as bad=0,ok=0.5,good=1, for all label columns in which one of the words occurs. By default
    well-known pairs of words, such as no and yes, become 0 and 1."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label, which are mapped to 0 and 1. By default numbers from 0 to 1 stay as they are, and other
    numbers are mapped by their own range."""
    keep_labels: bool = False
    """Leave numbers as they are, also outside 0 to 1, which --loss mse allows."""
    skip_empty: bool = False
    """Skip rows with an empty text, or with equal texts in a pair, instead of stopping with an error."""
    max_length: Annotated[int | None, COUNT] = None
    """Largest number of tokens of a text; longer texts are cut off. By default 512; on a CPU 128 or 64."""
    eval_data: list[str] = field(default_factory=list)
    """Files or hub data sets to evaluate on during training."""
    eval_share: Annotated[float | None, BELOW_ONE] = None
    """Share of the rows that is kept for evaluation, if there is no --eval-data. By default 0.1, at most 1,000 rows."""
    cache: str | None = None
    """Folder for tokenised data; by default a folder in the user's cache."""
    epochs: Annotated[float | None, Range(0, 1_000_000, without_low=True)] = None
    """Number of passes over the data. By default as many as take some minutes, at most 6 on a CPU and 3 on a GPU, or
    more for a table of few rows."""
    max_steps: Annotated[int, Range(1, 2**31 - 1, also=-1)] = -1
    """Number of optimizer steps after which training stops; -1 leaves this to --epochs."""
    batch_size: Annotated[int | None, COUNT] = None
    """Texts, or pairs, per optimizer step, in all processes together. By default 32 on a GPU, 16 or 8 on a CPU."""
    micro_batch_size: Annotated[int | None, COUNT] = None
    """Number of texts, or of pairs, per forward pass of a process; gradients are accumulated up to --batch-size. By
    default all."""
    learning_rate: Annotated[float | None, RATE] = None
    """Learning rate of AdamW; it falls linearly to 0. By default smaller for wider and deeper backbones: 2e-4 for 12
    layers of width 576, and 1e-3 for LoRA adapters of that width."""
    warmup_steps: Annotated[int | None, Range(0, 2**31 - 1)] = None
    """Number of first steps in which the learning rate rises from 0. By default a tenth of all steps."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    """AdamW weight decay."""
    adam_beta1: Annotated[float, BELOW_ONE] = 0.9
    """AdamW β1, the decay rate of its mean of gradients."""
    adam_beta2: Annotated[float, BELOW_ONE] = 0.95
    """AdamW β2, the decay rate of its mean of squared gradients."""
    adam_epsilon: Annotated[float, NOT_NEGATIVE] = 1e-12
    """AdamW ε, which keeps its divisor above 0."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 2.0
    """Gradients with a larger norm are scaled down to this norm; 0 leaves them as they are."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward passes; trained weights stay float32. auto is float32 on a CPU, bfloat16 on a GPU that
    supports it, and float16 with scaled losses on other GPUs."""
    gradient_checkpointing: bool = False
    """Save memory by computing activations a second time in the backward pass."""
    capture_steps: bool = True
    """On a CUDA GPU, record the kernels of a step once for each shape of batch and replay them: several times as fast
    for short texts. It needs more memory, and is left out where it is not possible."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of the initial weights, the order of the data and the random tokens."""
    log_steps: Annotated[int, COUNT] = 10
    """Number of steps between lines of metrics.jsonl."""
    eval_steps: Annotated[int, COUNT] = 500
    """Number of steps between evaluations."""
    save_steps: Annotated[int | None, COUNT] = None
    """Number of steps between checkpoints, beside those of --save-minutes. By default none."""
    save_minutes: Annotated[float, Range(0, 1_000_000, without_low=True)] = 5.0
    """Minutes between checkpoints. Ctrl-C and the end of a run save one, too."""
    load_best_model_at_end: bool = False
    """End with the weights of the best evaluation instead of the last weights."""
    metric: str | None = None
    """Metric that tells which evaluation is best: loss (the default), weighted_mse, auc_LABEL, pair_accuracy, …; giving
    one turns on --load-best-model-at-end."""
    early_stopping: Annotated[int | None, COUNT] = None
    """Stop after this number of evaluations in a row without a new best; it turns on --load-best-model-at-end."""
    report_to: str = "none"
    """Program to report metrics to, such as tensorboard or wandb; it must be installed."""
    trainer: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Fields of transformers' TrainingArguments that have no option here."""

    @property
    def label_columns(self) -> list[str]:
        """Names of the label columns."""
        return [name.strip() for name in self.labels.split(",") if name.strip()]

    @property
    def attributes(self) -> list[str]:
        """Names of what is learnt: those of the label columns."""
        return self.label_columns

    @property
    def compares(self) -> bool:
        """Whether the data are pairs of texts of which one is preferred, instead of texts with labels."""
        return False

    @property
    def columns(self) -> list[str]:
        """Names of the columns of the data that are read."""
        return [name for name in (self.text, self.prompt, self.weight, *self.attributes) if name is not None]

    @property
    def optional_columns(self) -> list[str]:
        """Names of those columns that a table may lack."""
        return []

    @property
    def label_rules(self) -> "LabelRules":
        """How labels become numbers, where radq is not to decide."""
        from radq.data.label_scale import LabelRules

        return LabelRules.parse(self.label_map, self.label_range, self.keep_labels)

    @property
    def chooses_best(self) -> bool:
        """Whether the run ends with the weights of its best evaluation."""
        asked = self.load_best_model_at_end or self.trainer.get("load_best_model_at_end")
        return bool(asked or self.metric is not None or self.early_stopping is not None)

    @property
    def best_metric(self) -> str:
        """Name of the metric that tells which evaluation is best."""
        return str(self.metric or self.trainer.get("metric_for_best_model") or "loss").removeprefix("eval_")

    def check(self) -> None:
        """Refuse values that are not allowed, alone or together."""
        check_values(self)
        if not self.data:
            raise OptionError("there is no data.", "give --data FILE.")
        if not self.out:
            raise OptionError("there is no run folder.", "give --out DIR.")
        if len(set(self.attributes)) != len(self.attributes):
            raise OptionError(f"labels must name each column once, got {self.labels!r}.", "remove the repeated names.")
        _ = self.label_rules
        none_held_out = self.eval_share == 0 or (self.eval_share is None and self.recipe == "paper")
        self.check_evaluation(bool(self.eval_data) or not none_held_out)

    def check_evaluation(self, evaluates: bool) -> None:
        """Refuse to choose the best of no evaluations."""
        if self.chooses_best and not evaluates:
            raise OptionError(
                "load_best_model_at_end, metric and early_stopping need data to evaluate on, and there is none.",
                "give --eval-data or --eval-share.",
            )
