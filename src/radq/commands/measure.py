"""radq measure generations.jsonl --judge onnx:FOLDER --metrics avg_max,toxic_rate,perplexity --perplexity gpt2-xl"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from radq.evaluation.sweep.config import JudgeUse


@dataclass
class Arguments:
    """Metrics of generations that are there already, of radq eval or of other programs."""

    files: tyro.conf.Positional[list[Path]]
    """jsonl: "text" and "continuations", or "prompt" and "generations", a prompt on each line."""
    metrics: str = "dist_1,dist_2,dist_3"
    """Separated by commas: avg_max, toxic_rate, positive_rate, mean_score; [corpus_]perplexity; dist_1 to 3; mauve."""
    judge: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="SPEC")] = field(default_factory=list)
    """Judge of the first four, as radq judge takes it; repeat for more."""
    reads: Literal["continuation", "text"] = "continuation"
    """What judges read: the continuation alone, or prompt and continuation."""
    perplexity: str | None = None
    """Language model that measures perplexity."""
    mauve: str | None = None
    """Encoder of MAUVE's features."""
    reference: Path | None = None
    """Generations that MAUVE compares with, for the same prompts."""
    resamples: int = 1000
    """Of the prompts, for the intervals."""
    cache: Path | None = None
    """Folder for judges' scores; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import print_json, print_metrics
    from radq.data.generations import Texts, read_texts
    from radq.evaluation.judges.encoders import load_encoder
    from radq.evaluation.metrics import Bootstrap
    from radq.evaluation.sweep.config import Cell
    from radq.evaluation.sweep.measure import Instruments, Measured
    from radq.models.loading import find_device

    device = find_device(arguments.device)
    judges, plain = _sort_metrics(arguments)
    bootstrap = Bootstrap(arguments.resamples)
    parts = read_texts(arguments.files)
    reference = {} if arguments.reference is None else read_texts([arguments.reference])
    instruments = Instruments.load(judges, arguments.perplexity, device, arguments.cache)
    encoder = load_encoder(arguments.mauve, device) if arguments.mauve is not None and "mauve" in plain else None

    def encode(texts: Texts) -> Any:
        assert encoder is not None
        vectors = encoder.encode([text for samples in texts.continuations for text in samples])
        return vectors.reshape(len(texts.prompts), -1, vectors.shape[-1])

    rows = []
    for (cell, group), texts in parts.items():
        measured = Measured(
            Cell(cell, None, None, None, None, 0),
            texts.continuations,
            instruments.measure(texts.prompts, texts.continuations),
        )
        features = []
        if encoder is not None:
            other = next((part for (_, name), part in reference.items() if name == group), None)
            features = [encode(texts), None if other is None else encode(other)]
        chosen = range(len(texts.prompts))
        found = measured.estimate(judges, plain, chosen, bootstrap, *features)
        rows.append({"cell": cell, "group": group, "prompts": len(texts.prompts), "metrics": found})
    if arguments.json:
        print_json({"metrics": rows})
    else:
        print_metrics(rows)


def _sort_metrics(arguments: Arguments) -> "tuple[dict[str, JudgeUse], list[str]]":
    """Those of each judge, and those that need none; what cannot be measured is an error before any work."""
    from radq.errors import OptionError
    from radq.evaluation.metrics import METRICS, check_metric
    from radq.evaluation.sweep.config import JudgeUse

    names = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
    for name in names:
        check_metric(name)
    judged = [name for name in names if "scores" in METRICS[name].needs]
    plain = [name for name in names if name not in judged]
    for name in plain:
        if name == "mauve" and (arguments.mauve is None or arguments.reference is None):
            raise OptionError("MAUVE has nothing to compare.", "give --mauve ENCODER and --reference FILE.")
        if "nll" in METRICS[name].needs and arguments.perplexity is None:
            raise OptionError(f"{name} has no model to measure it.", "give --perplexity MODEL.")
    if judged and not arguments.judge:
        raise OptionError(f"{judged[0]} has no judge.", "give --judge SPEC.")
    return {judge: JudgeUse(judge, judged, arguments.reads) for judge in arguments.judge}, plain
