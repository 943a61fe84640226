"""radq measure generations.jsonl --judge onnx:FOLDER --metrics avg_max,toxic_rate,perplexity --perplexity gpt2-xl"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from radq.evaluation.metrics import METRICS

if TYPE_CHECKING:
    from radq.evaluation.sweep.config import JudgeUse


@dataclass
class Arguments:
    """Compute metrics of existing generations, by radq eval or by other programs."""

    files: tyro.conf.Positional[list[Path]]
    """jsonl files with one prompt per line: "text" and "continuations", or "prompt" and "generations"."""
    metrics: Annotated[str, tyro.conf.arg(help=f"Metrics to compute, separated by commas: {', '.join(METRICS)}.")] = (
        "dist_1,dist_2,dist_3"
    )
    judge: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="JUDGE")] = field(default_factory=list)
    """Judge of the metrics that need one, written as for radq judge score; repeat the option for more judges."""
    reads: Literal["continuation", "text"] = "continuation"
    """The text that judges read: the continuation alone, or prompt and continuation."""
    perplexity: str | None = None
    """Language model that measures perplexity: a hub name or folder."""
    mauve: str | None = None
    """Sentence encoder for MAUVE: a hub name, a folder, minilm or embedded."""
    reference: Path | None = None
    """jsonl file with generations for the same prompts, which MAUVE compares with."""
    resamples: int = 1000
    """Number of resamples of the prompts that confidence intervals are made from."""
    cache: Path | None = None
    """Folder in which the scores of judges are kept; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the metrics as JSON."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_facts, print_json, print_metrics
    from radq.data.generations import read_generations
    from radq.evaluation.estimates import Bootstrap
    from radq.evaluation.sweep.config import SweepCell
    from radq.sources.model_source import check_language_model

    judges, plain = _sort_metrics(arguments)
    bootstrap = Bootstrap(arguments.resamples)
    parts = read_generations(arguments.files)
    reference = {} if arguments.reference is None else read_generations([arguments.reference])
    if arguments.perplexity is not None:
        check_language_model(arguments.perplexity)
    announce("loading models", arguments.json)
    from radq.evaluation.sweep.measure import Instruments, MeasuredCell, encode_samples
    from radq.judges.encoders import load_encoder
    from radq.models.loading import find_device

    device, progress = find_device(arguments.device), not arguments.json
    instruments = Instruments.load(judges, arguments.perplexity, device, arguments.cache)
    needs_encoder = any(METRICS[name].needs_encoder for name in plain)
    encoder = load_encoder(arguments.mauve, device) if arguments.mauve is not None and needs_encoder else None
    rows = []
    for (cell, group), texts in parts.items():
        arrays = instruments.measure(texts.prompts, texts.continuations, progress)
        measured = MeasuredCell(SweepCell(cell, None, None, None, None, 0), texts.continuations, arrays)
        features: list[Any] = []
        if encoder is not None:
            other = next((part for (_, name), part in reference.items() if name == group), None)
            features = [
                None if one is None else encode_samples(encoder, one.continuations, progress) for one in (texts, other)
            ]
        found = measured.estimate(judges, plain, range(len(texts.prompts)), bootstrap, *features)
        rows.append({"cell": cell, "group": group, "prompts": len(texts.prompts), "metrics": found})
    if arguments.json:
        print_json({"metrics": rows})
        return
    models = [("perplexity under", arguments.perplexity), ("MAUVE by", arguments.mauve)]
    print_facts([*(("judge", judge) for judge in judges), *((name, model) for name, model in models if model)])
    print_metrics(rows)


def _sort_metrics(arguments: Arguments) -> "tuple[dict[str, JudgeUse], list[str]]":
    """Split the metrics into those of each judge and those without; refuse those that nothing measures."""
    from radq.errors import OptionError
    from radq.evaluation.metrics import check_metric
    from radq.evaluation.sweep.config import JudgeUse

    names = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
    for name in names:
        check_metric(name)
        metric = METRICS[name]
        if metric.needs_judge and not arguments.judge:
            raise OptionError(f"{name} has no judge.", "give --judge JUDGE.")
        if metric.needs_decoding:
            raise OptionError(
                f"{name} can only be measured while texts are decoded.",
                "add it to the metrics of a sweep of radq eval.",
            )
        if metric.needs_language_model and arguments.perplexity is None:
            raise OptionError(f"{name} has no model to measure it.", "give --perplexity MODEL.")
        if metric.needs_encoder and (arguments.mauve is None or arguments.reference is None):
            raise OptionError(f"{name} has nothing to compare.", "give --mauve ENCODER and --reference FILE.")
    if "win_rate" in names:
        raise OptionError("win_rate compares with unguided texts, which a file does not hold.", "use `radq eval`.")
    judged = [name for name in names if METRICS[name].needs_judge]
    plain = [name for name in names if not METRICS[name].needs_judge]
    return {judge: JudgeUse(judge, judged, arguments.reads) for judge in arguments.judge}, plain
