"""A training run of a reward model: from settings to a folder with the model, metrics and checkpoints.

    train(RewardTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

If several processes are launched, each of them calls `train`, and the first one writes.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radq.data.dataset import RewardData
from radq.data.label_scale import LabelRules
from radq.data.rows import Rows
from radq.errors import ModelError, OptionError
from radq.files import explained_writing, fingerprint_tensors, whole_file
from radq.models.config import simplify_ranges
from radq.models.loading import (
    find_backbone,
    load_causal_lm,
    load_config,
    max_positions,
    num_logits,
)
from radq.models.rad_q import RadQ
from radq.models.rad_v import RadV
from radq.models.readout import check_base
from radq.models.reward import RewardModel
from radq.sources.model_source import ModelSource
from radq.training.arguments import choose_precision, training_device
from radq.training.candidates import CandidateMaker
from radq.training.checks import check_run
from radq.training.config import RewardTrainingConfig
from radq.training.data import RunData, Start, check_labels, keep_rows, load_run_data, scales_of_model
from radq.training.outcome import warn_of_chance
from radq.training.pair_trainer import PairTrainer
from radq.training.plan import describe_plan
from radq.training.prefixes import check_room, choose_prompts
from radq.training.processes import first_process_first, join_processes
from radq.training.recipe import num_steps
from radq.training.reward_trainer import RewardTrainer
from radq.training.rounds import RoundsCallback
from radq.training.run_folder import (
    RESULTS,
    begin_run,
    check_resumed,
    find_resumed_checkpoint,
    read_scales,
    take_settings_of_run,
)
from radq.training.span_trainer import SpanTrainer
from radq.training.states import StateCache, measure_states, prepare_states
from radq.training.targets import cache_targets, target_ranges, target_shape
from radq.training.teacher import Teacher, check_teacher, load_teacher
from radq.training.text_source import label_data, load_text_teacher, measure_teacher


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
    config = keep_rows(config, data, eval_data, progress)
    check_run(config, resume, overwrite)
    out = Path(config.out)
    processes = join_processes(config)
    shows = progress and processes.is_main_process
    processes.wait_for_everyone()  # all have looked before one writes
    config = take_settings_of_run(out, config) if resume else config
    teacher = load_teacher(config.teacher) if config.teacher else None
    if teacher is not None and shows and (note := teacher.describe_ranges()):
        print(note)
    copied = _find_copied(config, teacher)
    config = replace(config, lora_rank=_find_rank(config, copied))
    model = _start_from_trained(config, copied)
    if config.teacher_classifier:
        teacher = load_text_teacher(config, _describe_start(config, model).tokenizer)
    with first_process_first():  # the others find the data tokenised
        found = _load_data(config, model, teacher, resume, shows)
    config, data, eval_data = found.config, found.train, found.evaluation
    model = _make_model(config, model, teacher)
    _note_labels(model, data, config)
    contents = _fingerprint_contents(data, eval_data, model, config, teacher)
    maker = None
    if teacher is not None and config.base:
        maker = _prepare_candidates(config, model, teacher, found, shows)
        contents |= {"base": maker.base_fingerprint, "prompts": maker.prompt_fingerprint}
        contents["base_files"] = ModelSource.find(config.base).fingerprint
    states = _prepare_states(config, model, found, contents["backbone"], shows) if config.cache_states else []
    if resume:
        check_resumed(out, config, contents)
    checkpoint = find_resumed_checkpoint(out, resume)
    make_trainer = PairTrainer if config.compares else SpanTrainer if config.spans else RewardTrainer
    trainer = make_trainer(model, config, data, eval_data, teacher, progress)
    if processes.is_main_process:
        begin_run(out, config, contents, data.scales, resume)
    if maker is not None:
        _make_candidates(trainer, maker)
    if teacher is not None and config.learns_tokens and (teacher.is_slow or _wants_stored_targets(config, len(data))):
        _store_targets(trainer, teacher, contents["teacher" if config.teacher else "teacher_classifier"], progress)
    with first_process_first():
        for part in states:
            part.make(shows)
    if shows:
        print(describe_plan(trainer))
    metrics = trainer.train_and_evaluate(checkpoint) | ({} if maker is None else maker.metrics)
    metrics |= measure_teacher(teacher) | measure_states(states)
    _save_model(model, trainer, out)
    if processes.is_main_process:
        with explained_writing(out), whole_file(out / RESULTS) as file:
            file.write_text(json.dumps(metrics, indent=2))
        warn_of_chance(metrics, model.config.attributes)
    return metrics


# --- the model ---


def _find_copied(config: RewardTrainingConfig, teacher: Teacher | None) -> RadV | None:
    """Find the teacher of which the student begins as a copy; None if it begins otherwise."""
    if teacher is None or config.backbone or config.init:
        return None
    if not isinstance(teacher.model, RadV):
        raise OptionError(
            f"the student cannot start as a copy of {config.teacher!r}, which is not one RAD-V.",
            "give the --backbone of the student, or a reward model as --init.",
        )
    return teacher.model


def _find_rank(config: RewardTrainingConfig, teacher: RadV | None) -> int:
    """Find the rank of the adapters; a copy of the teacher has the same rank as the teacher."""
    if teacher is None:
        return config.lora_rank or 0
    depth = teacher.config.backbone.num_hidden_layers  # pyright: ignore[reportOptionalMemberAccess]
    for name, own in {"lora_rank": teacher.config.lora_rank, "num_layers": depth}.items():
        given = getattr(config, name)
        if given not in (None, own):
            raise OptionError(
                f"{name} is {given}, but the student starts as a copy of {config.teacher!r}, where it is {own}.",
                f"leave --{name.replace('_', '-')} out, or name the --backbone of another student.",
            )
    return teacher.config.lora_rank


def _start_from_trained(config: RewardTrainingConfig, teacher: RadV | None) -> RewardModel | None:
    """Load a reward model to train further, or copy the teacher with a new head; None if a backbone is to be loaded."""
    torch.manual_seed(config.seed)
    if config.init:
        model = RewardModel.from_pretrained(config.init, dtype=torch.float32)
        if isinstance(model, RadQ) != (config.kind == "q"):
            raise OptionError(
                f"kind is {config.kind!r}, but {config.init!r} is a {type(model).__name__}.", "change --kind or --init."
            )
        return model
    return None if teacher is None else RadQ.from_teacher(teacher, config.head).float()


def _make_model(config: RewardTrainingConfig, trained: RewardModel | None, teacher: Teacher | None) -> RewardModel:
    """Make the reward model with which training starts: a trained one, or a new head over a language model."""
    model = trained or _start_from_backbone(config, teacher)
    model.config.loss = (
        "mse" if config.learns_tokens else config.loss
    )  # also of a model that was trained otherwise before
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
        _check_rank(config.lora_rank, model)
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


def _check_rank(rank: int, model: RewardModel) -> None:
    width = model.config.backbone.hidden_size  # pyright: ignore[reportOptionalMemberAccess]
    if rank > width:
        raise OptionError(
            f"lora_rank must be at most {width}, the width of the backbone's layers, got {rank}.", "lower --lora-rank."
        )


def _save_model(model: RewardModel, trainer: RewardTrainer, out: Path) -> None:
    with explained_writing(out):
        weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None  # from all
        if trainer.is_world_process_zero():
            model.save_pretrained(out, state_dict=weights)


# --- the data ---


def _load_data(
    config: RewardTrainingConfig, model: RewardModel | None, teacher: Teacher | None, resume: bool, progress: bool
) -> RunData[RewardTrainingConfig]:
    scales = read_scales(Path(config.out), config) if resume else None
    rewards = None if teacher is None else teacher.model
    if scales is None and rewards is not None and config.attributes and config.label_rules == LabelRules():
        scales = scales_of_model(rewards.config, config.teacher)  # labels are compared with the teacher's rewards
    found = load_run_data(config, _describe_start(config, model), progress, scales)
    if config.compares:
        return found
    if teacher is None or config.learns_tokens:
        check_labels(found.train, config.attributes, config.loss)
        return found
    found = label_data(teacher, found, progress)
    check_labels(found.train, teacher.attributes, config.loss)
    return found


def _describe_start(config: RewardTrainingConfig, model: RewardModel | None) -> Start:
    rank = config.lora_rank
    if model is not None:
        tokenizer, backbone, max_tokens = model.tokenizer, model.config.backbone, model.max_tokens
        rank = model.config.lora_rank
    else:
        source = ModelSource.find(config.backbone)
        tokenizer, backbone = source.find_tokenizer(), load_config(source)
        positions = max_positions(backbone)
        max_tokens = None if positions is None else positions - 1  # a BOS stands before each text
    if tokenizer is None:
        source = config.backbone or config.init or config.teacher
        raise ModelError(f"{source!r} has no tokenizer.", "put the files of its tokenizer into the folder.")
    assert backbone is not None
    return Start(
        tokenizer, backbone, max_tokens, may_cut_layers=model is None, lora=bool(rank), readout=config.reads == "base"
    )


def _note_labels(model: RewardModel, data: RewardData, config: RewardTrainingConfig) -> None:
    """Store the range and the scales of the labels with the model; a student has those of its teacher.

    Pairs have neither. The range of their rewards is measured after training.
    """
    if config.compares:
        model.config.label_scales = None
    elif not config.learns_tokens:
        model.config.response_range = simplify_ranges(data.label_ranges, len(data.label_ranges))
        model.config.label_scales = None if config.teacher_classifier else [asdict(scale) for scale in data.scales]


def _fingerprint_contents(
    data: RewardData,
    eval_data: RewardData | None,
    model: RewardModel,
    config: RewardTrainingConfig,
    teacher: Teacher | None,
) -> dict[str, str]:
    """Compute fingerprints of all that a run depends on.

    The weights with which training begins count although a checkpoint replaces them: else a run would go on as if the
    model had not changed.
    """
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    contents = {"data": data.fingerprint, "backbone": fingerprint_tensors(sorted(frozen.items()))}
    for name, model_name in (("init", config.init), ("backbone_files", config.backbone)):
        if model_name:
            contents[name] = ModelSource.find(model_name).fingerprint
    if eval_data is not None:
        contents["eval_data"] = eval_data.fingerprint
    if teacher is not None:
        contents["teacher" if config.teacher else "teacher_classifier"] = teacher.fingerprint
    return contents


def _wants_stored_targets(config: RewardTrainingConfig, num_texts: int) -> bool:
    """Whether the teacher's rewards are computed once: unless settings say otherwise, if texts are read repeatedly."""
    once = replace(config, epochs=1.0, max_steps=-1)
    return config.cache_targets or (num_steps(config, num_texts) > num_steps(once, num_texts) and not config.online)


