"""The contest: reward models that learn what the base model's own texts lead to, against DExperts, GeDi and others.

    labels → a RAD-V over all layers, the classifier
    prompts → texts of the base model, scored at their end by the classifier → a RAD-V of values
    prefixes of the base model, and its candidates → a readout or a RAD-Q over 12 layers, taught by the values

These are the recipes of the embedded models (recipes/embedded), and variants of them.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from jobs import Job

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded"
READS = {"sentiment": "text", "toxicity": "continuation"}  # what judges read, as in the paper
STRENGTH = 35.0  # of the classifier, where it guides the first tokens of texts


def recipe(attribute: str, step: str, **changes: Any) -> dict[str, Any]:
    """A step towards an embedded model, with the models of earlier steps in the study's folder."""
    settings = yaml.safe_load((EMBEDDED / f"{attribute}-{step}.yaml").read_text())
    for name in ("init", "teacher"):
        if name in settings:
            settings[name] = settings[name].replace("runs/embedded-", "models/")
    return settings | changes


def readout(attribute: str, **changes: Any) -> dict[str, Any]:
    return recipe(attribute, "4-readout", **changes)


def rad_q(attribute: str) -> dict[str, Any]:
    """RAD-Q over 12 layers with LoRA, taught as the readout is."""
    settings = readout(attribute, num_layers=12, lora_rank=16, head_learning_rate=1e-4)
    return {name: value for name, value in settings.items() if not name.startswith(("read", "backbone_dtype"))}


def ours(attribute: str) -> dict[str, dict[str, Any]]:
    """The models of one attribute, teachers before students."""
    return {
        f"{attribute}-classifier": recipe(attribute, "1-classifier"),
        f"{attribute}-value": recipe(attribute, "3-value"),
        f"{attribute}-readout": readout(attribute),
        f"{attribute}-12": rad_q(attribute),
        f"{attribute}-readout-large": readout(attribute, readout_layers=10, readout_width=1536),
        f"{attribute}-readout-classifier": readout(attribute, teacher=f"models/{attribute}-classifier"),
    }


def own_texts_job(attribute: str) -> Job:
    """Texts of the base model with the classifier's scores of their ends."""
    classifier, makes = f"models/{attribute}-classifier", f"data/own-{attribute}.jsonl"
    command = [sys.executable, str(EMBEDDED / "own_texts.py"), "--prompts", f"data/write-{attribute}.jsonl"]
    command += ["--attribute", attribute, "--reads", READS[attribute], "--scorers", f"reward:{classifier}"]
    command += ["--guide", f"{classifier}:{attribute}={STRENGTH:g}", "--dtype", "float16", "--out", makes]
    return Job(f"own-{attribute}", command, makes, f"{classifier}.json")
