"""The pieces of the contest: all jobs up to the kept numbers of each method, and second opinions on kept texts.

Each takes a `Request`. Finished work is not repeated, so that a piece that was stopped can be run again.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from choices import choice_file, choose_settings
from contest import MODELS, own_texts_jobs
from jobs import RADQ, Finish, Job, Run, keep_json, run_all, run_command, write_json
from methods import CHOOSING, METHODS, RUNS, TASKS, Method, Task, contest_sweep, dev_sweeps, model_folder
from rehearsal import TOY, prepare_rehearsal, run_here, shrink_own_texts, shrink_sweep, shrink_training
from second import second_opinions
from trainings import describe_model, training_job

HERE = Path(__file__).resolve().parent
SWEEP_MEMORY = 30.0  # GB


@dataclass(frozen=True)
class Request:
    """How a piece is to be run."""

    jobs: int = 4  # commands at the same time
    only: str = ""  # a regular expression for the names of jobs; by default all
    rehearse: bool = False
    memory: float = math.inf  # GB of the GPU that commands may take together

    @property
    def runner(self) -> Run:
        return run_here if self.rehearse else run_command

    def run(self, jobs: list[Job], finish: Finish | None = None) -> None:
        selected = [job for job in jobs if re.search(self.only, job.name)]
        run_all(selected, 1 if self.rehearse else self.jobs, finish, self.runner, self.memory)

    def check(self) -> None:
        """Refuse to mix a rehearsal with a study."""
        if Path("data").exists() and Path(TOY).exists() != self.rehearse:
            sys.exit("error: this folder holds " + ("a study" if self.rehearse else "a rehearsal") + "; use another.")


def contest(request: Request) -> None:
    """Train all models, try settings on dev prompts, test each method with its choice, and keep the numbers.

    Each job begins as soon as the files are there that it needs. Methods whose models are trained go before trainings.
    """
    request.run([*testing_jobs(request), *choosing_jobs(request), *training_jobs(request)], _finish)


def training_jobs(request: Request) -> list[Job]:
    if request.rehearse:
        prepare_rehearsal()
    Path("models").mkdir(exist_ok=True)
    shrink = shrink_training if request.rehearse else dict
    trainings = [training_job(name, shrink(settings)) for name, settings in MODELS.items()]
    own = [shrink_own_texts(job) if request.rehearse else job for job in own_texts_jobs()]
    return [*own, *trainings]


def choosing_jobs(request: Request) -> list[Job]:
    return [
        choosing_job(task, name, settings, request)
        for method in CHOOSING
        for task in TASKS.values()
        for name, settings in dev_sweeps(task, method).items()
    ]


def testing_jobs(request: Request) -> list[Job]:
    return [job for run in RUNS for job in (keep_job(*run), testing_job(*run, request))]


def second(request: Request) -> None:
    """Judge the kept texts of sentiment by a judge over MiniLM, and compute MAUVE."""
    second_opinions(Path(), request.only, request.runner)


def choosing_job(task: Task, name: str, settings: dict[str, Any], request: Request) -> Job:
    """A sweep over dev prompts."""
    models = [guide["folder"] for guide in settings["guides"].values()]
    return sweep_job(f"dev/{name}", task, models, (), lambda: settings, request)


def testing_job(task: Task, method: Method, request: Request) -> Job:
    """The sweep over test prompts, with the settings that are chosen once all of them were tried on dev prompts."""
    choosing = METHODS[method.like or method.name]
    tried = dev_sweeps(task, choosing) if choosing.dev_beta else {}
    models = [model_folder(task, model) for model in method.models]

    def settings() -> dict[str, Any]:
        if not tried:
            return contest_sweep(task, method, {})
        choice = choose_settings(task, choosing)
        if choosing is method:
            write_json(choice_file(task, method), choice)
        return contest_sweep(task, method, choice["chosen"])

    waits_for = tuple(f"dev/{name}.json" for name in tried)
    return sweep_job(f"contest/{task.name}-{method.name}", task, models, waits_for, settings, request)


def sweep_job(
    run: str,
    task: Task,
    models: list[str],
    waits_for: tuple[str, ...],
    settings: Callable[[], dict[str, Any]],
    request: Request,
) -> Job:
    """A sweep, which waits for its models and judges; its settings are asked for when it begins."""

    def prepare() -> None:
        sweep = shrink_sweep(settings()) if request.rehearse else settings()
        Path(run).parent.mkdir(exist_ok=True)
        Path(f"{run}.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False, allow_unicode=True))

    command = [*RADQ, "eval", "--config", f"{run}.yaml", "--out", run, "--cache", run, "--json"]
    needs = (*waits_for, f"models/judge-{task.name}.json", *(f"{model}.json" for model in models))
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
