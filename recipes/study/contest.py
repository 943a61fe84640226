"""The contest: reward models that learn what the base model's own texts lead to, against DExperts, GeDi and others.

    labels → a RAD-V over all layers, the classifier
    prompts → texts of the base model, scored at their end by the classifier → a RAD-V of values
    prefixes of the base model, and its candidates → a readout or a RAD-Q over 12 layers, taught by the values

`MODELS` and `own_texts_job` say how each is made; run.py has the pieces.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from jobs import Job

HERE = Path(__file__).resolve().parent
READS = {"sentiment": "text", "toxicity": "continuation"}  # what judges read, as in the paper
SHIPPED = {"sentiment": "embedded:sentiment=35", "toxicity": "embedded:toxicity=-100"}
ROUND_BETA = {"sentiment": 60.0, "toxicity": 200.0}
ATTRIBUTES = tuple(READS)


def classifier(attribute: str) -> dict[str, Any]:
    """RAD-V over all layers, from labels."""
    recipe = yaml.safe_load((HERE.parent / "embedded" / f"{attribute}-v.yaml").read_text())
    return recipe | {"num_layers": None, "learning_rate": 5e-5}


def value(attribute: str) -> dict[str, Any]:
    """The classifier, trained further: what score do the base model's own texts end with?"""
    return {
        "data": [f"data/own-{attribute}.jsonl"],
        "eval_share": 0.02,
        "labels": attribute,
        "init": f"models/{attribute}-classifier",
        "kind": "v",
        "max_length": 96,
        "batch_size": 128,
        "learning_rate": 3e-5,
        "warmup_steps": 30,
        "epochs": 2,
    }


def student(attribute: str, teacher: str, **model: Any) -> dict[str, Any]:
    """A student that learns the base model's candidates, after its own texts and after guided ones."""
    return {
        "data": [f"data/own-{attribute}.jsonl"],
        "eval_share": 0.02,
        "labels": attribute,
        "teacher": teacher,
        "backbone": "embedded",
        "base": "embedded",
        "prompts": f"data/write-{attribute}.jsonl",
        "num_prefixes": 20_000,
        "rounds": 2,
        "round_beta": ROUND_BETA[attribute],
        "max_length": 96,
        "batch_size": 128,
        "warmup_steps": 50,
        "max_steps": 1500,
        "learning_rate": 1e-3,
    } | model


def readout(attribute: str, teacher: str, layers: int = 5, width: int = 704) -> dict[str, Any]:
    shape = {"readout_layers": layers, "readout_width": width}
    return student(attribute, teacher, reads="base", backbone_dtype="bfloat16", **shape)


def rad_q(attribute: str, teacher: str) -> dict[str, Any]:
    """RAD-Q over 12 layers with LoRA."""
    return student(attribute, teacher, num_layers=12, lora_rank=16, head_learning_rate=1e-4)


def ours(attribute: str) -> dict[str, dict[str, Any]]:
    """The models of one attribute, teachers before students."""
    values = f"models/{attribute}-value"
    return {
        f"{attribute}-classifier": classifier(attribute),
        f"{attribute}-value": value(attribute),
        f"{attribute}-readout": readout(attribute, values),
        f"{attribute}-12": rad_q(attribute, values),
        f"{attribute}-readout-large": readout(attribute, values, layers=10, width=1536),
        f"{attribute}-readout-classifier": readout(attribute, f"models/{attribute}-classifier"),
    }


def own_texts_job(attribute: str) -> Job:
    """Texts of the base model with the classifier's scores of their ends."""
    makes = f"data/own-{attribute}.jsonl"
    command = [sys.executable, str(HERE / "own_texts.py"), "--prompts", f"data/write-{attribute}.jsonl"]
    command += ["--attribute", attribute, "--reads", READS[attribute], "--guide", SHIPPED[attribute], "--out", makes]
    command += ["--scorers", f"reward:models/{attribute}-classifier", "--dtype", "float16"]
    return Job(f"own-{attribute}", command, makes, f"models/{attribute}-classifier.json")
