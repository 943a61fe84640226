"""radq eval --config sweep.yaml --out runs/detox"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass
class Arguments:
    """Run a sweep: continue prompts under guides at many β, judge the texts, and compute metrics.

    The same command goes on with a sweep that was killed. `radq report OUT` makes plots and tables of the results.
    """

    config: Path
    """YAML file that describes the sweep; docs/evaluation.md shows one."""
    out: Path
    """Folder to write: config.yaml, fingerprints.json, generations.jsonl, costs.jsonl, measures, metrics.jsonl,
    differences.jsonl."""
    base: str | None = None
    """Language model to steer, in place of the one that the file names."""
    overwrite: bool = False
    """Delete the sweep that the folder holds, and start again."""
    only_generate: bool = False
    """Write the generations, and leave the judging to a later call."""
    only_measure: bool = False
    """Generate nothing: judge and compare the complete cells of a sweep that was stopped."""
    cache: Path | None = None
    """Folder in which the scores of judges are kept; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the metrics as JSON, without progress bars."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_facts, print_json, print_metrics
    from radq.errors import OptionError
    from radq.evaluation.sweep.config import load_sweep
    from radq.evaluation.sweep.folder import open_sweep, read_costs, require_same_instruments, require_same_writers
    from radq.files import read_lines
    from radq.report.results import read_runs
    from radq.report.summary import describe_changes, describe_run, find_changes, warn_of_few_prompts

    if arguments.only_measure and (arguments.only_generate or arguments.overwrite):
        other = "--only-generate" if arguments.only_generate else "--overwrite"
        raise OptionError(f"with {other}, there is nothing to measure for --only-measure.", "give one of the two.")
    sweep = load_sweep(arguments.config)
    if arguments.base is not None:
        sweep = replace(sweep, base=arguments.base)
    prompts = sweep.read_prompts()
    if not arguments.only_measure:
        sweep.check_models()
    progress = not arguments.json
    with open_sweep(arguments.out, sweep, prompts, arguments.overwrite):
        if not arguments.only_measure:
            require_same_writers(arguments.out, sweep)
        announce("loading models", arguments.json)
        from radq.evaluation.sweep.generate import generate_all
        from radq.evaluation.sweep.measure import check_instruments, measure_all
        from radq.models.loading import find_device

        device = find_device(arguments.device)
        if not arguments.only_generate:
            require_same_instruments(arguments.out, check_instruments(sweep, device))
        if not arguments.only_measure:
            generate_all(arguments.out, sweep, prompts, device, progress)
        if arguments.only_generate:
            return
        measure_all(arguments.out, sweep, prompts, device, arguments.cache, progress)
        rows = list(read_lines(arguments.out / "metrics.jsonl"))
    (measured,) = read_runs([arguments.out])
    facts, changes = describe_run(measured), find_changes(measured)
    if arguments.json:
        summary = {"run": dict(facts), "changes": [asdict(change) for change in changes]}
        print_json(summary | {"metrics": rows, "costs": read_costs(arguments.out)})
        return
    print_facts(facts)
    for sentence in describe_changes(changes):
        print(sentence)
    print_metrics(rows)
    for note in warn_of_few_prompts(measured):
        print(f"note: {note}")
    print(f"→ {arguments.out}; `radq report {arguments.out}` makes plots and tables of it")