def _store_targets(trainer: RewardTrainer, teacher: Teacher, fingerprint: str, progress: bool) -> None:
    """Compute the teacher's rewards of all tokens, and let the data read them from files of the run folder.

    The student may give any of these rewards, if their range was not known before.
    """
    data: list[Any] = [trainer.train_dataset, trainer.eval_dataset]
    for part in (part for part in data if part is not None):
        part.targets = _map_targets(part, teacher, fingerprint, trainer, progress)
    if teacher.ranges is None and not trainer.config.base:
        ranges = target_ranges(data[0])
        trainer.reward_model.config.response_range = simplify_ranges(ranges, len(ranges))


def _map_targets(
    data: RewardData, teacher: Teacher, fingerprint: str, trainer: RewardTrainer, progress: bool
) -> np.ndarray:
    """Map a file of the run folder with the teacher's rewards of all tokens of these rows, (tokens, a), into memory."""
    folder = Path(trainer.config.out) / "targets"
    precision = choose_precision(trainer.config.precision, training_device(trainer.config))
    with first_process_first(), teacher.computing_in(precision):
        file = cache_targets(folder, data, teacher, fingerprint, trainer.args.train_batch_size, progress)
    return np.memmap(file, np.float32, "r", shape=target_shape(data, teacher))


def _prepare_states(
    config: RewardTrainingConfig,
    model: RewardModel,
    data: RunData[RewardTrainingConfig],
    base_fingerprint: str,
    progress: bool,
) -> list[StateCache]:
    """Find the stored states of the data, and say how much room they take."""
    parts = [part for part in (data.train, data.evaluation) if part is not None]
    precision = choose_precision(config.precision, training_device(config))
    states = prepare_states(model, parts, config.cache, base_fingerprint, precision)
    if progress:
        print(*(part.describe() for part in states), sep="\n")
    return states


