"""A rehearsal of the contest: all pieces with a toy language model, made-up texts and very few steps, on a CPU.

It shows that the pieces fit together. Its numbers mean nothing. Commands run inside one process, one after another,
since starting them would take most of the time.
"""

import contextlib
import io
import json
import runpy
import sys
import traceback
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

from bases import CONVERTED, EMBEDDED, BaseModel
from jobs import RADQ, Job

from radq.cli import main
from radq.toy import make_reviews, make_toy

TOY = "toy"
NUM_TEXTS, NUM_PROMPTS = 200, 24
TRAINING = {
    "max_steps": 10,
    "batch_size": 16,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "max_length": 32,
}
SMALLER = {  # where a training has such a setting
    "num_layers": 1,
    "readout_layers": 1,
    "readout_width": 16,
    "num_prefixes": 64,
    "lora_rank": 2,
    "micro_batch_size": 16,
    "head_learning_rate": 1e-2,
    "backbone_dtype": "float32",
}
SWEEP = {"base": TOY, "samples": 2, "max_new_tokens": 6, "batch_size": 1000, "dtype": "float32", "resamples": 20}
BASE_NAMES = ("embedded", CONVERTED)
LARGEST_K = 20  # the toy has few tokens
OWN_TEXTS = ["--base", TOY, "--number", "200", "--tokens", "20", "--batch-size", "100", "--dtype", "float32"]


def prepare_rehearsal() -> None:
    """Write the toy and made-up data, unless they are there."""
    if Path(TOY).exists():
        return
    Path("data").mkdir(exist_ok=True)
    reviews = make_reviews(NUM_TEXTS)
    names = {"sentiment": "sentiment", "sst2-dev": "sentiment", "toxicity": "toxicity"}
    kinds = product(("sentiment", "toxicity"), ("", "-unseen"))
    names |= {f"judge-{attribute}{end}": attribute for attribute, end in kinds}
    for name, attribute in names.items():
        _write(name, [{"text": text, attribute: round(label)} for text, label in reviews])
    beginnings = [" ".join(text.split()[:3]) for text, _ in reviews]
    for name in ("write-sentiment", "write-toxicity"):
        _write(name, [{"prompt": text} for text in beginnings])
    for kind, name in product(("", "dev-"), ("neutral", "negative", "rtp")):
        _write(kind + name, [{"prompt": text} for text in beginnings[:NUM_PROMPTS]])
    make_toy(TOY)


def _write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Rehearsal(BaseModel):
    """The settings of a base model, shrunk, with the toy in its place."""

    of: BaseModel = EMBEDDED

    def prepare(self) -> None:
        prepare_rehearsal()

    def fit_training(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return shrink_training(self.of.fit_training(name, settings))

    def fit_own_texts(self, job: Job) -> Job:
        return shrink_own_texts(self.of.fit_own_texts(job))

    def fit_sweep(self, settings: dict[str, Any]) -> dict[str, Any]:
        return shrink_sweep(self.of.fit_sweep(settings))


def shrink_training(settings: dict[str, Any]) -> dict[str, Any]:
    smaller = {name: value for name, value in SMALLER.items() if name in settings}
    models = {name: TOY for name in ("backbone", "base") if settings.get(name) in BASE_NAMES}
    kept = {name: value for name, value in settings.items() if name != "epochs"}
    codes = {"code_high": "good", "code_low": "bad"} if settings.get("method") == "gedi" else {}  # words of the toy
    return kept | smaller | models | codes | TRAINING


def shrink_sweep(settings: dict[str, Any]) -> dict[str, Any]:
    trained = next(use["judge"] for use in settings["judges"].values() if use["judge"].startswith("reward:"))
    judges = {name: use | {"judge": _judge_at_hand(use["judge"], trained)} for name, use in settings["judges"].items()}
    few = {"top_k": [min(k, LARGEST_K) for k in settings["top_k"]]}
    return settings | SWEEP | {"judges": judges} | few


def _judge_at_hand(judge: str, other: str) -> str:
    """The judge, or another one in place of an ONNX model whose folder is not there."""
    kind, _, folder = judge.partition(":")
    return other if kind == "onnx" and not Path(folder).exists() else judge


def shrink_own_texts(job: Job) -> Job:
    return replace(job, command=[*job.command, *OWN_TEXTS])  # the last of equal options counts


def run_here(job: Job, log: TextIO) -> tuple[int, str]:
    """Run a radq command or a script inside this process; return its exit code and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(log):
        try:
            code = main(job.command[len(RADQ) :]) if job.command[: len(RADQ)] == RADQ else _run_script(job.command[1:])
        except (Exception, SystemExit):
            traceback.print_exc()
            code = 1
    return code, printed.getvalue()


def _run_script(argv: list[str]) -> int:
    with patch.object(sys, "argv", argv):
        runpy.run_path(argv[0], run_name="__main__")
    return 0
