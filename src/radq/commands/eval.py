"""radq eval --config sweep.yaml --out runs/detox

Also `radq eval measure generations.jsonl --judge JUDGE`, for texts that are there, and `radq eval choices --data
questions.jsonl --guide DIR:toxicity=-50`: does the guided model still know what it knew?
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from radq.commands import AsJson, Base, Cache, Device, Guides, Limit
from radq.commands.console import announce, print_facts, print_json, print_metrics
from radq.commands.generate import check_guides, choose_budget
from radq.data.prompts import read_generations
from radq.errors import OptionError
from radq.evaluation.estimates import Bootstrap, estimate, estimate_change
from radq.evaluation.metrics import ATTRIBUTE_METRICS, METRICS, check_metric
from radq.evaluation.sweep.config import JudgeUse, SweepCell, list_judged, load_sweep
from radq.files import fingerprint_values, read_lines
from radq.sources.model_source import check_language_model


@dataclass
class SweepArguments:
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
    cache: Cache = None
    device: Device = "auto"
    json: AsJson = False


@dataclass
class Measure:
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
    cache: Cache = None
    device: Device = "auto"
    json: AsJson = False


@dataclass
class Choices:
    """Answer multiple-choice questions with a language model, unguided and guided, and compare the accuracies."""

    data: Path
    """Questions (jsonl or parquet) with the fields question, choices and answer, which is the number of the right
    choice, from 0 on, or the choice itself."""
    base: Base = "embedded"
    guide: Guides = field(default_factory=list)
    """Guide as in `radq generate`; repeat the option to add guides."""
    kl_budget: float | Literal["auto", "none"] = "auto"
    """Largest KL divergence per token, as in `radq generate`."""
    out: Path | None = None
    """Folder for the answers; the same command with the same folder goes on where it was stopped."""
    limit: Limit = None
    """Number of questions, from the beginning of the file; by default all."""
    device: Device = "auto"
    json: AsJson = False


# --- radq eval sweep ---


def _sweep(arguments: SweepArguments) -> None:
    from radq.evaluation.sweep.folder import open_sweep, read_costs, require_same_models, require_same_writers
    from radq.report.curves import describe_changes, describe_run, find_changes, warn_of_few_prompts
    from radq.report.results import read_runs

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
            require_same_models(arguments.out, check_instruments(sweep, device))
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


# --- radq eval measure ---


def _measure(arguments: Measure) -> None:
    judges, plain = _sort_metrics(arguments)
    bootstrap = Bootstrap(arguments.resamples)
    parts = read_generations(arguments.files)
    reference = {} if arguments.reference is None else read_generations([arguments.reference])
    if arguments.perplexity is not None:
        check_language_model(arguments.perplexity)
    announce("loading models", arguments.json)
    from radq.evaluation.sweep.measure import Instruments, MeasuredCell, encode_samples
    from radq.judges.readers import load_encoder
    from radq.models.loading import find_device

    device, progress = find_device(arguments.device), not arguments.json
    instruments = Instruments.load(judges, arguments.perplexity, device, arguments.cache)
    needs_encoder = any("features" in METRICS[name].needs for name in plain)
    encoder = load_encoder(arguments.mauve, device) if arguments.mauve is not None and needs_encoder else None
    rows = []
    for (cell, group), texts in parts.items():
        arrays = instruments.measure(texts.prompts, texts.continuations, progress)
        if encoder is not None:
            references = [part for (_, name), part in reference.items() if name == group]
            for name, part in zip(("features", "reference"), (texts, *references[:1]), strict=False):
                arrays[name] = encode_samples(encoder, part.continuations, progress)
        measured = MeasuredCell(SweepCell(cell, None, None, None, None, 0), texts.continuations, arrays)
        metrics, _ = measured.estimate([*list_judged(judges), *plain], range(len(texts.prompts)), bootstrap)
        rows.append({"cell": cell, "group": group, "prompts": len(texts.prompts), "metrics": metrics})
    if arguments.json:
        print_json({"metrics": rows})
        return
    models = [("perplexity under", arguments.perplexity), ("MAUVE by", arguments.mauve)]
    print_facts([*(("judge", judge) for judge in judges), *((name, model) for name, model in models if model)])
    print_metrics(rows)


def _sort_metrics(arguments: Measure) -> tuple[dict[str, JudgeUse], list[str]]:
    """Split the metrics into those of each judge and those without; refuse those that nothing measures."""
    names = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
    for name in names:
        check_metric(name)
        needed = METRICS[name].needs
        if "scores" in needed and not arguments.judge:
            raise OptionError(f"{name} has no judge.", "give --judge JUDGE.")
        if "drawn_nll" in needed:
            raise OptionError(
                f"{name} can only be measured while texts are decoded.",
                "add it to the metrics of a sweep of radq eval.",
            )
        if "nll" in needed and arguments.perplexity is None:
            raise OptionError(f"{name} has no model to measure it.", "give --perplexity MODEL.")
        if "features" in needed and (arguments.mauve is None or arguments.reference is None):
            raise OptionError(f"{name} has nothing to compare.", "give --mauve ENCODER and --reference FILE.")
    if "win_rate" in names:
        raise OptionError("win_rate compares with unguided texts, which a file does not hold.", "use `radq eval`.")
    judged = [name for name in names if name in ATTRIBUTE_METRICS]
    plain = [name for name in names if name not in ATTRIBUTE_METRICS]
    return {judge: JudgeUse(judge, judged, arguments.reads) for judge in arguments.judge}, plain


# --- radq eval choices ---


def _answer(arguments: Choices) -> None:
    if not arguments.data.is_file():
        raise OptionError(f"there is no file {str(arguments.data)!r}.", "give a file of questions.")
    base, guides = check_guides(arguments.base, arguments.guide)
    budget = choose_budget(arguments.kl_budget, guides)
    announce(f"loading {' and '.join([arguments.base, *arguments.guide])}", arguments.json)
    from radq.evaluation.choices import KeptAnswers, count_right, find_answers, read_questions
    from radq.guides.spec import load_guides
    from radq.models.loading import find_device, load

    questions = read_questions(arguments.data)[: arguments.limit]
    device = find_device(arguments.device)
    lm, tokenizer = load(base, device)
    guide = load_guides(guides, device, lm=lm)
    answers = {}
    for name in ("unguided",) if guide is None else ("unguided", "guided"):
        used = (None, None) if name == "unguided" else (guide, budget)
        kept = None
        if arguments.out is not None:
            depends: dict[str, object] = {
                "questions": fingerprint_values([asdict(question) for question in questions]),
                "base": base.fingerprint,
                "guides": [{"model": one.fingerprint, "numbers": one.numbers} for one in guides if name == "guided"],
                "kl_budget": used[1],
            }
            kept = KeptAnswers(arguments.out / f"{name}.jsonl", depends)
        answers[name] = find_answers(lm, tokenizer, questions, *used, not arguments.json, kept)
    sums = {name: count_right(questions, given) for name, given in answers.items()}
    result = {name: asdict(estimate(right)) for name, right in sums.items()}
    if guide is not None:
        result["change"] = asdict(estimate_change(sums["guided"], sums["unguided"]))
    if arguments.json:
        print_json({"questions": len(questions), "accuracy": result, "answers": answers})
        return
    print(f"accuracy on {len(questions)} questions:")
    for name, accuracy in result.items():
        print(f"  {name:<9} {accuracy['value']:.3f} ({accuracy['low']:.3f} to {accuracy['high']:.3f})")


SUBCOMMANDS = {"sweep": (SweepArguments, _sweep), "measure": (Measure, _measure), "choices": (Choices, _answer)}
