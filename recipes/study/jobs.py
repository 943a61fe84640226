"""Jobs of the study: commands that make something, several at once. What is made already is not made again."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Job:
    """A radq command that makes something, once."""

    name: str
    command: list[str]
    makes: str  # what is there when it is done
    needs: str = ""  # what another job makes
    environment: Mapping[str, str] = field(default_factory=dict)  # beside the study's own


def run_all(jobs: list[Job], at_once: int, finish: Callable[[Job, str, float], None] | None = None) -> None:
    """Jobs that are not done yet; one that fails stops none of the others, but the study."""
    todo = [job for job in jobs if not Path(job.makes).exists()]
    Path("logs").mkdir(exist_ok=True)
    for job in todo:
        failure(job.makes).unlink(missing_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        failed = [name for name in pool.map(lambda job: run_one(job, finish), todo) if name]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see logs/.")


def run_one(job: Job, finish: Callable[[Job, str, float], None] | None) -> str | None:
    """The job's name if it failed."""
    if job.needs and not wait_for(job.needs):
        failure(job.makes).touch()
        return job.name
    began = time.time()
    with (Path("logs") / f"{job.name}.log").open("a") as log:
        environment = {**os.environ, **job.environment}
        done = subprocess.run(job.command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    seconds = time.time() - began
    print(f"{job.name}: {'done' if done.returncode == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    if done.returncode:
        failure(job.makes).touch()
        return job.name
    if finish is not None:
        finish(job, done.stdout, seconds)
    return None


def failure(file: str) -> Path:
    """What tells jobs that wait for a file that it will not come."""
    return Path(file).with_suffix(".failed")


def wait_for(file: str) -> bool:
    """Whether an earlier job of the list makes it."""
    while not Path(file).exists():
        if failure(file).exists():
            return False
        time.sleep(0.5)
    return True


def shown(command: list[str]) -> str:
    """As a person would type it in the study's folder."""
    words = ["radq" if word == sys.executable else word for word in command if word not in ("-m", "radq")]
    return " ".join(word.replace(f"{REPOSITORY}/", "") for word in words)


def write(file: str, content: Any) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{file}.tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(file)
