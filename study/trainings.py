"""Trainings of a study: `radq train`, `radq distill` or `radq train-experts`, each with its settings and numbers."""

import json
from pathlib import Path
from typing import Any

import yaml
from jobs import RADQ, Job, write_json

MEMORY = 25.0  # GB of a training, about; 17 to 29 were seen


def judge(attribute: str, **settings: Any) -> dict[str, Any]:
    """RAD-V with the full backbone."""
    data = {"data": [f"data/judge-{attribute}.jsonl"], "eval_data": [f"data/judge-{attribute}-unseen.jsonl"]}
    model = {"labels": attribute, "backbone": "embedded", "kind": "v", "warmup_steps": 50, "max_length": 96}
    return data | model | settings


JUDGES = {
    "judge-toxicity": judge("toxicity", batch_size=32, learning_rate=5e-5, epochs=4),
    "judge-sentiment": judge("sentiment", batch_size=128, learning_rate=5e-5, epochs=2),
}


def training_job(name: str, settings: dict[str, Any]) -> Job:
    """A training that was stopped, or tried before, resumes from its last checkpoint."""
    config, text = Path(f"models/{name}.yaml"), yaml.safe_dump(settings | {"out": f"models/{name}"}, sort_keys=False)
    began = config.exists() and config.read_text() == text and Path(f"models/{name}/config.yaml").exists()
    config.write_text(text)
    command = "train-experts" if "method" in settings else "distill" if settings.get("teacher") else "train"
    again, first = ([*RADQ, command, "--config", str(config), how, "--json"] for how in ("--resume", "--overwrite"))
    makes, needs = f"models/{name}.json", needed_files(settings)
    return Job(name, again if began else first, makes, needs, memory=MEMORY, again=again)


def needed_files(settings: dict[str, Any]) -> tuple[str, ...]:
    """The files that earlier jobs make and a training needs; a teacher may be a guide, DIR:name=number."""
    models = [settings.get("init", ""), settings.get("teacher", "").partition(":")[0]]
    own = [file for file in settings["data"] if Path(file).name.startswith("own-")]
    return (*(f"{model}.json" for model in models if model.startswith("models/")), *own)


def describe_model(job: Job, output: str, seconds: float) -> None:
    """Write models/NAME.json: command, seconds, metrics on held-out data."""
    printed = json.loads(output[output.index("{") :])
    metrics = {name.replace("eval_", ""): printed[name] for name in printed if "eval_" in name}
    metrics = {name: metrics[name] for name in metrics if not name.endswith(("loss", "runtime", "per_second"))}
    command = " ".join(["radq", *job.command[len(RADQ) :]])
    write_json(job.makes, {"command": command, "seconds": round(seconds, 1), "metrics": metrics})