# --- candidates ---


def _prepare_candidates(
    config: RewardTrainingConfig,
    student: RewardModel,
    teacher: Teacher,
    data: RunData[RewardTrainingConfig],
    progress: bool,
) -> CandidateMaker:
    """Load the base model and find its prompts; nothing is written or computed before all of them are checked."""
    source = ModelSource.find(config.base)
    tokenizer = source.find_tokenizer()
    if tokenizer is None:
        raise ModelError(f"{config.base!r} has no tokenizer.", "put the files of its tokenizer into the folder.")
    lm = load_causal_lm(source)
    student.reader.check_vocabulary(num_logits(lm), tokenizer, config.base)
    if student.readout is not None:
        check_base(student.readout.sketch, find_backbone(lm, config.base), repr(config.base))
    prompts = choose_prompts(config, data.train, data.evaluation, lm, tokenizer)
    room = [context for context in (teacher.context, student.max_tokens) if context is not None]
    check_room(prompts, config, min(room, default=None))
    vocabularies = [vocabulary for source in teacher.sources for vocabulary in source.vocabularies]
    known = min(vocabulary.num_known for vocabulary in [student.vocabulary, *vocabularies])
    maker = CandidateMaker(lm, tokenizer, teacher, prompts, config, known, progress)
    maker.check_disk()
    return maker


def _make_candidates(trainer: RewardTrainer, maker: CandidateMaker) -> None:
    """Make the candidates of the first round.

    Where the range of the teacher's rewards is not known, the student gets the range of their rewards.
    """
    rounds = RoundsCallback(trainer, maker)
    trainer.add_callback(rounds)
    if maker.teacher.ranges is None:
        ranges, data = rounds.candidates.ranges, trainer.train_dataset
        if isinstance(data, RewardData) and not trainer.config.learns_tokens:
            both = zip(ranges, data.label_limits, strict=True)
            ranges = [(min(lows), max(highs)) for lows, highs in (zip(*pair, strict=True) for pair in both)]
        trainer.reward_model.config.response_range = simplify_ranges(ranges, len(ranges))
