"""A rehearsal of the study's contest: all jobs with a toy language model, made-up texts and very few steps, on a CPU.

Commands run inside this process, one after another, since starting them would take most of the time.
"""

import contextlib
import io
import json
import runpy
import traceback
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest

from radq.cli import main
from radq.toy import make_reviews, make_toy

TOY = "toy"
NUM_TEXTS, NUM_PROMPTS = 200, 24
LARGEST_K = 20  # the toy has few tokens
TRAINING = {"max_steps": 10, "batch_size": 16, "learning_rate": 1e-2, "warmup_steps": 1, "max_length": 32}
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
OWN_TEXTS = ["--base", TOY, "--number", "200", "--tokens", "20", "--batch-size", "100", "--dtype", "float32"]


def make_rehearsal(models: ModuleType) -> Any:
    """The embedded base model of the study with its settings shrunk, and the toy in its place."""

    class Rehearsal(models.BaseModel):
        def prepare(self) -> None:
            write_data()

        def fit_training(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
            return shrink_training(settings)

        def fit_sweep(self, settings: dict[str, Any]) -> dict[str, Any]:
            return shrink_sweep(settings)

    return Rehearsal(own_texts=tuple(OWN_TEXTS))  # the last of equal options counts


def write_data() -> None:
    """Write the toy and made-up data, unless they are there."""
    if Path(TOY).exists():
        return
    Path("data").mkdir(exist_ok=True)
    reviews = make_reviews(NUM_TEXTS)
    names = {"sentiment": "sentiment", "sst2-dev": "sentiment", "toxicity": "toxicity"}
    kinds = product(("sentiment", "toxicity"), ("", "-unseen"))
    names |= {f"judge-{attribute}{end}": attribute for attribute, end in kinds}
    for name, attribute in names.items():
        write(name, [{"text": text, attribute: round(label)} for text, label in reviews])
    beginnings = [" ".join(text.split()[:3]) for text, _ in reviews]
    for name in ("write-sentiment", "write-toxicity"):
        write(name, [{"prompt": text} for text in beginnings])
    for kind, name in product(("", "dev-"), ("neutral", "negative", "rtp")):
        write(kind + name, [{"prompt": text} for text in beginnings[:NUM_PROMPTS]])
    make_toy(TOY)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shrink_training(settings: dict[str, Any]) -> dict[str, Any]:
    smaller = {name: value for name, value in SMALLER.items() if name in settings}
    models = {name: TOY for name in ("backbone", "base") if settings.get(name) == "embedded"}
    kept = {name: value for name, value in settings.items() if name != "epochs"}
    codes = {"code_high": "good", "code_low": "bad"} if settings.get("method") == "gedi" else {}  # words of the toy
    return kept | smaller | models | codes | TRAINING


def shrink_sweep(settings: dict[str, Any]) -> dict[str, Any]:
    """Fewer candidates and texts; a trained judge in the place of an ONNX model, whose folder is not there."""
    trained = next(use["judge"] for use in settings["judges"].values() if use["judge"].startswith("reward:"))
    judges = {name: use | {"judge": trained} for name, use in settings["judges"].items()}
    return settings | SWEEP | {"judges": judges, "top_k": [min(k, LARGEST_K) for k in settings["top_k"]]}


def run_here(job: Any, log: TextIO) -> tuple[int, str]:
    """Run a radq command or a script inside this process; return its exit code and what it printed."""
    printed = io.StringIO()
    _, *argv = job.command
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(log), pytest.MonkeyPatch.context() as patch:
        try:
            if argv[:2] == ["-m", "radq"]:
                return main(argv[2:]), printed.getvalue()
            patch.setattr("sys.argv", argv)
            runpy.run_path(argv[0], run_name="__main__")
        except (Exception, SystemExit):
            traceback.print_exc()
            return 1, printed.getvalue()
    return 0, printed.getvalue()
