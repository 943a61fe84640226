"""Copy the numbers of a contest that can be published: what the page needs, and the metrics of its models.

    python study/publish.py runs/study study/measured/contest

The folder of a run that went on from published numbers holds these, too, so they are replaced as a whole.
"""

import shutil
import sys
from pathlib import Path

from bases import FILE
from contest import MODELS
from costs import FILE as COSTS


def publish(run: Path, out: Path) -> None:
    shutil.rmtree(out / "untested", ignore_errors=True)  # a run without such choices has tested all
    for name in ("choices", "untested", "kept", "second"):
        if (run / name).exists():
            shutil.rmtree(out / name, ignore_errors=True)
            shutil.copytree(run / name, out / name)
    for file in (FILE, COSTS):
        if (run / file).exists():
            shutil.copy(run / file, out)
    (out / "models").mkdir(parents=True, exist_ok=True)
    for file in sorted((run / "models").glob("*.json")):
        if file.stem in MODELS:
            shutil.copy(file, out / "models")


if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(sys.argv[2]))
