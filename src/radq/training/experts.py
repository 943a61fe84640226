"""A training run of the language models that DExperts and GeDi need, from texts and labels.

    train_experts(ExpertTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

Texts with a label of at least the threshold are the high class, the others the low class. DExperts needs a language
model for each class, in the folders `expert` and `anti`. GeDi needs one language model that reads each text after the
control code of its class; its config.json records the codes. Texts begin with a BOS, and end with the end-of-text token
unless they were cut off. Axes: b batch, t time, c classes.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.tables import Rows
from radq.errors import DataError, OptionError
from radq.files import MODEL_FILES, atomic_folder, explained_writing, require_room
from radq.guides.dexperts import class_log_posterior
from radq.guides.folders import ANTI_EXPERT, EXPERT
from radq.models.loading import load_causal_lm, load_config
from radq.models.vocabulary import find_bos
from radq.numerics import log_probabilities
from radq.sources.hub import quiet
from radq.sources.model_source import ModelSource
from radq.training.config import ExpertTrainingConfig
from radq.training.losses import gedi_loss, text_loss
from radq.training.run import Start, TrainingRun, first_process_first, write_results
from radq.training.run_folder import RESULTS, check_resumed, delete_run, find_checkpoints, find_resumed_checkpoint
from radq.training.trainer import BatchTrainer
from radq.training.trainer_setup import LONGEST, make_arguments

EQUAL_PRIORS = (0.0, 0.0)  # logarithms, up to a constant


def train_experts(
    config: ExpertTrainingConfig,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    data: Rows = None,
    eval_data: Rows = None,
) -> dict[str, float]:
    """Train the language models of a guide into the folder `config.out`, and return the final metrics.

    The other arguments are those of `radq.train`.
    """
    return ExpertRun(config, resume, overwrite, progress, data, eval_data).train()


@dataclass(frozen=True)
class TextFormat:
    """BOS and control code before a text, end token after it."""

    beginnings: list[list[int]]  # token ids of BOS and control code: one list for DExperts, one per class for GeDi
    end: int | None
    max_length: int  # a text of so many tokens may have been cut off, so no end token follows it


class ExpertTrainer(BatchTrainer):
    """transformers' Trainer for language models of classes of texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExpertTrainingConfig,
        text_format: TextFormat,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        progress: bool = False,
    ):
        self.config, self.text_format = config, text_format
        if config.method == "gedi":
            model.gedi_scale = nn.Parameter(torch.ones(1))
        super().__init__(model, config, train_dataset, eval_dataset, progress)

    def collate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the end token after each text that was not cut off."""
        lengths = batch["attention_mask"].sum(1)
        padded = {name: F.pad(batch[name], (0, 1)) for name in ("input_ids", "attention_mask", "loss_mask")}
        ended = (lengths > 0) & (lengths < self.text_format.max_length)
        if self.text_format.end is not None:
            rows, columns = ended.nonzero().squeeze(1), lengths[ended]
            padded["input_ids"][rows, columns] = self.text_format.end
            padded["attention_mask"][rows, columns] = padded["loss_mask"][rows, columns] = 1
        return batch | padded

    def count_tokens(self, inputs: dict[str, Tensor]) -> int:
        return super().count_tokens(inputs) * len(self.text_format.beginnings)

    def find_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], shares: Float[Tensor, " n"]
    ) -> tuple[Tensor, "ClassScores"]:
        loss_mask, weights = inputs["loss_mask"], inputs["weights"]
        texts, positions = shares
        output = self._score_texts(model, inputs)
        if output.log_posterior is None:
            loss = text_loss(output.log_probabilities, loss_mask, weights) * positions
        else:
            mean = gedi_loss(output.log_probabilities, output.log_posterior, loss_mask, weights, self.config.gen_weight)
            loss = mean * len(loss_mask) / loss_mask.any(1).sum().clamp(min=1) * texts
        return loss, output

    def _score_texts(self, model: nn.Module, inputs: dict[str, Tensor]) -> "ClassScores":
        """Compute how likely each text is in its own class and, for GeDi, how likely its class is for the text."""
        scores = score_classes(model, self.text_format.beginnings, inputs["input_ids"])  # (c, b, t)
        if len(self.text_format.beginnings) == 1:
            return ClassScores(scores[0], None)
        loss_mask = inputs["loss_mask"]
        own = (inputs["labels"][:, 0] < self.config.threshold).long()[None]  # (1, b): 0 is the high class
        lengths = loss_mask.sum(1).clamp(min=1)
        scale: Any = self.model.gedi_scale  # pyright: ignore[reportOptionalMemberAccess]
        posterior = class_log_posterior((scores * loss_mask).sum(2), lengths, scale, EQUAL_PRIORS)  # (2, b)
        own_scores = scores.gather(0, own[..., None].expand(1, *loss_mask.shape))[0]
        return ClassScores(own_scores, posterior.gather(0, own)[0])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with quiet():
            super()._save(output_dir, state_dict)

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute for each text −log P, the number of tokens and the log-posterior of its class."""
        loss_mask = inputs["loss_mask"]
        columns = [-(output.log_probabilities * loss_mask).sum(1), loss_mask.sum(1).float()]
        if output.log_posterior is not None:
            columns.append(output.log_posterior)
        return torch.stack(columns, dim=1), inputs["labels"]

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        stats = np.asarray(prediction.predictions)
        metrics = {"perplexity": float(np.exp(stats[:, 0].sum() / stats[:, 1].sum()))}
        if stats.shape[1] == 3:
            metrics["accuracy"] = float((stats[:, 2] > np.log(0.5)).mean())
        return metrics

    def metric_names(self) -> list[str]:
        return ["perplexity", *(["accuracy"] if self.config.method == "gedi" else [])]


