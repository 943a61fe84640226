"""Settings of tables and of training runs; their docstrings are the help texts of the command line."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from radq.errors import OptionError
from radq.settings import COUNT, Range, check_values, names_in_table

if TYPE_CHECKING:
    from radq.data.label_scale import LabelRules

    HeadName = str
    LossName = str
else:
    HeadName = Literal[*names_in_table("radq.models.heads:HEADS")]
    LossName = Literal[*names_in_table("radq.training.losses:LOSSES")]

RATE, NOT_NEGATIVE = Range(0, 1_000), Range(0, 1_000_000)
BELOW_ONE = Range(0, 1, without_high=True)
Recipe = Literal["auto", "paper"]
DType = Literal["float32", "bfloat16", "float16"]
Rule = tuple[Any, str, str]  # whether a rule is broken, what is wrong then, and what to do


@dataclass
class DataConfig:
    """Settings of tables with texts and labels."""

    labels: str = ""
    """Columns with the labels, separated by commas."""
    text: str = "text"
    """Column with the texts, or with chats: lists of messages, of which the last one is the text and the others are a
    context. The chat template of the tokenizer writes them."""
    prompt: str | None = None
    """Column with a context that is read before each text, but does not count, or with the first messages of a chat."""
    weight: str | None = None
    """Column with the weight of each row; weights are at least 0, and some are above 0."""
    label_map: str = ""
    """Numbers of words, such as bad=0,ok=0.5,good=1, for all label columns in which one of the words occurs. By default
    well-known pairs of words, such as no and yes, become 0 and 1."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label, which are mapped to 0 and 1. By default numbers from 0 to 1 stay as they are, and other
    numbers are mapped by their own range, without outliers."""
    keep_labels: bool = False
    """Leave numbers as they are, also outside 0 to 1, which the loss mse allows."""
    skip_empty: bool = False
    """Skip rows with an empty text, or with equal texts in a pair, instead of stopping with an error."""
    cache: str | None = None
    """Folder for tokenised data; by default a folder in the user's cache."""

    @property
    def label_columns(self) -> list[str]:
        """Names of the label columns."""
        return [name.strip() for name in self.labels.split(",") if name.strip()]

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are read."""
        return [name for name in (self.text, self.prompt, self.weight, *self.label_columns) if name is not None]

    @property
    def label_rules(self) -> "LabelRules":
        """How labels become numbers, where radq is not to decide."""
        from radq.data.label_scale import LabelRules

        return LabelRules.parse(self.label_map, self.label_range, self.keep_labels)


@dataclass
class TrainingConfig(DataConfig):
    """Settings that all training runs have."""

    data: list[str] = field(default_factory=list)
    """Files (csv, tsv, jsonl or parquet, also compressed: .gz, .xz, .zst) or hub data sets (name or name:split)."""
    out: str = ""
    """Folder to write: the trained model, config.yaml, metrics.jsonl and checkpoints."""
    backbone: str = ""
    """Language model to start from: a hub name, a folder, or embedded."""
    recipe: Recipe = "auto"
    """Where settings come from that are left open. auto chooses them from the number of rows and tokens, the backbone,
    LoRA or not, and CPU or GPU, and prints them; paper takes those of the paper, which need a GPU and many rows."""
    num_layers: Annotated[int | None, COUNT] = None
    """Number of the backbone's first layers to keep. By default all on a GPU; on a CPU 4 to 12, fewer for more data."""
    max_length: Annotated[int | None, COUNT] = None
    """Largest number of tokens of a text; longer texts are cut off. By default 512; on a CPU 128 or 64."""
    eval_data: list[str] = field(default_factory=list)
    """Files or hub data sets to evaluate on during training."""
    eval_share: Annotated[float | None, BELOW_ONE] = None
    """Share of the rows that is kept for evaluation, if there is no --eval-data. By default 0.1, at most 1,000 rows."""
    epochs: Annotated[float | None, Range(0, 1_000_000, without_low=True)] = None
    """Passes over the data. By default some minutes of them: at most 6 on a CPU and 3 on a GPU, more for few rows."""
    max_steps: Annotated[int, Range(1, 2**31 - 1, also=-1)] = -1
    """Number of optimizer steps after which training stops; -1 leaves this to --epochs."""
    batch_size: Annotated[int | None, COUNT] = None
    """Texts, or pairs, per optimizer step, in all processes together. By default 32 on a GPU, 16 or 8 on a CPU."""
    micro_batch_size: Annotated[int | None, COUNT] = None
    """Texts, or pairs, per forward pass of a process; gradients add up to those of --batch-size. By default all."""
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
    def attributes(self) -> list[str]:
        """Names of what is learnt: those of the label columns."""
        return self.label_columns

    @property
    def compares(self) -> bool:
        """Whether the data are pairs of texts of which one is preferred, instead of texts with labels."""
        return False

    @property
    def optional_columns(self) -> list[str]:
        """Names of those columns that a table may lack."""
        return []

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


