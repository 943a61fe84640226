"""A trial of another toxicity model: the base model's own texts are scored by a second model, too.

Jigsaw's comments, from which the classifier learns, read unlike the beginnings of texts that are steered. So a second
RAD-V learns Perspective's scores of one half of RealToxicityPrompts' records, and both score the base model's texts.
The judge of the trial learnt the other half.

Models also learn the squares of these scores. What counts is the most toxic of many samples, and squares spend little
on texts that are far from being toxic. Students and their teacher are compared with our readout on dev prompts, by
either reward.
"""

from typing import Any

from contest import own_texts, own_texts_job, readout, recipe
from jobs import Job
from methods import OURS, PLAIN_K, TASKS, model_folder, sweep_settings
from trainings import JUDGES

ATTRIBUTE, END = "toxicity", "-trial"
JUDGE, SCORER = "half-judge-toxicity", "half-toxicity"
TEACHER = f"value{END}"
NUM_TEXTS, NUM_PREFIXES, STEPS = 60_000, 40_000, 3000
STRENGTH = 80.0  # of our readout, where it guides the first tokens of texts
SQUARES = f"{ATTRIBUTE}_squared"
BETAS = {ATTRIBUTE: [50.0, 80.0, 110.0, 150.0, 200.0], SQUARES: [150.0, 300.0, 600.0, 1200.0]}
STUDENTS: dict[str, dict[str, Any]] = {
    f"{OURS}{END}": {},
    f"{OURS}{END}-rounds": {"rounds": 2, "num_prefixes": NUM_PREFIXES // 2, "round_beta": 60.0},
    f"{OURS}{END}-longer": {"num_prefixes": 2 * NUM_PREFIXES, "max_steps": 2 * STEPS},
}
COMPARED = (OURS, *STUDENTS, TEACHER)


def trial_models() -> dict[str, dict[str, Any]]:
    """The models of the trial by name, teachers before students."""
    value = f"{ATTRIBUTE}-{TEACHER}"
    learns = {"data": [own_texts(ATTRIBUTE, END)], "labels": f"{ATTRIBUTE},{SQUARES}"}
    longer = learns | {"teacher": f"models/{value}", "num_prefixes": NUM_PREFIXES, "max_steps": STEPS}
    start = {name: setting for name, setting in recipe(ATTRIBUTE, "3-value").items() if name != "init"}
    start |= {"backbone": "embedded", "learning_rate": 5e-5}  # not the classifier, which has other labels
    return {
        SCORER: JUDGES[f"judge-{ATTRIBUTE}"] | {"data": [f"data/{SCORER}.jsonl"]},
        value: start | learns,
        JUDGE: JUDGES[f"judge-{ATTRIBUTE}"] | {"data": [f"data/{JUDGE}.jsonl"]},
        **{f"{ATTRIBUTE}-{name}": readout(ATTRIBUTE) | longer | changes for name, changes in STUDENTS.items()},
    }


def trial_texts_job() -> Job:
    scorers = [f"models/{ATTRIBUTE}-classifier", f"models/{SCORER}"]
    guide = f"{model_folder(TASKS[ATTRIBUTE], OURS)}:{ATTRIBUTE}={STRENGTH:g}"
    return own_texts_job(ATTRIBUTE, END, scorers, guide, "--number", str(NUM_TEXTS), "--squares", SQUARES)


def trial_sweep(model: str) -> dict[str, Any]:
    """The sweep over dev prompts with one of the compared models, at the default number of candidates."""
    task = TASKS[ATTRIBUTE]
    rewards = {ATTRIBUTE: BETAS[ATTRIBUTE]} if model == OURS else BETAS
    guides = {
        reward: {"folder": model_folder(task, model), "weights": {reward: task.side}, "beta": betas}
        for reward, betas in rewards.items()
    }
    judges = {**task.judges, ATTRIBUTE: task.judges[ATTRIBUTE] | {"judge": f"reward:models/{JUDGE}"}}
    return sweep_settings(task, guides, "dev-", judges=judges, top_k=[PLAIN_K], resamples=1000)
