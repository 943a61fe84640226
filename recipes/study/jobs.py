"""Jobs: commands that each make one file, several at once; finished ones do not run again."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RADQ = [sys.executable, "-m", "radq"]


@dataclass(frozen=True)
class Job:
    """A command that makes one file; it does not run again once the file is there."""

    name: str
    command: list[str]
    makes: str
    needs: str = ""  # a file that an earlier job makes
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the environment of the study


Finish = Callable[[Job, str, float], None]  # takes the job, its standard output and its seconds


def run_all(jobs: list[Job], at_once: int, finish: Finish | None = None) -> None:
    """Run the jobs that are not done yet. A failure skips the jobs that need its file and then ends the study."""
    todo = [job for job in jobs if not Path(job.makes).exists()]
    Path("logs").mkdir(exist_ok=True)
    outcomes: dict[str, Future[bool]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for job in todo:
            outcomes[job.makes] = pool.submit(run_one, job, outcomes.get(job.needs), finish)
    failed = [job.name for job in todo if not outcomes[job.makes].result()]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see logs/.")


def run_one(job: Job, needed: Future[bool] | None, finish: Finish | None) -> bool:
    """Run a job after the one it needs; return whether both succeeded."""
    if needed is not None and not needed.result():
        return False
    began = time.time()
    with (Path("logs") / f"{job.name}.log").open("a") as log:
        environment = {**os.environ, **job.environment}
        done = subprocess.run(job.command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    seconds = time.time() - began
    print(f"{job.name}: {'done' if done.returncode == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    if done.returncode == 0 and finish is not None:
        finish(job, done.stdout, seconds)
    return done.returncode == 0


def keep_json(job: Job, output: str, seconds: float) -> None:
    write_json(job.makes, json.loads(output[output.index("{") :]))


def write_json(file: str, content: Any) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{file}.tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(file)
