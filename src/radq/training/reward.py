"""A training run of a reward model: from settings to a folder with the model, metrics and checkpoints.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

If several processes are launched, each of them calls `train`, and the first one writes.
"""

import warnings
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.label_scale import LabelRules
from radq.data.tables import Rows
from radq.errors import DataError, ModelError, OptionError
from radq.files import explained_writing, fingerprint_tensors
from radq.models.config import simplify_ranges
from radq.models.kinds import RadQ, RadV
from radq.models.loading import find_backbone, load_causal_lm, load_config, max_positions, num_logits
from radq.models.readout import check_base
from radq.models.reward import RewardModel
from radq.sources.model_source import ModelSource
from radq.training.candidates import CandidateMaker, choose_prompts
from radq.training.config import RewardTrainingConfig
from radq.training.losses import LOSSES
from radq.training.outcome import warn_of_chance
from radq.training.reward_trainer import RewardTrainer, RoundsCallback
from radq.training.run import Start, TrainingRun, first_process_first, write_results
from radq.training.run_folder import check_resumed, find_resumed_checkpoint, scales_of_model
from radq.training.teacher import Teacher, TextSource, check_teacher, load_teacher, load_text_teacher
from radq.training.token_cache import (
    TokenCache,
    cache_targets,
    describe_states,
    measure_states,
    prepare_states,
    target_ranges,
)
from radq.training.trainer_setup import num_steps, training_precision


def train(
    config: RewardTrainingConfig,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    data: Rows = None,
    eval_data: Rows = None,
) -> dict[str, float]:
    """Train or distil a reward model into the folder `config.out`, and return the final metrics.

    Args:
        resume: go on from the last checkpoint of the run in that folder.
        overwrite: delete the run in that folder and start again.
        progress: print what happens.
        data: rows to train on: a Dataset, also a streamed one, a DataFrame, or any iterable of dictionaries. They are
            read once and kept in the cache.
        eval_data: rows to evaluate on, given in the same way.
    """
    return RewardRun(config, resume, overwrite, progress, data, eval_data).train()


