"""The pieces of the contest: all jobs up to the kept numbers of each method, and second opinions on kept texts.

Each takes a `Request`. Finished work is not repeated, so that a piece that was stopped can be run again.
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from bases import EMBEDDED, BaseModel, claim_folder
from choices import SETTINGS, choice_file, choose_settings, untested_file, untried_models
from contest import MODELS, READS, RECIPE, own_texts_job
from jobs import RADQ, Finish, Job, Run, find_needed, keep_json, run_all, run_command, write_json
from methods import CHOOSING, METHODS, OURS, RUNS, TASKS, Method, Task, contest_sweep, dev_sweeps, model_folder
from rehearsal import TOY, Rehearsal, run_here
from second import forget_opinions, second_opinions
from trainings import describe_model, training_job

from radq.sources.embedded import reward_folder

HERE = Path(__file__).resolve().parent
SWEEP_MEMORY = 30.0  # GB


@dataclass(frozen=True)
class Request:
    """How a piece is to be run."""

    base: BaseModel = EMBEDDED
    jobs: int = 4  # commands at the same time
    only: str = ""  # a regular expression for TASK-METHOD; by default all
    rehearse: bool = False
    shipped: bool = False  # whether the readout of sentiment is the one that radq brings along
    lm: str = ""  # another language model for the perplexity of kept texts
    memory: float = math.inf  # GB of the GPU that commands may take together

    @property
    def fitted(self) -> BaseModel:
        return Rehearsal(of=self.base) if self.rehearse else self.base

    @property
    def runner(self) -> Run:
        return run_here if self.rehearse else run_command

    def wants(self, task: Task, method: Method) -> bool:
        return self.base.takes_part(method.name) and bool(re.search(self.only, f"{task.name}-{method.name}"))

    def run(self, jobs: list[Job], finish: Finish | None = None) -> None:
        fitted = [self.fitted.fit_memory(job) for job in jobs]
        run_all(fitted, 1 if self.rehearse else self.jobs, finish, self.runner, self.memory)

    def check(self) -> None:
        """Refuse to mix a rehearsal with a study, two base models, or models of others with shipped ones."""
        if Path("data").exists() and Path(TOY).exists() != self.rehearse:
            sys.exit("error: this folder holds " + ("a study" if self.rehearse else "a rehearsal") + "; use another.")
        if self.shipped and self.base != EMBEDDED:
            sys.exit(f"error: radq brings no readout of {self.base.title} along; leave --shipped out.")
        claim_folder(self.base)


def contest(request: Request) -> None:
    """Train models, try settings on dev prompts, test each method with its choice, and keep the numbers.

    Each job begins as soon as the files are there that it needs. Methods whose models are trained go before trainings.
    What no kept number needs that is still missing is not run. Models that an earlier choice did not know are tried,
    and the method is tested again if another choice is better.
    """
    request.fitted.prepare()
    Path("models").mkdir(exist_ok=True)
    if request.shipped:
        take_shipped()
    wanted = [run for run in RUNS if request.wants(*run)]
    for run in wanted:
        take_untested(*run, request)
    run_wanted(wanted, request)
    if changed := [run for run in wanted if choose_again(*run, request)]:
        run_wanted(changed, request)


def run_wanted(wanted: list[tuple[Task, Method]], request: Request) -> None:
    """Make the kept numbers, and the dev numbers of models that a choice does not know."""
    keep = [keep_job(*run) for run in wanted]
    tests = [testing_job(*run, request) for run in RUNS]
    choosing = choosing_jobs([run for run in RUNS if run[1] in CHOOSING], request)
    tries = choosing_jobs([run for run in wanted if Path(choice_file(*run)).exists()], request)
    jobs = [*keep, *tests, *choosing, *training_jobs(request)]
    request.run(find_needed([*keep, *tries], jobs), _finish)


def choose_again(task: Task, method: Method, request: Request) -> bool:
    """Choose anew if models were tried that the earlier choice did not know; return whether the choice changed.

    Then the kept numbers of the earlier choice are deleted.
    """
    method, file = request.base.fit_method(method), Path(choice_file(task, method))
    if not file.exists() or not untried_models(task, method):
        return False
    earlier, now = json.loads(file.read_text()), choose_settings(task, method)
    changed = any(now["chosen"][name] != earlier["chosen"][name] for name in SETTINGS)
    write_json(file, now if changed else now | {"chosen": earlier["chosen"]})
    if changed:
        forget_test(task, method, request)
    return changed


def take_untested(task: Task, method: Method, request: Request) -> None:
    """Take the choice with which an earlier run could not test the method any more, in place of the tested one."""
    file = Path(untested_file(task, method))
    if file.exists():
        forget_test(task, method, request)
        file.replace(choice_file(task, method))


def forget_test(task: Task, method: Method, request: Request) -> None:
    """Delete the numbers of a test that is made again, and what was measured on its texts."""
    forget_opinions(Path(), task.name, method.name)
    for made in (keep_job(task, method).makes, testing_job(task, method, request).makes):
        Path(made).unlink(missing_ok=True)


def take_shipped() -> None:
    """Put the sentiment model that radq brings along in the place of our first training."""
    folder = Path(model_folder(TASKS[RECIPE], OURS))
    if not folder.exists():
        shutil.copytree(reward_folder(RECIPE), folder)
    write_json(f"{folder}.json", {"command": "shipped with radq", "metrics": {}})


def training_jobs(request: Request) -> list[Job]:
    fit = request.fitted
    trainings = [training_job(name, fit.fit_training(name, settings)) for name, settings in MODELS.items()]
    return [*(fit.fit_own_texts(own_texts_job(attribute)) for attribute in READS), *trainings]


def choosing_jobs(runs: list[tuple[Task, Method]], request: Request) -> list[Job]:
    """The sweeps over dev prompts that choices still need, the slowest first."""
    return [
        choosing_job(task, name, settings, request)
        for task, method in sorted(runs, key=lambda run: CHOOSING.index(run[1]))
        for name, settings in untried_sweeps(task, method, request).items()
    ]


def untried_sweeps(task: Task, method: Method, request: Request) -> dict[str, dict[str, Any]]:
    """The sweeps over dev prompts of models that no choice knows; none for a method that chooses nothing."""
    method = request.base.fit_method(method)
    return dev_sweeps(task, replace(method, models=untried_models(task, method))) if method.dev_beta else {}


def second(request: Request) -> None:
    """Judge the kept texts of sentiment by a judge over MiniLM, and compute MAUVE and another perplexity."""
    second_opinions(Path(), request.only, request.lm, request.runner)


def choosing_job(task: Task, name: str, settings: dict[str, Any], request: Request) -> Job:
    """A sweep over dev prompts."""
    models = [guide["folder"] for guide in settings["guides"].values()]
    return sweep_job(f"dev/{name}", [*models, judge_folder(task)], (), lambda: settings, request)


def testing_job(task: Task, method: Method, request: Request) -> Job:
    """The sweep over test prompts, with the settings that are chosen once all of them were tried on dev prompts."""
    method, choosing = (request.base.fit_method(METHODS[name]) for name in (method.name, method.like or method.name))
    choice = Path(choice_file(task, choosing))
    known = choice.exists() and not method.like
    guiding = [json.loads(choice.read_text())["chosen"]["model"]] if known else method.models
    models = [*(model_folder(task, model) for model in guiding), judge_folder(task)]
    tried = {} if choice.exists() else untried_sweeps(task, choosing, request)

    def settings() -> dict[str, Any]:
        if not choosing.dev_beta:
            return contest_sweep(task, method, {})
        if not choice.exists():
            write_json(choice, choose_settings(task, choosing))
        return contest_sweep(task, method, json.loads(choice.read_text())["chosen"])

    waits_for = tuple(f"dev/{name}.json" for name in tried)
    return sweep_job(f"contest/{task.name}-{method.name}", models, waits_for, settings, request)


def judge_folder(task: Task) -> str:
    return f"models/judge-{task.name}"


def sweep_job(
    run: str,
    models: list[str],
    waits_for: tuple[str, ...],
    settings: Callable[[], dict[str, Any]],
    request: Request,
) -> Job:
    """A sweep, which waits for its models and their judge; its settings are asked for when it begins."""

    def prepare() -> None:
        sweep = request.fitted.fit_sweep(settings())
        Path(run).parent.mkdir(exist_ok=True)
        Path(f"{run}.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False, allow_unicode=True))

    command = [*RADQ, "eval", "--config", f"{run}.yaml", "--out", run, "--cache", run, "--json"]
    needs = (*waits_for, *(f"{model}.json" for model in models))
    return Job(run.replace("/", "-"), command, f"{run}.json", needs, prepare=prepare, memory=SWEEP_MEMORY)


def keep_job(task: Task, method: Method) -> Job:
    name = f"{task.name}-{method.name}"
    command = [sys.executable, str(HERE / "kept.py"), task.name, method.name]
    return Job(f"contest-{name}-keep", command, f"kept/{name}.npz", (f"contest/{name}.json",))


def _finish(job: Job, output: str, seconds: float) -> None:
    if job.makes.startswith("models/"):
        describe_model(job, output, seconds)
    elif job.makes.endswith(".json"):
        keep_json(job, output, seconds)


CONTEST_PIECES = {
    "contest": contest,
    "second": second,
}