class ClassScores(NamedTuple):
    """Log-probabilities of a batch of texts, each in the class that its label puts it into."""

    log_probabilities: Float[Tensor, "b t"]  # of each token
    log_posterior: Float[Tensor, " b"] | None  # of the class, given the text; None for DExperts


def score_classes(
    model: nn.Module, beginnings: list[list[int]], input_ids: Int[Tensor, "b t"]
) -> Float[Tensor, "c b t"]:
    """Log-probability of every token of right-padded texts after each beginning, all in one forward pass."""
    b, t = input_ids.shape
    longest = max(map(len, beginnings))
    runs = [
        F.pad(
            torch.cat([*(input_ids.new_full((b, 1), token) for token in beginning), input_ids[:, :-1]], dim=1),
            (0, longest - len(beginning)),
        )
        for beginning in beginnings
    ]
    logits = model(input_ids=torch.cat(runs), use_cache=False).logits.chunk(len(beginnings))
    starts = [len(beginning) - 1 for beginning in beginnings]
    return torch.stack(
        [log_probabilities(part[:, n : n + t], input_ids) for n, part in zip(starts, logits, strict=True)]
    )


# --- the run ---


class ExpertRun(TrainingRun[ExpertTrainingConfig]):
    """A run of one language model for GeDi, or of two for DExperts."""

    def train(self) -> dict[str, float]:
        """Train the language models, and return the metrics of all."""
        backbone = ModelSource.find(self.config.backbone)
        self.tokenizer = backbone.tokenizer
        self.text_format = _make_format(self.config, backbone)
        with first_process_first():
            self.load_data(Start(self.tokenizer, load_config(backbone), self.text_format.max_length))
        parts = list(_split(self.config, self.data, self.eval_data))
        contents = self.fingerprint_data(backbone=backbone.fingerprint)
        check_resumed(self.out, self.config, contents, self.resume)
        has_evaluation = self.eval_data is not None
        make_arguments(self.config, has_evaluation, self.progress)  # mistakes show before anything is written
        self.begin(contents)
        metrics: dict[str, float] = {}
        for part in parts:
            if self.shows:
                print(f"{part.name or self.config.method}: {len(part.data)} texts")
            measured = self._train_part(part)
            metrics |= {f"{part.name}_{name}" if part.name else name: value for name, value in measured.items()}
        return metrics

    def _train_part(self, part: "_Part") -> dict[str, float]:
        folder = self.out / part.name
        results = folder / RESULTS  # this file is written last, so a model with it is finished
        if self.resume and results.exists():
            return json.loads(results.read_text())["metrics"]
        checkpoint = find_resumed_checkpoint(folder, self.resume)
        self.processes.wait_for_everyone()  # all have looked before one writes
        if self.processes.is_main_process and checkpoint is None:
            delete_run(folder)
        torch.manual_seed(self.config.seed)
        model = load_causal_lm(self.config.backbone, self.config.num_layers, torch.float32)
        weights = sum(parameter.nbytes for parameter in model.parameters())  # AdamW has two numbers for each weight
        hint = "make room on the disk, or name a folder on another one by --out."
        require_room(folder, 4 * weights, "a checkpoint and the model", hint)
        use_cache = model.config.use_cache
        config = replace(self.config, out=str(folder))
        trainer = ExpertTrainer(model, config, self.text_format, part.data, part.eval_data, self.progress)
        trainer.run_folder = self.config.out
        if trainer.is_fsdp_enabled:
            raise OptionError("experts cannot be trained with FSDP.", "use accelerate launch --multi_gpu without FSDP.")
        metrics = self.fit(trainer, checkpoint)
        if self.processes.is_main_process:
            model.config.use_cache = use_cache  # the Trainer has turned it off
            _save_model(trainer, folder, self.tokenizer)
            write_results(folder, {"metrics": metrics})
            for finished in find_checkpoints(folder):  # three times a model's size, and the next part needs the room
                shutil.rmtree(finished)
        return metrics