class RewardRun(TrainingRun[RewardTrainingConfig]):
    """A run of a reward model: its teacher, its model and its data, and what is computed before it is trained."""

    teacher: Teacher | None
    model: RewardModel

    def train(self) -> dict[str, float]:
        """Train the model, save it, and return the metrics."""
        trained = self._find_beginning()
        with first_process_first():  # the others find the data tokenised
            self._load_rows(_describe_start(self.config, trained))
        self.model = _make_model(self.config, trained, self.teacher)
        self._note_labels()
        contents = self._fingerprint()
        maker = self._prepare_candidates()
        if maker is not None:
            contents |= {"base": maker.base_fingerprint, "prompts": maker.prompt_fingerprint}
        states = self._prepare_states(contents["backbone"])
        check_resumed(self.out, self.config, contents, self.resume)
        checkpoint = find_resumed_checkpoint(self.out, self.resume)
        trainer = RewardTrainer(self.model, self.config, self.data, self.eval_data, self.teacher, self.progress)
        self.begin(contents)
        if maker is not None:
            trainer.add_callback(RoundsCallback(trainer, maker))
        self._store_targets(trainer, contents.get("teacher") or contents.get("teacher_classifier"))
        with first_process_first():
            for part in states:
                part.make(self.shows)
        metrics = self.fit(trainer, checkpoint) | ({} if maker is None else maker.metrics)
        metrics |= ({} if self.teacher is None else self.teacher.metrics) | measure_states(states)
        self._finish(trainer, metrics)
        return metrics

    # --- the beginning ---

    def _find_beginning(self) -> RewardModel | None:
        """Load the teacher, and the reward model to train further; None if a backbone is to be loaded."""
        config = self.config
        self.teacher = load_teacher(config.teacher) if config.teacher else None
        if self.teacher is not None and self.shows and (note := self.teacher.describe_ranges()):
            print(note)
        trained = _load_trained(config, self.teacher)
        rank = config.lora_rank or 0 if trained is None or config.init else trained.config.lora_rank  # that of a copy
        self.config = config = replace(config, lora_rank=rank)
        if config.teacher_classifier:
            self.teacher = load_text_teacher(config, _describe_start(config, trained).tokenizer)
        return trained

    def _load_rows(self, start: Start) -> None:
        """Load the data; the scores of a classifier of whole texts become its labels."""
        config, teacher = self.config, self.teacher
        scales, model = None, None if teacher is None else teacher.model
        if model is not None and config.attributes and config.label_rules == LabelRules():
            scales = scales_of_model(model.config, config.teacher)  # labels are compared with the teacher's rewards
        self.load_data(start, scales)
        if config.compares:
            return
        if teacher is None or config.learns_tokens:
            _check_labels(self.data, self.config.attributes, config.loss)
            return
        (source,) = teacher.sources
        assert isinstance(source, TextSource)
        parts = {part.folder: part for part in (self.data, self.eval_data) if part is not None}  # two may share texts
        scores = {folder: source.score_data(part, self.shows) for folder, part in parts.items()}
        if not config.base:
            source.release()
        self.data = self.data.with_labels(scores[self.data.folder])
        if self.eval_data is not None:
            self.eval_data = self.eval_data.with_labels(scores[self.eval_data.folder])
        _check_labels(self.data, teacher.attributes, config.loss)

    def _note_labels(self) -> None:
        """Store the range and the scales of the labels with the model; a student has those of its teacher.

        Pairs have neither. The range of their rewards is measured after training.
        """
        stored, data = self.model.config, self.data
        if self.config.compares:
            stored.label_scales = None
        elif not self.config.learns_tokens:
            stored.response_range = simplify_ranges(data.label_ranges, len(data.label_ranges))
            own = None if self.config.teacher_classifier else [asdict(scale) for scale in data.scales]
            stored.label_scales = own

    def _fingerprint(self) -> dict[str, str]:
        """Compute fingerprints of all that the run depends on.

        The weights with which training begins count although a checkpoint replaces them: else a run would go on as if
        the model had not changed.
        """
        config = self.config
        frozen = {name: value for name, value in self.model.named_parameters() if not value.requires_grad}
        named = {"init": config.init, "backbone_files": config.backbone, "base_files": config.base}
        files = {name: ModelSource.find(given).fingerprint for name, given in named.items() if given}
        contents = self.fingerprint_data(backbone=fingerprint_tensors(sorted(frozen.items())), **files)
        if self.teacher is not None:
            contents["teacher" if config.teacher else "teacher_classifier"] = self.teacher.fingerprint
        return contents

    # --- what is computed before training ---

    def _prepare_candidates(self) -> CandidateMaker | None:
        """Load the base model and find its prompts; nothing is written or computed before all of them are checked."""
        config, student, teacher = self.config, self.model, self.teacher
        if teacher is None or not config.base:
            return None
        base = ModelSource.find(config.base)
        tokenizer, lm = _require_tokenizer(base.find_tokenizer(), config.base), load_causal_lm(base)
        student.reader.check_vocabulary(num_logits(lm), tokenizer, config.base)
        if student.readout is not None:
            check_base(student.readout.sketch, find_backbone(lm, config.base), repr(config.base))
        contexts = [context for context in (teacher.context, student.reader.context) if context is not None]
        prompts = choose_prompts(config, self.data, self.eval_data, lm, tokenizer, min(contexts, default=None))
        known = min(student.vocabulary.num_known, teacher.num_known)
        return CandidateMaker(lm, tokenizer, teacher, prompts, config, known, self.shows)

    def _prepare_states(self, base_fingerprint: str) -> list[TokenCache]:
        """Find the stored states of the data, if they are wanted, and say how much room they take."""
        config, parts = self.config, [part for part in (self.data, self.eval_data) if part is not None]
        if not config.cache_states:
            return []
        states = prepare_states(self.model, parts, config.cache, base_fingerprint, training_precision(config))
        if self.shows and self.model.readout is not None:
            print(describe_states(states, len(self.model.readout.layers)))
        return states

    def _store_targets(self, trainer: RewardTrainer, fingerprint: str | None) -> None:
        """Compute the teacher's rewards of all tokens, and let the data read them from files of the run folder.

        That is left out if the teacher is quick and the texts are read once. The student may give any of these
        rewards, if their range was not known before.
        """
        config, teacher = self.config, self.teacher
        if teacher is None or fingerprint is None or not config.learns_tokens:
            return
        steps = [num_steps(part, len(self.data)) for part in (config, replace(config, epochs=1.0, max_steps=-1))]
        reads_again = steps[0] > steps[1]
        if not (teacher.is_slow or config.cache_targets or (reads_again and not config.online)):
            return
        for part in (self.data, self.eval_data):
            if part is not None:
                with first_process_first():
                    precision = training_precision(config)
                    cache_targets(self.out / "targets", part, teacher, fingerprint, precision, self.shows)
        if teacher.ranges is None and not config.base:
            ranges = target_ranges(self.data)
            self.model.config.response_range = simplify_ranges(ranges, len(ranges))

    def _finish(self, trainer: RewardTrainer, metrics: dict[str, float]) -> None:
        """Save the model and its metrics, and warn if it has learnt nothing."""
        with explained_writing(self.out):
            weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None  # from all
            if self.processes.is_main_process:
                self.model.save_pretrained(self.out, state_dict=weights)
        if self.processes.is_main_process:
            write_results(self.out, metrics, indent=2)
            warn_of_chance(metrics, self.model.config.attributes)


# --- the model ---


