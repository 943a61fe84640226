"""The settings of the training of reward models and of experts; docstrings are the help texts of the command line."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from radq.errors import OptionError
from radq.settings import COUNT, Range, names_in_table
from radq.training.run_config import BELOW_ONE, NOT_NEGATIVE, RATE, Recipe, TrainingConfig

DType = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    HeadName = str
    LossName = str
else:
    HeadName = Literal[*names_in_table("radq.models.heads:HEADS")]
    LossName = Literal[*names_in_table("radq.training.losses:LOSSES")]


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
    """Rank of LoRA adapters that are trained beside a frozen backbone; 0 trains the backbone itself. By default 0, or
    the rank of the --teacher."""
    backbone_dtype: DType = "float32"
    """Precision of the weights of a frozen backbone; what is trained stays float32. Only with --lora-rank
    or --reads base."""
    loss: LossName = "mse"
    """Loss on the labels: mse (squared error) takes any labels, ce (cross-entropy) takes labels from 0 to 1."""
    head_learning_rate: Annotated[float | None, RATE] = None
    """Learning rate of the head. By default --learning-rate, or a tenth of it with adapters."""
    reg_weight: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of the regulariser that keeps the marginal rewards of random tokens near 0, for RAD-Q only."""
    cache_targets: bool = False
    """In distillation, compute the teacher's rewards of texts once and store them. By default this is done if texts are
    read more than once."""
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
    """Weight of the squared error of the differences between candidates: of their rewards minus the mean of all
    candidates for the same place."""
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
        if not self.compares:
            own = [name for name in (self.text, self.prompt, self.weight, self.spans or None) if name is not None]
            return [*own, *self.label_columns]
        others = [self.scores or None, self.prompt, self.weight]
        return [*self.response_columns, *(name for name in others if name is not None)]

    def check(self) -> None:
        super().check()
        self._check_pairs()
        self._check_spans()
        self._check_missing_labels()
        if not self.attributes and not self.has_teacher:
            raise OptionError("there are no labels.", "give --labels with one or more columns, or --pairs.")
        self._check_classifier()
        if not self.backbone and not self.init and not self.teacher:
            raise OptionError("there is no model to start from.", "give --backbone or --init.")
        if self.lora_rank and not self.backbone and not self.teacher:
            raise OptionError(
                f"lora_rank must be 0 without a backbone, got {self.lora_rank}.", "give the --backbone of the adapters."
            )
        self._check_readout()
        if self.backbone_dtype != "float32" and not self.lora_rank and self.reads == "itself":
            raise OptionError(
                f"backbone_dtype must be float32 for a backbone that is trained, got {self.backbone_dtype!r}.",
                "give --lora-rank or --reads base to freeze the backbone, or leave --backbone-dtype out.",
            )
        if self.online and self.cache_targets:
            raise OptionError("both --online and --cache-targets are given.", "choose one of them.")
        for name in ("cache_targets", "online"):
            if getattr(self, name) and not self.learns_tokens:
                raise OptionError(f"{name} needs a teacher of tokens, and there is none.", "give --teacher.")
        if (self.learns_tokens or self.base) and self.kind != "q":
            raise OptionError(f"kind must be q in distillation, got {self.kind!r}.", "leave --kind out.")
        self._check_candidates()

    def _check_classifier(self) -> None:
        """Refuse settings that contradict a classifier as the teacher, or that only such a teacher has."""
        if not self.teacher_classifier:
            for name, value in {"teacher_scores": "texts", "teacher_reads": "text"}.items():
                if getattr(self, name) != value:
                    raise OptionError(f"{name} is for classifiers.", "give --teacher-classifier, too.")
            return
        if self.teacher:
            raise OptionError("both teacher and teacher_classifier are given.", "choose one of them.")
        if self.attributes and not self.learns_tokens:
            raise OptionError(
                "labels and teacher_classifier exclude each other, since the classifier's scores are the labels.",
                "leave --labels out, or give --teacher-scores prefixes, where labels are used in the evaluation.",
            )
        if self.teacher_reads == "continuation" and self.prompt is None and not self.base:
            raise OptionError("teacher_reads is continuation, and there are no prompts.", "give --prompt COLUMN.")
        if self.base and self.loss != "mse":
            raise OptionError(f"loss must be mse with a base, got {self.loss!r}.", "leave --loss out.")

    def _check_pairs(self) -> None:
        """Refuse settings that contradict pairs, or that only pairs have."""
        if bool(self.responses) != bool(self.scores):
            given, missing = ("responses", "scores") if self.responses else ("scores", "responses")
            raise OptionError(f"{given} needs {missing}, and there are none.", f"give --{missing} COLUMN, too.")
        if not self.compares:
            return
        if self.pairs and self.responses:
            raise OptionError("both pairs and responses are given.", "give one of them.")
        names = self.response_columns
        if self.pairs and (len(names) != 2 or not all(names) or names[0] == names[1]):
            raise OptionError(f"pairs must name two columns, got {self.pairs!r}.", "write it as chosen,rejected.")
        if len(self.attributes) != 1:
            raise OptionError(f"labels must name one attribute for pairs, got {self.labels!r}.", "give one name.")
        contradicting = {
            "teacher": self.teacher,
            "teacher_classifier": self.teacher_classifier,
            "loss": self.loss != "mse",
            "label_map": self.label_map,
            "label_range": self.label_range is not None,
            "keep_labels": self.keep_labels,
        }
        for name, given in contradicting.items():
            if given:
                option = "pairs" if self.pairs else "responses"
                raise OptionError(f"{name} and {option} exclude each other.", f"leave --{name.replace('_', '-')} out.")

    def _check_spans(self) -> None:
        """Refuse settings that contradict spans."""
        if not self.spans:
            return
        for name in ("pairs", "responses", "teacher", "teacher_classifier"):
            if getattr(self, name):
                raise OptionError(f"{name} and spans exclude each other.", "give one of them.")
        if len(self.label_columns) > 1 or self.spans in (self.text, *self.label_columns):
            raise OptionError(
                "spans needs a column of its own, beside at most one column of labels.",
                f"give one column as --labels, or none, got {self.labels!r}.",
            )

    def _check_missing_labels(self) -> None:
        """Refuse missing labels where there are none of texts."""
        if not self.missing_labels:
            return
        for name in ("pairs", "responses", "spans"):
            if getattr(self, name):
                raise OptionError(f"missing_labels and {name} exclude each other.", "leave --missing-labels out.")
        if not self.label_columns:
            raise OptionError("missing_labels needs labels, and there are none.", "give --labels, too.")

    def _check_candidates(self) -> None:
        if self.base and not self.has_teacher:
            raise OptionError("base needs a teacher, and there is none.", "give --teacher, or leave --base out.")
        if self.base and self.trainer.get("dataloader_num_workers"):
            raise OptionError("trainer sets dataloader_num_workers, which base does not allow.", "leave it out.")
        if not self.base and (self.prompts or self.rounds > 1):
            name = "prompts" if self.prompts else "rounds"
            raise OptionError(f"{name} needs a base, and there is none.", "give --base.")

    def _check_readout(self) -> None:
        """Refuse settings that contradict a readout, or that only a readout has."""
        if self.reads == "itself":
            given = [name for name in ("readout_layers", "readout_width", "cache_states") if getattr(self, name)]
            if given:
                raise OptionError(f"{given[0]} is for readouts.", "give --reads base, too.")
            return
        if not self.backbone:
            raise OptionError("reads is base, and there is no base model.", "name it by --backbone.")
        for name in ("lora_rank", "num_layers", "init"):
            if getattr(self, name):
                raise OptionError(
                    f"{name} and reads=base exclude each other.", f"leave --{name.replace('_', '-')} out."
                )


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
