"""radq eval --config sweep.yaml --out runs/detox"""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass
class Arguments:
    """Run a sweep: continue prompts under guides of many strengths, judge the texts, compute metrics.

    The same command goes on with a sweep that was killed. `radq report OUT` makes pictures and tables of it.
    """

    config: Path
    """YAML file with the sweep."""
    out: Path
    """Run folder: config.yaml, generations.jsonl, costs.jsonl, measures, metrics.jsonl, differences.jsonl."""
    base: str | None = None
    """Language model to steer, in place of the file's."""
    overwrite: bool = False
    """Start anew in a folder that holds a sweep."""
    only_generate: bool = False
    """Write the generations, and leave judging for a later call."""
    only_measure: bool = False
    """Generate nothing more: judge and compare what is whole in a sweep that was stopped."""
    cache: Path | None = None
    """Folder for judges' scores; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    json: bool = False
    """Print the metrics as JSON, and no progress."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import print_json, print_metrics
    from radq.errors import OptionError
    from radq.evaluation.sweep.config import load_sweep
    from radq.evaluation.sweep.costs import read_costs
    from radq.evaluation.sweep.generate import generate_all, open_run
    from radq.evaluation.sweep.measure import check_models, measure_all
    from radq.files import read_lines
    from radq.models.loading import find_device

    if arguments.only_measure and (arguments.only_generate or arguments.overwrite):
        other = "--only-generate" if arguments.only_generate else "--overwrite"
        raise OptionError(f"{other} and --only-measure leave nothing to measure.", "give one of them, or neither.")
    sweep = load_sweep(arguments.config)
    if arguments.base is not None:
        sweep = replace(sweep, base=arguments.base)
    device = find_device(arguments.device)
    prompts = sweep.read_prompts()
    progress = not arguments.json
    with open_run(arguments.out, sweep, prompts, arguments.overwrite):
        if not arguments.only_generate:
            check_models(sweep, device)
        if not arguments.only_measure:
            generate_all(arguments.out, sweep, prompts, device, progress)
        if arguments.only_generate:
            return
        measure_all(arguments.out, sweep, prompts, device, arguments.cache, progress)
        rows = list(read_lines(arguments.out / "metrics.jsonl"))
    if arguments.json:
        print_json({"metrics": rows, "costs": read_costs(arguments.out)})
    else:
        print_metrics(rows)
        print(f"→ {arguments.out}; `radq report {arguments.out}` makes pictures of it")