def _load_trained(config: RewardTrainingConfig, teacher: Teacher | None) -> RewardModel | None:
    """Load a reward model to train further, or copy the teacher, with its adapters and a new head.

    The result is None if a backbone is to be loaded.
    """
    torch.manual_seed(config.seed)
    if config.init:
        model = RewardModel.from_pretrained(config.init, dtype=torch.float32)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(
                f"kind is {config.kind!r}, but {config.init!r} is a {type(model).__name__}.", "change --kind or --init."
            )
        return model
    if teacher is None or config.backbone:
        return None
    if not isinstance(teacher.model, RadV):
        raise OptionError(
            f"the student cannot start as a copy of {config.teacher!r}, which is not one RAD-V.",
            "give the --backbone of the student, or a reward model as --init.",
        )
    stored = teacher.model.config
    depth = stored.backbone.num_hidden_layers  # pyright: ignore[reportOptionalMemberAccess]
    for name, own in {"lora_rank": stored.lora_rank, "num_layers": depth}.items():
        given = getattr(config, name)
        if given not in (None, own):
            raise OptionError(
                f"{name} is {given}, but the student starts as a copy of {config.teacher!r}, where it is {own}.",
                f"leave --{name.replace('_', '-')} out, or name the --backbone of another student.",
            )
    return RadQ.from_teacher(teacher.model, config.head).float()


def _make_model(config: RewardTrainingConfig, trained: RewardModel | None, teacher: Teacher | None) -> RewardModel:
    """Make the reward model with which training starts: a trained one, or a new head over a language model."""
    model = trained or _start_from_backbone(config, teacher)
    model.config.loss = "mse" if config.learns_tokens else config.loss  # also if it was trained otherwise before
    if config.attributes and config.attributes != model.config.attributes:
        raise OptionError(
            f"labels must be the attributes of {config.init or config.teacher!r}, "
            f"{', '.join(model.config.attributes)}, got {', '.join(config.attributes)}.",
            "name these columns, in this order.",
        )
    if teacher is not None:
        check_teacher(teacher, model, config.teacher or config.teacher_classifier, config.backbone or config.init)
        if teacher.ranges is not None:
            model.config.response_range = simplify_ranges(teacher.ranges, len(teacher.attributes))
        model.config.label_scales = teacher.label_scales
    if config.lora_rank and not model.config.lora_rank:
        width = model.config.backbone.hidden_size  # pyright: ignore[reportOptionalMemberAccess]
        if config.lora_rank > width:
            wrong = f"lora_rank must be at most {width}, the width of the backbone's layers, got {config.lora_rank}."
            raise OptionError(wrong, "lower --lora-rank.")
        model.add_lora(config.lora_rank, config.backbone)
    return model


def _start_from_backbone(config: RewardTrainingConfig, teacher: Teacher | None) -> RewardModel:
    torch.manual_seed(config.seed)
    attributes = config.attributes or (teacher.attributes if teacher is not None else [])
    dtype = getattr(torch, config.backbone_dtype)
    kind = RadQ if config.kind == "q" else RadV
    options: dict[str, Any] = {"dtype": dtype} | ({"head": config.head} if config.kind == "q" else {})
    if config.reads == "base":
        options |= {"num_layers": config.readout_layers, "width": config.readout_width}
        model = kind.from_base(config.backbone, attributes, **options)
        model.readout.float()  # pyright: ignore[reportOptionalMemberAccess]
    else:
        model = kind.from_backbone(config.backbone, attributes, num_layers=config.num_layers, **options)
    model.head.float()
    return model


def _describe_start(config: RewardTrainingConfig, model: RewardModel | None) -> Start:
    rank = config.lora_rank
    if model is not None:
        tokenizer, backbone, max_tokens = model.tokenizer, model.config.backbone, model.reader.context
        rank = model.config.lora_rank
    else:
        source = ModelSource.find(config.backbone)
        tokenizer, backbone = source.find_tokenizer(), load_config(source)
        positions = max_positions(backbone)
        max_tokens = None if positions is None else positions - 1  # a BOS stands before each text
    tokenizer = _require_tokenizer(tokenizer, config.backbone or config.init or config.teacher)
    assert backbone is not None
    return Start(tokenizer, backbone, max_tokens, model is None, lora=bool(rank), readout=config.reads == "base")


def _check_labels(data: RewardData, attributes: list[str], loss: str) -> None:
    """Refuse labels that the loss does not allow, and warn of labels that are the same in every row."""
    allowed = LOSSES[loss].label_range
    for attribute, (low, high) in zip(attributes, data.label_limits, strict=True):
        if low == high:
            warnings.warn(f"label {attribute!r} is {low:g} in every row: there is nothing to learn.", stacklevel=2)
        if allowed is not None and not allowed[0] <= low <= high <= allowed[1]:
            raise DataError(
                f"the loss {loss!r} needs labels from {allowed[0]:g} to {allowed[1]:g}, but {attribute!r} runs from "
                f"{low:g} to {high:g}.",
                "leave --keep-labels out, or choose another --loss.",
            )


def _require_tokenizer(tokenizer: PreTrainedTokenizerBase | None, name: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise ModelError(f"{name!r} has no tokenizer.", "put the files of its tokenizer into the folder.")
    return tokenizer
