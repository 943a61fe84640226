"""The pieces of the contest: train, choose settings on dev prompts, test, keep the numbers, judge once more.

Each takes a `Request`. Finished work is not repeated, so that a piece that was stopped can be run again.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from choices import write_choices
from contest import MODELS, own_texts_jobs
from jobs import RADQ, Finish, Job, Run, keep_json, run_all, run_command
from methods import CHOOSING, RUNS, TASKS, Method, Task, contest_sweep, dev_sweeps
from rehearsal import TOY, prepare_rehearsal, run_here, shrink_own_texts, shrink_sweep, shrink_training
from second import second_opinions
from trainings import describe_model, training_job

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Request:
    """How a piece is to be run."""

    jobs: int = 4  # commands at the same time
    only: str = ""  # a regular expression for the names of jobs; by default all
    rehearse: bool = False

    @property
    def runner(self) -> Run:
        return run_here if self.rehearse else run_command

    def run(self, jobs: list[Job], finish: Finish | None = None) -> None:
        selected = [job for job in jobs if re.search(self.only, job.name)]
        run_all(selected, 1 if self.rehearse else self.jobs, finish, self.runner)

    def check(self) -> None:
        """Refuse to mix a rehearsal with a study."""
        if Path("data").exists() and Path(TOY).exists() != self.rehearse:
            sys.exit("error: this folder holds " + ("a study" if self.rehearse else "a rehearsal") + "; use another.")


def contest_train(request: Request) -> None:
    """Train the models of the contest and its judges; the longest chain begins first."""
    request.run(training_jobs(request), _finish)


def choose(request: Request) -> None:
    """Try all settings of each method on dev prompts, and write choices.json."""
    try:
        request.run(choosing_jobs(request), _finish)
    finally:
        write_choices()  # also where some methods failed


def contest(request: Request) -> None:
    """Test each method with its chosen settings, and keep the numbers of every sweep as soon as it is done."""
    request.run(testing_jobs(request), _finish)


def contest_all(request: Request) -> None:
    """Train, choose and test. Settings are tried as soon as a model and its judge are trained."""
    try:
        request.run([*training_jobs(request), *choosing_jobs(request)], _finish)
    finally:
        write_choices()
        contest(request)


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
        sweep_job("dev", f"{task.name}-{model}", settings, request)
        for method in CHOOSING
        for task in TASKS.values()
        for model, settings in dev_sweeps(task, method).items()
    ]


def testing_jobs(request: Request) -> list[Job]:
    chosen = json.loads(Path("choices.json").read_text())["tasks"]
    jobs = []
    for task, method in RUNS:
        choice = chosen[task.name].get(method.like or method.name, {}).get("chosen")
        if choice is None and method.has_curve:
            print(f"{task.name}-{method.name}: left out, since choices.json has no settings for it", flush=True)
            continue
        sweep = sweep_job("contest", f"{task.name}-{method.name}", contest_sweep(task, method, choice), request)
        jobs += [sweep, keep_job(task, method)]
    return jobs


def keep(request: Request) -> None:
    """Keep the numbers of sweeps that are done and were not kept yet."""
    jobs = [keep_job(task, method) for task, method in RUNS]
    request.run([job for job in jobs if Path(job.needs[0]).exists()])


def second(request: Request) -> None:
    """Judge the kept texts of sentiment by a judge over MiniLM, and compute MAUVE."""
    second_opinions(Path(), request.only, request.runner)


def sweep_job(folder: str, name: str, settings: dict[str, Any], request: Request) -> Job:
    """A sweep, which waits for the models and judges that other jobs train."""
    run = f"{folder}/{name}"
    Path(folder).mkdir(exist_ok=True)
    settings = shrink_sweep(settings) if request.rehearse else settings
    Path(f"{run}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    command = [*RADQ, "eval", "--config", f"{run}.yaml", "--out", run, "--cache", run, "--json"]
    judges = [use["judge"].removeprefix("reward:") for use in settings["judges"].values()]
    guides = [guide["folder"] for guide in settings["guides"].values() if "folder" in guide]
    return Job(f"{folder}-{name}", command, f"{run}.json", tuple(f"{model}.json" for model in (*judges, *guides)))


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
    "contest-train": contest_train,
    "choose": choose,
    "contest": contest,
    "contest-all": contest_all,
    "keep": keep,
    "second": second,
}