class _Part(NamedTuple):
    """Data of one language model, and the name of its folder inside the run folder."""

    name: str
    data: RewardData
    eval_data: RewardData | None


def _split(config: ExpertTrainingConfig, data: RewardData, eval_data: RewardData | None) -> Iterator[_Part]:
    """Yield the data of each language model: one for all texts with GeDi, one for each class with DExperts."""

    def high(part: RewardData) -> np.ndarray:
        return part.labels[part.rows, 0] >= config.threshold

    share = high(data).mean()
    if share in (0, 1):
        low_to_high = "{:g} to {:g}".format(*data.label_limits[0])
        raise DataError(
            f"all texts are in one class: {config.labels!r} runs from {low_to_high}.",
            f"choose a --threshold inside this range; it is {config.threshold:g}.",
        )
    if config.method == "gedi":
        yield _Part("", data, eval_data)
        return
    for name, wanted in ((EXPERT, True), (ANTI_EXPERT, False)):
        held_out = None if eval_data is None else eval_data.where(high(eval_data) == wanted)
        held_out = held_out if held_out is not None and len(held_out) else None
        if held_out is None and config.chooses_best:
            raise DataError(
                f"the {'high' if wanted else 'low'} class has no texts to find its best evaluation on.",
                "give more --eval-data, or leave out --load-best-model-at-end, --metric and --early-stopping.",
            )
        yield _Part(name, data.where(high(data) == wanted), held_out)


def _save_model(trainer: ExpertTrainer, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a plain language model; for GeDi, its config.json also has the control codes and the scale."""
    model: Any = trainer.model
    if trainer.config.method == "gedi":
        codes = [beginning[1:] for beginning in trainer.text_format.beginnings]
        model.config.gedi = {"codes": codes, "scale": model.gedi_scale.item()}
        del model.gedi_scale
    with explained_writing(folder), atomic_folder(folder, replaces=MODEL_FILES) as temporary, quiet():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _make_format(config: ExpertTrainingConfig, source: ModelSource) -> TextFormat:
    backbone, tokenizer = load_config(source), source.tokenizer
    codes: list[list[int]] = []
    for word in (config.code_high, config.code_low) if config.method == "gedi" else ():
        codes.append(tokenizer(word, add_special_tokens=False).input_ids)
        if not codes[-1] or tokenizer.unk_token_id in codes[-1]:
            raise OptionError(
                f"the tokenizer does not know the control code {word!r}.",
                "give words from its vocabulary as --code-high and --code-low.",
            )
    if codes and codes[0] == codes[1]:
        raise OptionError(
            f"the control codes {config.code_high!r} and {config.code_low!r} are the same tokens.",
            "give a --code-high and a --code-low with different tokens.",
        )
    beginnings = [[find_bos(backbone, tokenizer), *code] for code in codes or [[]]]
    longest = max(map(len, beginnings))
    max_length = config.max_length or LONGEST
    positions = getattr(backbone, "max_position_embeddings", None) or max_length + longest
    end: Any = tokenizer.eos_token_id
    return TextFormat(beginnings, end, min(max_length, positions - longest))
