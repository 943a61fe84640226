"""The contest: reward models that learn what the base model's own texts lead to, against DExperts, GeDi and others.

    labels → a RAD-V over all layers, the classifier
    prompts → texts of the base model, scored at their end by the classifier → a RAD-V of values
    prefixes of the base model, and its candidates → a readout or a RAD-Q over the first layers, taught by the values

These are the recipe of the embedded sentiment model (recipes/embedded), for either attribute, and variants of it. The
baselines see as many labelled texts as the classifier, DExperts' two experts together. The embedded toxicity model has
also learnt from Perspective's scores, which baselines do not see here. methods.py says how the models take part.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from jobs import Job
from trainings import JUDGES

EMBEDDED = Path(__file__).resolve().parents[1] / "recipes" / "embedded"
RECIPE = "sentiment"  # the embedded model whose recipe both attributes take
CLASSIFIER = "1-classifier"  # the step that has settings of its own for each attribute
READS = {"sentiment": "text", "toxicity": "continuation"}  # what judges read, as in the paper
STRENGTH = 35.0  # of the classifier, where it guides the first tokens of texts
OMEGA = 30.0  # of GeDi where it teaches; students learn what it multiplies, whatever it is
BATCH = 128
FIRST_LAYERS = 12  # of models that do not have all
OWN_TEXTS_MEMORY = 30.0  # GB
EXPERT_STEPS = {"sentiment": 1080, "toxicity": 900}  # as many texts of BATCH as the classifier sees
EXPERT_LENGTHS = {"sentiment": 128, "toxicity": 96}  # tokens, as the classifier's
EXPERT_EVALUATION = {"sentiment": {"eval_data": ["data/sst2-dev.jsonl"]}, "toxicity": {"eval_share": 0.02}}
RATES = {"": 5e-5, "-2e-5": 2e-5}  # learning rates of experts by the end of a model's name; dev prompts choose


def recipe(attribute: str, step: str, **changes: Any) -> dict[str, Any]:
    """A step towards a readout, with the data and models of earlier steps in the study's folder."""
    file = f"{attribute}-{step}.yaml" if step == CLASSIFIER else f"{RECIPE}-{step}.yaml"
    settings = yaml.safe_load((EMBEDDED / file).read_text().replace(RECIPE, attribute))
    for name in ("init", "teacher"):
        if name in settings:
            settings[name] = settings[name].replace("runs/embedded-", "models/")
    return settings | changes


def readout(attribute: str, **changes: Any) -> dict[str, Any]:
    return recipe(attribute, "4-readout", **changes)


def rad_q(attribute: str) -> dict[str, Any]:
    """RAD-Q over the first layers with LoRA, taught as the readout is."""
    settings = readout(attribute, num_layers=FIRST_LAYERS, lora_rank=16, head_learning_rate=1e-4)
    return {name: value for name, value in settings.items() if not name.startswith(("read", "backbone_dtype"))}


def readout_of_gedi(attribute: str) -> dict[str, Any]:
    """The readout taught GeDi's log-probability of the high class, under the name of GeDi's strength, omega.

    Beside the base model's candidates it reads the texts that GeDi has learnt from, so that nothing of our own models
    enters it. They are cut to about the length of guided texts.
    """
    teacher, data = f"models/{attribute}-gedi:omega={OMEGA:g}", [f"data/{attribute}.jsonl"]
    settings = readout(attribute, teacher=teacher, data=data, max_length=48)
    return {name: value for name, value in settings.items() if name != "labels"}


def experts(attribute: str, method: str, rate: float, **changes: Any) -> dict[str, Any]:
    """The language models of a baseline, over all layers unless `num_layers` says otherwise."""
    settings = {
        "data": [f"data/{attribute}.jsonl"],
        **EXPERT_EVALUATION[attribute],
        "labels": attribute,
        "method": method,
        "backbone": "embedded",
        "max_length": EXPERT_LENGTHS[attribute],
        "batch_size": BATCH,
        "micro_batch_size": BATCH // 4 if method == "gedi" else BATCH // 2,  # GeDi reads each text in both classes
        "max_steps": EXPERT_STEPS[attribute] // (2 if method == "dexperts" else 1),  # of each of DExperts' two experts
        "learning_rate": rate,
        "warmup_steps": 50,
    }
    return settings | changes


def baselines(attribute: str) -> dict[str, dict[str, Any]]:
    """The language models of baselines, GeDi's before those of its student."""
    return {
        **{f"{attribute}-gedi{end}": experts(attribute, "gedi", rate) for end, rate in RATES.items()},
        **{f"{attribute}-dexperts{end}": experts(attribute, "dexperts", rate) for end, rate in RATES.items()},
        **{
            f"{attribute}-gedi-small{end}": experts(attribute, "gedi", rate, num_layers=FIRST_LAYERS)
            for end, rate in RATES.items()
        },
    }


def ours(attribute: str) -> dict[str, dict[str, Any]]:
    """Our models of one attribute, teachers before students."""
    return {
        f"{attribute}-classifier": recipe(attribute, CLASSIFIER),
        f"{attribute}-value": recipe(attribute, "3-value"),
        f"{attribute}-readout": readout(attribute),
        f"{attribute}-rad-q": rad_q(attribute),
        f"{attribute}-readout-student-again": readout(attribute, seed=1),  # of the same teacher
        f"{attribute}-readout-gedi": readout_of_gedi(attribute),
    }


def order_models() -> dict[str, dict[str, Any]]:
    """All models, in the order in which they begin as soon as they can.

    The chain from the classifier to the readout is the longest, so its parts go first. Then come the slowest baselines,
    since a slow job that begins last is waited for.
    """
    first, second = (ours(attribute) for attribute in ("sentiment", "toxicity"))
    chain = {name: settings for pair in zip(first.items(), second.items(), strict=True) for name, settings in pair}
    return chain | JUDGES | baselines("sentiment") | baselines("toxicity")


MODELS = order_models()


def own_texts_job(attribute: str) -> Job:
    """Texts of the base model with the classifier's score of their ends; it also guides the first tokens of some."""
    classifier, makes = f"models/{attribute}-classifier", f"data/own-{attribute}.jsonl"
    command = [sys.executable, str(EMBEDDED / "own_texts.py"), "--prompts", f"data/write-{attribute}.jsonl"]
    command += ["--attribute", attribute, "--reads", READS[attribute], "--scorers", f"reward:{classifier}"]
    command += ["--guide", f"{classifier}:{attribute}={STRENGTH:g}", "--dtype", "float16", "--out", makes]
    return Job(f"own-{attribute}", command, makes, (f"{classifier}.json",), memory=OWN_TEXTS_MEMORY)
