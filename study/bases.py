"""The language models that a contest steers, and the settings that fit each.

A contest is described for SmolLM2-135M (contest.py, methods.py). For another base model, names and sizes are replaced.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs import Job, write_json
from methods import ASKED, BASE, OURS, TASKS, Method

FILE = "base.json"  # names the base model of a folder
CONVERTED = "base"  # the folder of a base model that is not embedded
ALL_PROMPTS = 1000  # of each task


@dataclass(frozen=True)
class BaseModel:
    """The embedded base model; others change what its settings say."""

    name: str = "embedded"
    title: str = "SmolLM2-135M-Instruct"
    page: str = "contest"  # the name of its page in docs
    layers: int = 30
    first_layers: int = 12  # that small models have
    prompts: int = ALL_PROMPTS  # of each task, for the test
    methods: tuple[str, ...] = ()  # that are compared; empty for all
    memory: float = 1.0  # of a job, as a multiple
    experts_memory: float = 1.0  # of a training of whole language models, likewise

    def takes_part(self, method: str) -> bool:
        return not self.methods or method in self.methods

    def prepare(self) -> None:
        """Check that the base model is there."""

    def fit_training(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    def fit_method(self, method: Method) -> Method:
        return method

    def fit_own_texts(self, job: Job) -> Job:
        return job

    def fit_sweep(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    def fit_memory(self, job: Job) -> Job:
        trains_experts = "train-experts" in job.command
        return replace(job, memory=job.memory * (self.experts_memory if trains_experts else self.memory))


READOUT = {"reads": "base", "backbone_dtype": "bfloat16", "readout_layers": 5, "readout_width": 1024}
READOUT_RATE = 3e-4  # wider states want a smaller learning rate
FEWER_TEXTS = ("--batch-size", "2500")  # that are written together: they fill a GPU, and more only take memory
EXPERTS = "dexperts-2e-5"  # of the two learning rates, the one for larger models


@dataclass(frozen=True)
class TinyLlama(BaseModel):
    """TinyLlama-1.1B-Chat, which has another tokenizer.

    Classifier and values are readouts, too, so that the base model is never trained. Judges remain those over SmolLM2.
    """

    name: str = "tinyllama"
    title: str = "TinyLlama-1.1B-Chat"
    page: str = "contest-1b"
    layers: int = 22
    first_layers: int = 6
    prompts: int = ALL_PROMPTS // 2
    methods: tuple[str, ...] = (BASE, OURS, "rad-q", "dexperts", ASKED)
    memory: float = 1.5
    experts_memory: float = 2.0

    def prepare(self) -> None:
        if not Path(CONVERTED, "config.json").exists():
            sys.exit("error: the base model is missing; write it by run.py convert FILE.gguf --folder FOLDER.")

    def fit_training(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        if name.startswith("judge-"):
            return settings
        models = {key: CONVERTED for key in ("backbone", "base") if settings.get(key) == "embedded"}
        if "method" in settings:
            return settings | models | {"micro_batch_size": settings["micro_batch_size"] // 2}
        if "lora_rank" in settings:
            return settings | models | {"num_layers": self.first_layers}
        kept = {key: value for key, value in settings.items() if key != "init"}
        return kept | models | READOUT | {"backbone": CONVERTED, "learning_rate": READOUT_RATE}

    def fit_method(self, method: Method) -> Method:
        return replace(method, models=(EXPERTS,)) if EXPERTS in method.models else method

    def fit_own_texts(self, job: Job) -> Job:
        return replace(job, command=[*job.command, "--base", CONVERTED, "--dtype", "bfloat16", *FEWER_TEXTS])

    def fit_sweep(self, settings: dict[str, Any]) -> dict[str, Any]:
        prompts = [part | {"limit": part["limit"] * self.prompts // ALL_PROMPTS} for part in settings["prompts"]]
        return settings | {"base": CONVERTED, "prompts": prompts, "dtype": "bfloat16"}


EMBEDDED = BaseModel()
BASES = {base.name: base for base in (EMBEDDED, TinyLlama())}
assert all(len(task.groups) * task.test_prompts == ALL_PROMPTS for task in TASKS.values())


def read_base(folder: Path) -> BaseModel:
    """The base model of a contest's folder."""
    file = folder / FILE
    return BASES[json.loads(file.read_text())["base"]] if file.exists() else EMBEDDED


def claim_folder(base: BaseModel) -> None:
    """Note the base model of this folder, or refuse one that is not that of its earlier runs."""
    if Path(FILE).exists() or Path("models").exists():
        if read_base(Path()) != base:
            sys.exit(f"error: this folder holds a contest of {read_base(Path()).title}; use another.")
    else:
        write_json(FILE, {"base": base.name})