@dataclass
class RewardTrainingConfig(TrainingConfig):
    """Settings of the training of a reward model."""

    labels: str = ""
    """Columns with the labels, separated by commas; their names become the attributes of the reward model. With --pairs
    or --responses, the name of the one attribute, by default preference."""
    missing_labels: bool = False
    """Allow rows without some labels, and files without some of the label columns. An attribute has no loss in a row
    that lacks its label; rows without any label are left out."""
    spans: str = ""
    """Column with lists of [start, end, label]: labels of single tokens, those from the character start to the
    character end of the text. Tokens outside all spans have the label of the column --labels, or no loss without it."""
    pairs: str = ""
    """Two columns, separated by a comma, instead of labels: the texts that are preferred, and others to compare them
    with, such as chosen,rejected. They hold texts or lists of chat messages."""
    responses: str = ""
    """Column with lists of responses, instead of labels. Two of them in a row with different --scores are a pair."""
    scores: str = ""
    """Column with lists of numbers, one for each of the --responses."""
    max_pairs: Annotated[int, COUNT] = 10
    """Largest number of pairs from the --responses of one row, chosen at random."""
    backbone: str = ""
    """Language model to start from: a hub name, a folder, or embedded. With --teacher, the default is a copy of the
    teacher, with its layers and its LoRA adapters."""
    init: str = ""
    """Reward model to start from instead of a backbone, for a second stage of training."""
    teacher: str = ""
    """Folder of a reward model whose rewards are the targets of training, instead of labels (distillation). Several
    folders, separated by commas, teach the mean of their rewards, mapped to the range of the first. With --base, a
    guide may be a teacher, too, written as for --guide: DIR:alpha=2 or DIR:omega=30."""
    teacher_classifier: str = ""
    """Classifier or reward model of transformers, or in ONNX, whose scores are the targets of training: NAME[:label],
    where NAME is a folder or hub name. Several labels, each with a name for its attribute where wanted, are written as
    NAME:label=attribute,label=attribute. A judge such as linear:FOLDER may be the teacher, too. It has a tokenizer of
    its own, and reads texts."""
    teacher_scores: Literal["texts", "prefixes"] = "texts"
    """The --teacher-classifier scores texts or prefixes: texts gives a score to each whole text, which becomes its
    label; prefixes gives one to each beginning of a text, which becomes the reward of the beginning's last token."""
    teacher_reads: Literal["text", "continuation"] = "text"
    """The --teacher-classifier reads all of a text that begins with a prompt, or the continuation alone."""
    kind: Literal["q", "v"] = "q"
    """Kind of reward model: q (RAD-Q) scores all next tokens in one forward pass, v (RAD-V) reads each of them."""
    reads: Literal["itself", "base"] = "itself"
    """Where a reward model has its hidden states from: itself trains the transformer of the --backbone, or adapters;
    base trains a small readout of hidden states of the --backbone, which must then be the base model that is steered.
    A RAD-Q steers there at next to no cost; a RAD-V gives values of texts for scoring, best of n and distillation."""
    readout_layers: Annotated[int | None, COUNT] = None
    """With --reads base, the number of layers whose states are read, evenly spaced. By default 5."""
    readout_width: Annotated[int | None, COUNT] = None
    """With --reads base, the number of hidden units of the readout. By default as many as a state has numbers."""
    cache_states: bool = False
    """With --reads base, compute the hidden states of all texts once, and store them in the folder of --cache."""
    head: HeadName = "linear"
    """Head of a RAD-Q, which computes rewards from hidden states."""
    lora_rank: Annotated[int | None, Range(0, 2**31 - 1)] = None
    """Rank of LoRA adapters beside a frozen backbone; 0 trains it whole. By default 0, or that of the --teacher."""
    backbone_dtype: DType = "float32"
    """Precision of a backbone that is frozen, by --lora-rank or --reads base; what is trained stays float32."""
    loss: LossName = "mse"
    """Loss on the labels: mse (squared error) takes any labels, ce (cross-entropy) takes labels from 0 to 1."""
    head_learning_rate: Annotated[float | None, RATE] = None
    """Learning rate of the head. By default --learning-rate, or a tenth of it with adapters."""
    reg_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the regulariser that keeps the marginal rewards of random tokens near 0, for RAD-Q only."""
    cache_targets: bool = False
    """In distillation, compute the teacher's rewards once and store them: the default if texts are read repeatedly."""
    online: bool = False
    """In distillation, compute the rewards of texts in every step, if a reward model or a guide teaches."""
    base: str = ""
    """In distillation, the language model that the student will guide: a hub name, a folder, or embedded. It writes
    prefixes, and the student learns to compare its candidates for their next tokens as the teacher does."""
    prompts: str = ""
    """File with prompts for the --base: one per line, or a column prompt or text of a csv, tsv, jsonl or parquet file.
    By default the beginnings of the texts of --data."""
    prompt_tokens: Annotated[int, COUNT] = 8
    """Largest number of tokens of the beginnings that are prompts if there are no --prompts."""
    num_prefixes: Annotated[int, COUNT] = 2000
    """Number of prefixes that the --base writes in each round."""
    prefix_tokens: Annotated[int, COUNT] = 24
    """Largest number of tokens that the --base writes after each prompt."""
    prefix_positions: Annotated[int, COUNT] = 8
    """Number of places in each prefix, chosen at random, where candidates are compared."""
    candidates: Annotated[int, Range(2, 2**31 - 1)] = 20
    """Number of candidates at each place: the most likely next tokens of the --base."""
    candidate_share: Annotated[float, BELOW_ONE] = 0.5
    """Share of prefixes in each step, beside the --batch-size texts of the data; 0 only measures the agreement."""
    candidate_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the squared error of the candidates' rewards in the loss."""
    difference_weight: Annotated[float, NOT_NEGATIVE] = 10.0
    """Weight of the squared error of the rewards minus the mean of all candidates for the same place."""
    rounds: Annotated[int, Range(1, 1_000)] = 1
    """Number of rounds into which the steps are divided. In the first, the --base alone writes prefixes; before each
    later one it writes as many more, guided by the student."""
    round_beta: Annotated[float, NOT_NEGATIVE] = 20.0
    """Strength of that guidance: one half of the prefixes is guided by this β, the other half by −β."""

    @property
    def has_teacher(self) -> bool:
        return bool(self.teacher or self.teacher_classifier)

    @property
    def learns_tokens(self) -> bool:
        """Whether a teacher gives a target to each token of a text; otherwise each text has labels."""
        return bool(self.teacher) or (bool(self.teacher_classifier) and self.teacher_scores == "prefixes")

    @property
    def compares(self) -> bool:
        return bool(self.pairs or self.responses)

    @property
    def attributes(self) -> list[str]:
        """Names of the label columns, or of the column of spans, or of what is preferred in pairs."""
        return super().attributes or [name for name in (self.spans, "preference" * self.compares) if name]

    @property
    def response_columns(self) -> list[str]:
        """Names of the two columns of --pairs, or of the column of --responses."""
        return [name.strip() for name in (self.pairs or self.responses).split(",")]

    @property
    def optional_columns(self) -> list[str]:
        return self.label_columns if self.missing_labels else []

    @property
    def columns(self) -> list[str]:
        if self.compares:
            return [*self.response_columns, *(name for name in (self.scores, self.prompt, self.weight) if name)]
        return [*super().columns, *([self.spans] if self.spans else [])]

    def check(self) -> None:
        super().check()
        of_data = self._rules_of_pairs(), self._rules_of_spans(), self._rules_of_labels()
        for wrong, message, hint in chain(*of_data, self._rules_of_model(), self._rules_of_teacher()):
            if wrong:
                raise OptionError(message, hint)

    def _rules_of_pairs(self) -> Iterator[Rule]:
        """Settings that contradict pairs, or that only pairs have."""
        given, missing = ("responses", "scores") if self.responses else ("scores", "responses")
        lacks = bool(self.responses) != bool(self.scores)
        yield lacks, f"{given} needs {missing}, and there are none.", f"give --{missing} COLUMN, too."
        if not self.compares:
            return
        yield bool(self.pairs and self.responses), "both pairs and responses are given.", "give one of them."
        names = self.response_columns
        wrong = self.pairs and (len(names) != 2 or not all(names) or names[0] == names[1])
        yield wrong, f"pairs must name two columns, got {self.pairs!r}.", "write it as chosen,rejected."
        several = len(self.attributes) != 1
        yield several, f"labels must name one attribute for pairs, got {self.labels!r}.", "give one name."
        others = ("teacher", "teacher_classifier", "loss", "label_map", "label_range", "keep_labels")
        yield from self._exclude("pairs" if self.pairs else "responses", others)

    def _rules_of_spans(self) -> Iterator[Rule]:
        if not self.spans:
            return
        yield from self._exclude("spans", ("pairs", "responses", "teacher", "teacher_classifier"), "give one of them.")
        wrong = len(self.label_columns) > 1 or self.spans in (self.text, *self.label_columns)
        hint = f"give one column as --labels, or none, got {self.labels!r}."
        yield wrong, "spans needs a column of its own, beside at most one column of labels.", hint

    def _rules_of_labels(self) -> Iterator[Rule]:
        if self.missing_labels:
            for name in ("pairs", "responses", "spans"):
                message = f"missing_labels and {name} exclude each other."
                yield getattr(self, name), message, "leave --missing-labels out."
            yield not self.label_columns, "missing_labels needs labels, and there are none.", "give --labels, too."
        none = not self.attributes and not self.has_teacher
        yield none, "there are no labels.", "give --labels with one or more columns, or --pairs."
        if not self.teacher_classifier:
            for name, default in {"teacher_scores": "texts", "teacher_reads": "text"}.items():
                yield getattr(self, name) != default, f"{name} is for classifiers.", "give --teacher-classifier, too."
            return
        yield bool(self.teacher), "both teacher and teacher_classifier are given.", "choose one of them."
        yield (
            bool(self.attributes) and not self.learns_tokens,
            "labels and teacher_classifier exclude each other, since the classifier's scores are the labels.",
            "leave --labels out, or give --teacher-scores prefixes, where labels are used in the evaluation.",
        )
        lacks = self.teacher_reads == "continuation" and self.prompt is None and not self.base
        yield lacks, "teacher_reads is continuation, and there are no prompts.", "give --prompt COLUMN."
        yield self.base and self.loss != "mse", f"loss must be mse with a base, got {self.loss!r}.", "leave --loss out."

    def _rules_of_model(self) -> Iterator[Rule]:
        """Settings of the model that contradict each other, or that only a readout has."""
        none = not (self.backbone or self.init or self.teacher)
        yield none, "there is no model to start from.", "give --backbone or --init."
        message = f"lora_rank must be 0 without a backbone, got {self.lora_rank}."
        yield self.lora_rank and not (self.backbone or self.teacher), message, "give the --backbone of the adapters."
        if self.reads == "itself":
            for name in ("readout_layers", "readout_width", "cache_states"):
                yield bool(getattr(self, name)), f"{name} is for readouts.", "give --reads base, too."
        else:
            yield not self.backbone, "reads is base, and there is no base model.", "name it by --backbone."
            yield from self._exclude("reads=base", ("lora_rank", "num_layers", "init"))
        wrong = self.backbone_dtype != "float32" and not self.lora_rank and self.reads == "itself"
        message = f"backbone_dtype must be float32 for a backbone that is trained, got {self.backbone_dtype!r}."
        yield wrong, message, "give --lora-rank or --reads base to freeze the backbone, or leave --backbone-dtype out."

    def _rules_of_teacher(self) -> Iterator[Rule]:
        yield self.online and self.cache_targets, "both --online and --cache-targets are given.", "choose one of them."
        for name in ("cache_targets", "online"):
            lacks = getattr(self, name) and not self.learns_tokens
            yield lacks, f"{name} needs a teacher of tokens, and there is none.", "give --teacher."
        wrong = (self.learns_tokens or self.base) and self.kind != "q"
        yield wrong, f"kind must be q in distillation, got {self.kind!r}.", "leave --kind out."
        lacks = bool(self.base) and not self.has_teacher
        yield lacks, "base needs a teacher, and there is none.", "give --teacher, or leave --base out."
        workers = self.base and self.trainer.get("dataloader_num_workers")
        yield workers, "trainer sets dataloader_num_workers, which base does not allow.", "leave it out."
        name = "prompts" if self.prompts else "rounds"
        lacks = not self.base and (bool(self.prompts) or self.rounds > 1)
        yield lacks, f"{name} needs a base, and there is none.", "give --base."

    def _exclude(self, option: str, others: Iterable[str], hint: str = "leave --{} out.") -> Iterator[Rule]:
        """Other settings than their defaults that `option` does not go with."""
        for name in others:
            value = getattr(self, name)
            wrong = bool(value) and value != getattr(type(self), name)
            yield wrong, f"{name} and {option} exclude each other.", hint.format(name.replace("_", "-"))


@dataclass
class ExpertTrainingConfig(TrainingConfig):
    """Settings of the training of language models for the baselines DExperts and GeDi."""

    recipe: Recipe = "paper"
    """Where settings come from that are left open. paper takes those of the paper; auto chooses as for reward models,
    from the number of rows and tokens, the backbone, and CPU or GPU."""
    labels: str = ""
    """Column with the label."""
    method: Literal["dexperts", "gedi"] = "dexperts"
    """dexperts trains two language models, one per class; gedi trains one with a control code for each class."""
    threshold: float = 0.5
    """Smallest label of the high class, after labels were mapped to 0 to 1; smaller labels are the low class."""
    code_high: str = "positive"
    """Control code of the high class, for GeDi."""
    code_low: str = "negative"
    """Control code of the low class, for GeDi."""
    gen_weight: Annotated[float, Range(0, 1)] = 0.8
    """Share λ of the generative loss in the loss of GeDi; the rest is the discriminative loss."""

    def check(self) -> None:
        super().check()
        if len(self.attributes) != 1:
            raise OptionError(f"labels must name one column, got {self.labels!r}.", "give --labels with one column.")
        if not self.backbone:
            raise OptionError("there is no model to start from.", "give --backbone.")
