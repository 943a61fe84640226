"""A training run of the language models that DExperts and GeDi need, from texts and labels.

    train_experts(ExpertTrainingConfig(data=["reviews.csv"], labels="praise", backbone="gpt2", out="praise"))

Texts with a label of at least the threshold are the high class, the others the low class. DExperts needs a language
model for each class, in the folders `expert` and `anti`. GeDi needs one language model that reads each text after the
control code of its class; its config.json records the codes. Texts begin with a BOS, and end with the end-of-text token
unless they were cut off.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.rows import Rows
from radq.errors import DataError, OptionError
from radq.files import MODEL_FILES, explained_writing, require_room, whole_file, whole_folder
from radq.guides.folders import ANTI_EXPERT, EXPERT
from radq.models.loading import load_causal_lm, load_config
from radq.models.vocabulary import find_bos
from radq.sources.hub import quiet
from radq.sources.model_source import ModelSource
from radq.training.arguments import make_arguments
from radq.training.checkpoints import find_checkpoints
from radq.training.checks import check_run
from radq.training.config import ExpertTrainingConfig
from radq.training.data import Start, keep_rows, load_run_data
from radq.training.expert_trainer import ExpertTrainer, TextFormat
from radq.training.plan import describe_plan
from radq.training.processes import first_process_first, join_processes
from radq.training.recipe import LONGEST
from radq.training.run_folder import (
    begin_run,
    check_resumed,
    delete_run,
    find_resumed_checkpoint,
    read_scales,
    take_settings_of_run,
)


def train_experts(
    config: ExpertTrainingConfig,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    data: Rows = None,
    eval_data: Rows = None,
) -> dict[str, float]:
    """Train the language models of a guide into the folder `config.out`, and return the final metrics.

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
    processes.wait_for_everyone()  # all have looked before one writes
    config = take_settings_of_run(out, config) if resume else config
    backbone = ModelSource.find(config.backbone)
    tokenizer = backbone.tokenizer
    text_format = _make_format(config, backbone)
    with first_process_first():
        scales = read_scales(out, config) if resume else None
        start = Start(tokenizer, load_config(backbone), text_format.max_length)
        found = load_run_data(config, start, progress and processes.is_main_process, scales)
    config, data, eval_data = found.config, found.train, found.evaluation
    parts = list(_split(config, data, eval_data))
    contents = {"data": data.fingerprint, "backbone": backbone.fingerprint}
    contents |= {} if eval_data is None else {"eval_data": eval_data.fingerprint}
    if resume:
        check_resumed(out, config, contents)
    make_arguments(config, eval_data is not None, progress)  # mistakes in them show before anything is written
    if processes.is_main_process:
        begin_run(out, config, contents, data.scales, resume)
    metrics: dict[str, float] = {}
    for part in parts:
        if progress and processes.is_main_process:
            print(f"{part.name or config.method}: {len(part.data)} texts")
        found = _train_part(config, part, text_format, tokenizer, resume, progress)
        metrics |= {f"{part.name}_{name}" if part.name else name: value for name, value in found.items()}
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


def _train_part(
    config: ExpertTrainingConfig,
    part: _Part,
    text_format: TextFormat,
    tokenizer: PreTrainedTokenizerBase,
    resume: bool,
    progress: bool,
) -> dict[str, float]:
    folder = Path(config.out) / part.name
    results = folder / "results.json"  # this file is written last, so a model with it is finished
    if resume and results.exists():
        return json.loads(results.read_text())["metrics"]
    checkpoint = find_resumed_checkpoint(folder, resume)
    processes = join_processes(config)
    processes.wait_for_everyone()  # all have looked before one writes
    if processes.is_main_process and checkpoint is None:
        delete_run(folder)
    torch.manual_seed(config.seed)
    model = load_causal_lm(config.backbone, config.num_layers, torch.float32)
    _check_disk(model, folder)
    use_cache = model.config.use_cache
    trainer = ExpertTrainer(model, replace(config, out=str(folder)), text_format, part.data, part.eval_data, progress)
    trainer.run_folder = config.out
    if trainer.is_fsdp_enabled:
        raise OptionError("experts cannot be trained with FSDP.", "use accelerate launch --multi_gpu without FSDP.")
    if progress and trainer.is_world_process_zero():
        print(describe_plan(trainer))
    metrics = trainer.train_and_evaluate(checkpoint)
    if trainer.is_world_process_zero():
        model.config.use_cache = use_cache  # the Trainer has turned it off
        with explained_writing(folder):
            _save_model(trainer, folder, tokenizer)
            with whole_file(results) as temporary:
                temporary.write_text(json.dumps({"metrics": metrics}))
        for finished in find_checkpoints(folder):  # three times as large as the model, and the next part needs the room
            shutil.rmtree(finished)
    return metrics


def _check_disk(model: Any, folder: Path) -> None:
    """Refuse to begin without room for a checkpoint, with two numbers of AdamW for each weight, and for the model."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    hint = "make room on the disk, or name a folder on another one by --out."
    require_room(folder, 4 * weights, "a checkpoint and the model", hint)


def _save_model(trainer: ExpertTrainer, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a plain language model; for GeDi, its config.json also has the control codes and the scale."""
    model: Any = trainer.model
    if trainer.config.method == "gedi":
        codes = [beginning[1:] for beginning in trainer.text_format.beginnings]
        model.config.gedi = {"codes": codes, "scale": model.gedi_scale.item()}
        del model.gedi_scale
    with whole_folder(folder, replaces=MODEL_FILES) as temporary, quiet():
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _make_format(config: ExpertTrainingConfig, source: ModelSource) -> TextFormat:
    backbone, tokenizer = load_config(source), source.tokenizer
    bos = find_bos(backbone, tokenizer)
    words = (config.code_high, config.code_low)
    codes = [_encode_code(word, tokenizer) for word in words] if config.method == "gedi" else [[]]
    if len(codes) == 2 and codes[0] == codes[1]:
        raise OptionError(
            f"the control codes {config.code_high!r} and {config.code_low!r} are the same tokens.",
            "give a --code-high and a --code-low with different tokens.",
        )
    beginnings = [[bos, *code] for code in codes]
    longest = max(map(len, beginnings))
    max_length = config.max_length or LONGEST
    positions = getattr(backbone, "max_position_embeddings", None) or max_length + longest
    end: Any = tokenizer.eos_token_id
    return TextFormat(beginnings, end, min(max_length, positions - longest))


def _encode_code(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids or tokenizer.unk_token_id in ids:
        raise OptionError(
            f"the tokenizer does not know the control code {text!r}.",
            "give words from its vocabulary as --code-high and --code-low.",
        )
    return ids
