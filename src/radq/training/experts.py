"""Finetuning of the language models that DExperts and GeDi need, from texts and responses.

    train_experts(ExpertTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

A response from the threshold on puts a text into the high class, one below it into the low class. DExperts: a language
model for each, in the folders `expert` and `anti`. GeDi: one language model for both, each text after the control code
of its class; config.json records the codes. Texts begin with a BOS, and end with the end-of-text token if they were not
cut off.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.errors import DataError, OptionError
from radq.files import MODEL_FILES, explained_writing, whole_file, whole_folder
from radq.guides.dexperts import ANTI_EXPERT, EXPERT
from radq.guides.expert import class_log_posterior
from radq.models.loading import load_causal_lm, load_config, load_tokenizer, quiet
from radq.models.vocabulary import find_bos
from radq.numerics import log_probabilities
from radq.training.arguments import make_arguments
from radq.training.config import ExpertTrainingConfig
from radq.training.losses import gedi_loss, text_loss
from radq.training.reward import load_parts, run_trainer
from radq.training.run_folder import begin_run, check_resumed, find_resumed_checkpoint, forget_run, open_run
from radq.training.trainer import BatchTrainer

EVEN = (0.0, 0.0)  # log-priors that make no difference


@dataclass(frozen=True)
class Frame:
    """What stands around a text."""

    heads: list[list[int]]  # BOS and control code: one for DExperts, one of each class for GeDi
    end: int | None
    max_length: int  # a text of so many tokens may have been cut, and gets no end


class ExpertTrainer(BatchTrainer):
    """transformers' Trainer for language models of classes of texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExpertTrainingConfig,
        frame: Frame,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        progress: bool = False,
    ):
        self.config, self.frame = config, frame
        if config.method == "gedi":
            model.gedi_scale = nn.Parameter(torch.ones(1))
        super().__init__(model, config, train_dataset, eval_dataset, progress)

    def collate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Texts with their end."""
        lengths = batch["attention_mask"].sum(1)
        padded = {name: F.pad(batch[name], (0, 1)) for name in ("input_ids", "attention_mask", "loss_mask")}
        ended = (lengths > 0) & (lengths < self.frame.max_length)
        if self.frame.end is not None:
            rows, columns = ended.nonzero().squeeze(1), lengths[ended]
            padded["input_ids"][rows, columns] = self.frame.end
            padded["attention_mask"][rows, columns] = padded["loss_mask"][rows, columns] = 1
        return batch | padded

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        mask, weights = inputs["loss_mask"], inputs["weights"]
        utterances, positions = self.share(mask, num_items_in_batch)
        output = self.read(model, inputs)
        if output.log_posterior is None:
            loss = text_loss(output.log_probabilities, mask, weights) * positions
        else:
            mean = gedi_loss(output.log_probabilities, output.log_posterior, mask, weights, self.config.gen_weight)
            loss = mean * len(mask) / mask.any(1).sum().clamp(min=1) * utterances
        self.tokens_seen += inputs["attention_mask"].numel() * len(self.frame.heads)
        return (loss, output) if return_outputs else loss

    def read(self, model: nn.Module, inputs: dict[str, Tensor]) -> "ClassScores":
        """How likely each text is in its own class and, for GeDi, how likely its class."""
        scores = read_classes(model, self.frame.heads, inputs["input_ids"])  # (c, b, t)
        if len(self.frame.heads) == 1:
            return ClassScores(scores[0], None)
        mask = inputs["loss_mask"]
        own = (inputs["responses"][:, 0] < self.config.threshold).long()[None]  # (1, b)
        lengths = mask.sum(1).clamp(min=1)
        scale: Any = self.model.gedi_scale  # pyright: ignore[reportOptionalMemberAccess]
        posterior = class_log_posterior((scores * mask).sum(2), lengths, scale, EVEN)  # (2, b)
        own_scores = scores.gather(0, own[..., None].expand(1, *mask.shape))[0]
        return ClassScores(own_scores, posterior.gather(0, own)[0])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with quiet():
            super()._save(output_dir, state_dict)

    @torch.no_grad()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and of each text: −log P, number of tokens, log P of its class."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        mask = inputs["loss_mask"]
        columns = [-(output.log_probabilities * mask).sum(1), mask.sum(1).float()]
        if output.log_posterior is not None:
            columns.append(output.log_posterior)
        return loss.detach(), torch.stack(columns, dim=1), inputs["responses"]

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        stats = np.asarray(prediction.predictions)
        metrics = {"perplexity": float(np.exp(stats[:, 0].sum() / stats[:, 1].sum()))}
        if stats.shape[1] == 3:
            metrics["accuracy"] = float((stats[:, 2] > np.log(0.5)).mean())
        return metrics

    def metric_names(self) -> list[str]:
        return ["perplexity", *(["accuracy"] if self.config.method == "gedi" else [])]


class ClassScores(NamedTuple):
    log_probabilities: Float[Tensor, "b t"]  # of each token, in the class of its text
    log_posterior: Float[Tensor, " b"] | None  # of that class


def read_classes(model: nn.Module, heads: list[list[int]], ids: Int[Tensor, "b t"]) -> Float[Tensor, "c b t"]:
    """log P of every token of right-padded texts after each head, all heads as rows of one batch."""
    b, t = ids.shape
    longest = max(map(len, heads))
    runs = [
        F.pad(torch.cat([ids.new_tensor(head).expand(b, -1), ids[:, :-1]], dim=1), (0, longest - len(head)))
        for head in heads
    ]
    logits = model(input_ids=torch.cat(runs), use_cache=False).logits
    parts = zip(heads, logits.chunk(len(heads)), strict=True)
    return torch.stack([log_probabilities(part[:, len(head) - 1 :][:, :t], ids) for head, part in parts])


def train_experts(
    config: ExpertTrainingConfig, resume: bool = False, overwrite: bool = False, progress: bool = False
) -> dict[str, float]:
    """Train as the configuration says; returns the final metrics. The run folder then makes a guide."""
    config.check()
    out = Path(config.out)
    processes = PartialState()
    open_run(out, resume, overwrite)
    processes.wait_for_everyone()
    tokenizer = load_tokenizer(config.backbone)
    frame = _make_frame(config, tokenizer)
    with processes.main_process_first():
        data, eval_data = load_parts(config, tokenizer, frame.max_length, progress and processes.is_main_process)
    parts = list(_split(config, data, eval_data))
    contents = {"data": data.fingerprint} | ({} if eval_data is None else {"eval_data": eval_data.fingerprint})
    if resume:
        check_resumed(out, config, contents)
    make_arguments(config, eval_data is not None, progress)  # so that mistakes there come before anything is written
    if processes.is_main_process:
        begin_run(out, config, contents, resume)
    metrics: dict[str, float] = {}
    for part in parts:
        if progress and processes.is_main_process:
            print(f"{part.name or config.method}: {len(part.data)} texts")
        found = _train_part(config, part, frame, tokenizer, resume, progress)
        metrics |= {f"{part.name}_{name}" if part.name else name: value for name, value in found.items()}
    return metrics


class _Part(NamedTuple):
    """A language model to train: in a folder of that name, on this data."""

    name: str
    data: RewardData
    eval_data: RewardData | None


def _split(config: ExpertTrainingConfig, data: RewardData, eval_data: RewardData | None) -> Iterator[_Part]:
    def high(part: RewardData) -> np.ndarray:
        return part.labels[part.rows, 0] >= config.threshold

    share = high(data).mean()
    if share in (0, 1):
        low_to_high = f"{data.counts.label_low[0]:g} to {data.counts.label_high[0]:g}"
        raise DataError(
            f"all texts are in one class: {config.labels!r} runs from {low_to_high}.",
            f"choose a --threshold between; it is {config.threshold:g}.",
        )
    if config.method == "gedi":
        yield _Part("", data, eval_data)
        return
    for name, wanted in ((EXPERT, True), (ANTI_EXPERT, False)):
        held_out = None if eval_data is None else eval_data.where(high(eval_data) == wanted)
        held_out = held_out if held_out is not None and len(held_out) else None
        if held_out is None and config.chooses_best:
            raise DataError(
                f"the {'high' if wanted else 'low'} class has no texts to evaluate on.",
                "the best evaluation of each class is asked for; give more --eval-data.",
            )
        yield _Part(name, data.where(high(data) == wanted), held_out)


def _train_part(
    config: ExpertTrainingConfig,
    part: _Part,
    frame: Frame,
    tokenizer: PreTrainedTokenizerBase,
    resume: bool,
    progress: bool,
) -> dict[str, float]:
    folder = Path(config.out) / part.name
    results = folder / "results.json"  # written last
    if resume and results.exists():
        return json.loads(results.read_text())["metrics"]
    checkpoint = find_resumed_checkpoint(folder, resume)
    processes = PartialState()
    processes.wait_for_everyone()  # all have looked before one writes
    if processes.is_main_process and checkpoint is None:
        forget_run(folder)
    torch.manual_seed(config.seed)
    model = load_causal_lm(config.backbone, config.num_layers, torch.float32)
    use_cache = model.config.use_cache
    trainer = ExpertTrainer(model, replace(config, out=str(folder)), frame, part.data, part.eval_data, progress)
    metrics = run_trainer(trainer, checkpoint)
    if trainer.is_world_process_zero():
        model.config.use_cache = use_cache  # which the Trainer has turned off
        with explained_writing(folder):
            _save_model(trainer, folder, tokenizer)
            with whole_file(results) as temporary:
                temporary.write_text(json.dumps({"metrics": metrics}))
    return metrics


def _save_model(trainer: ExpertTrainer, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """As a plain language model, with what GeDi needs to know in its config.json."""
    model: Any = trainer.model
    if trainer.config.method == "gedi":
        model.config.gedi = {"codes": [head[1:] for head in trainer.frame.heads], "scale": model.gedi_scale.item()}
        del model.gedi_scale
    with whole_folder(folder, replaces=MODEL_FILES) as temporary, quiet():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _make_frame(config: ExpertTrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Frame:
    backbone = load_config(config.backbone)
    bos = find_bos(backbone, tokenizer)
    codes = (
        [_code(text, tokenizer) for text in (config.code_high, config.code_low)] if config.method == "gedi" else [[]]
    )
    if len(codes) == 2 and codes[0] == codes[1]:
        raise OptionError(
            f"the control codes {config.code_high!r} and {config.code_low!r} are the same tokens.",
            "give --code-high and --code-low that the tokenizer tells apart.",
        )
    heads = [[bos, *code] for code in codes]
    positions = getattr(backbone, "max_position_embeddings", None) or config.max_length + max(map(len, heads))
    end: Any = tokenizer.eos_token_id
    return Frame(heads, end, min(config.max_length, positions - max(map(len, heads))))


def _code(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids or tokenizer.unk_token_id in ids:
        raise OptionError(
            f"the tokenizer does not know the control code {text!r}.", "give --code-high and --code-low that it knows."
        )
    return ids
