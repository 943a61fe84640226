"""Jobs: commands that each make one file, several at once; finished ones do not run again."""

import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from radq.errors import FULL_MEMORY
from radq.files import whole_file

RADQ = [sys.executable, "-m", "radq"]
ATTEMPTS = 3  # of a job, while the memory is full


@dataclass(frozen=True)
class Job:
    """A command that makes one file; it does not run again once the file is there."""

    name: str
    command: list[str]
    makes: str
    needs: tuple[str, ...] = ()  # files that earlier jobs make
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the environment of the study
    prepare: Callable[[], None] | None = None  # is called before the command, when all that it needs is there
    memory: float = 0.0  # of a GPU, in GB, about
    again: list[str] | None = None  # the command of further attempts; by default the same


Finish = Callable[[Job, str, float], None]  # takes the job, its standard output and its seconds
Run = Callable[[Job, TextIO], tuple[int, str]]  # takes the job and its log; returns the exit code and what was printed


def run_command(job: Job, log: TextIO) -> tuple[int, str]:
    environment = {**os.environ, **job.environment}
    done = subprocess.run(job.command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    return done.returncode, done.stdout


def run_all(
    jobs: list[Job], at_once: int, finish: Finish | None = None, run: Run = run_command, memory: float = math.inf
) -> None:
    """Run the jobs that are not done yet, earlier ones first, each as soon as the files are there that it needs.

    At most `at_once` run beside each other, and no more than `memory` holds, unless one alone needs more. A job for
    which a GPU's memory was full is tried again when another one has ended. Any other failure skips the jobs that need
    its file, and ends the study after all others.
    """
    waiting = [job for job in jobs if not Path(job.makes).exists()]
    Path("logs").mkdir(exist_ok=True)
    missing = {job.makes for job in waiting}  # files that are still to be made
    failed: list[Job] = []
    again: list[Job] = []  # that wait for the end of another job
    attempts: Counter[str] = Counter()
    with ThreadPoolExecutor(at_once) as pool:
        running: dict[Future[bool], Job] = {}
        while waiting or running or again:
            lost = {job.makes for job in failed}
            skipped = [job for job in waiting if lost.intersection(job.needs)]
            failed += skipped
            if not running:
                waiting, again = [*again, *waiting], []
            ready = [job for job in waiting if job not in skipped and not missing.intersection(job.needs)]
            ready = choose_fitting(ready, list(running.values()), at_once, memory)
            running |= {pool.submit(run_one, job, finish, run): job for job in ready}
            waiting = [job for job in waiting if job not in skipped and job not in ready]
            for done in wait(running, return_when=FIRST_COMPLETED).done if running and not skipped else ():
                job = running.pop(done)
                attempts[job.name] += 1
                waiting, again = [*again, *waiting], []
                if done.result():
                    missing.remove(job.makes)
                elif memory_was_full(job) and attempts[job.name] < ATTEMPTS:
                    again.append(replace(job, command=job.again or job.command))
                else:
                    failed.append(job)
    if failed:
        names = {job.name for job in failed}
        sys.exit(f"failed: {', '.join(job.name for job in jobs if job.name in names)}; see logs/.")


def memory_was_full(job: Job) -> bool:
    """Whether the last words of a job that failed say so."""
    return bool(FULL_MEMORY.search(log_file(job).read_text(errors="replace")[-2000:]))


def log_file(job: Job) -> Path:
    return Path("logs", f"{job.name}.log")


def find_needed(goals: list[Job], jobs: list[Job]) -> list[Job]:
    """The jobs that make the files of `goals` which are not there, and the files that these need, in their order."""
    makers = {job.makes: job for job in jobs}
    needed: set[str] = set()
    files = [job.makes for job in goals]
    while files:
        file = files.pop()
        if file in makers and file not in needed and not Path(file).exists():
            needed.add(file)
            files += makers[file].needs
    return [job for job in jobs if job.makes in needed]


def choose_fitting(ready: list[Job], running: list[Job], at_once: int, memory: float) -> list[Job]:
    """Choose jobs that may begin beside those that run, earlier ones first."""
    chosen: list[Job] = []
    for job in ready:
        beside = [*running, *chosen]
        fits = not beside or sum(one.memory for one in beside) + job.memory <= memory
        if fits and len(beside) < at_once:
            chosen.append(job)
    return chosen


def run_one(job: Job, finish: Finish | None, run: Run) -> bool:
    """Run a job; return whether it succeeded."""
    began = time.time()
    with log_file(job).open("a") as log:
        try:
            if job.prepare is not None:
                job.prepare()
            code, output = run(job, log)
        except Exception:
            traceback.print_exc(file=log)
            code, output = 1, ""
    seconds = time.time() - began
    print(f"{job.name}: {'done' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    if code == 0 and finish is not None:
        finish(job, output, seconds)
    return code == 0


def keep_json(job: Job, output: str, seconds: float) -> None:
    write_json(job.makes, json.loads(output[output.index("{") :]))


def write_json(file: str | Path, content: Any) -> None:
    with whole_file(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
