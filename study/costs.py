"""What the contest's methods cost: the time per token in the engine, as a multiple of decoding without a guide.

costs.json   machine, torch, commands, and for each method the median ratio with its quartiles

Weights do not change the time, so they are random but for the readout's, and the models have the layers of the
contest's.
"""

import json
from pathlib import Path
from typing import Any

from jobs import RADQ, Job, keep_json, run_all, write_json
from methods import OURS, OURS_AGAIN, PLAIN_K

from radq import RadV
from radq.sources.embedded import EMBEDDED

FILE = "costs.json"
ALL_LAYERS = "models/all-layers"
ROWS, TOKENS, ROUNDS = 8, 20, 7
REWARDS = {"readout": "embedded:sentiment", "first-layers": "", "all-layers": ALL_LAYERS}  # by default 12 layers
TIMED = {  # what is measured with each of these: a guide of `radq bench`, and the methods that it stands for
    "readout": {"q": (OURS, OURS_AGAIN, "readout-gedi")},
    "first-layers": {"q": ("rad-q",), "gedi": ("gedi-small",)},
    "all-layers": {"v": ("classifier",), "dexperts": ("dexperts",), "gedi": ("gedi",)},
}


def measure_costs(jobs: int) -> None:
    """Measure the time per token of every kind of guide, one after the other."""
    if not Path(ALL_LAYERS).exists():
        RadV.from_backbone(EMBEDDED, attributes=["reward"]).save_pretrained(ALL_LAYERS)
    parts = {name: Job(f"costs-{name}", command(name), f"costs/{name}.json") for name in TIMED}
    run_all(list(parts.values()), 1, keep_json)
    documents = {name: json.loads(Path(part.makes).read_text()) for name, part in parts.items()}
    write_json(FILE, summarise(documents))


def command(name: str) -> list[str]:
    reward = ["--reward", REWARDS[name]] if REWARDS[name] else []
    settings = {"--rows": ROWS, "--top-k": PLAIN_K, "--kl-budget": "none", "--new-tokens": TOKENS, "--rounds": ROUNDS}
    numbers = [str(part) for pair in settings.items() for part in pair]
    return [*RADQ, "bench", "--lm", EMBEDDED, *reward, "--guides", *TIMED[name], *numbers, "--json"]


def summarise(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of costs.json from what `radq bench` printed."""
    ratios = {
        method: timing["ratio"]
        for name, document in documents.items()
        for timing in document["timings"]
        for method in TIMED[name].get(timing["guide"], ())
    }
    first = next(iter(documents.values()))
    return {
        "machine": first["machine"],
        "torch": first["torch"],
        "commands": [" ".join(["radq", *command(name)[len(RADQ) :]]) for name in documents],
        "over_unguided": ratios,
    }


def read_costs(folder: Path) -> dict[str, float]:
    """The median of each method; empty where nothing was measured."""
    file = folder / FILE
    found = json.loads(file.read_text())["over_unguided"] if file.exists() else {}
    return {method: ratio["median"] for method, ratio in found.items()}
