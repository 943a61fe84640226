"""radq calibrate MODEL --base B --prompts FILE --judge JUDGE: strengths from 0 to 1 that mean something."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends, read_budget

if TYPE_CHECKING:
    from radq.evaluation.calibration import CalibrationPlan
    from radq.models.calibration import Calibration

PRINTED_ONLY = ("plot", "cache", "device", "json")  # options that do not change the strengths


@dataclass
class Arguments:
    """Find the β, or the KL budget, of strengths from 0 to 1, and store them in the folder of the reward model.

    Strength 1 is the point beyond which an independent judge no longer improves by more than its interval, or the
    perplexity leaves a bound; 50% reaches half of its improvement. `--guide MODEL:attribute=strong` and `=60%`
    then work. The same command goes on with a calibration that was stopped.
    """

    model: Positional[str]
    """Folder of the reward model, or embedded:sentiment or embedded:toxicity."""
    prompts: str
    """File of prompts, one per line, or with a column prompt or text (csv, tsv, jsonl, parquet, also compressed)."""
    judge: str
    """An independent judge of the attribute, as `radq judge score` takes it; it should share neither model nor data
    with the reward model."""
    base: str = "embedded"
    """Language model to steer: a hub name, a folder, or embedded."""
    attribute: str | None = None
    """Attribute to calibrate; may be left out if the model has one."""
    reduce: bool = False
    """Steer away from the attribute, with a negative β, so that the judge's scores fall."""
    by: Literal["beta", "kl"] = "beta"
    """beta: strengths differ in β under one KL budget; kl: they differ in the KL budget, with one large β."""
    levels: list[float] = field(default_factory=list)
    """Absolute values of β, or KL budgets with --by kl, to try; by default six, chosen by the range of the rewards."""
    max_perplexity_ratio: float = 1.3
    """Bound of the perplexity under the base model, as a multiple of that of unguided texts; the upper end of its
    interval must stay inside."""
    metric: Literal["mean_score", "avg_max", "positive_rate", "toxic_rate"] = "mean_score"
    """Metric of the judge's scores; avg_max is the mean over prompts of the highest score."""
    reads: Literal["continuation", "text"] = "continuation"
    """The judge reads continuations alone, or prompts with their continuations."""
    limit: int | None = None
    """Number of prompts to use, from the beginning of the file; by default all."""
    samples: int = 5
    """Number of continuations of each prompt at each level."""
    max_new_tokens: int = 20
    """Largest number of tokens of a continuation."""
    top_k: int = 20
    """Number of candidates of a token."""
    kl_budget: float | Literal["none"] = DEFAULT_KL_BUDGET
    """With --by beta, the KL budget of each token under which strengths are measured and later used; none is no
    budget."""
    ends: Ends = "base"
    """Stop tokens keep the probability that the language model gives them (base), or guides reward them like words
    (taught), which is for models that were taught ends."""
    seed: int = 0
    """Seed of the random numbers."""
    batch_size: int = 100
    """Number of continuations that are decoded together."""
    resamples: int = 1000
    """Number of resamples of the prompts, for the intervals."""
    plot: Path | None = None
    """SVG file to draw: the judge's metric and the perplexity over β or the KL budget, with the safe zone."""
    cache: Path | None = None
    """Folder in which texts and scores are kept; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the calibration as JSON, without progress bars."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce, print_json

    plan, target = _check(arguments)
    announce(f"calibrating {plan.attribute} of {arguments.model} over {plan.base}", arguments.json)
    from radq.evaluation.calibration import calibrate
    from radq.models.calibration import write_calibration
    from radq.models.loading import find_device

    device = find_device(arguments.device)
    found = calibrate(plan, _write_command(arguments), device, arguments.cache, progress=not arguments.json)
    file = write_calibration(target, found)
    _warn(found)
    if arguments.plot is not None:
        _draw(arguments.plot, found)
    if arguments.json:
        from dataclasses import asdict

        print_json(asdict(found) | {"out": str(file)})
    else:
        _show(arguments, found, file)


# --- checks ---


def _check(arguments: Arguments) -> "tuple[CalibrationPlan, Path]":
    """Refuse what can be refused before torch is imported; return the plan, and the folder to write into."""
    from radq.errors import OptionError
    from radq.evaluation.calibration import CalibrationPlan, read_enough_prompts
    from radq.models.calibration import calibrated_folder
    from radq.settings import names_in_table
    from radq.sources.embedded import EMBEDDED
    from radq.sources.model_source import check_reward_model

    kind, _, name = arguments.model.partition(":")
    if kind == EMBEDDED and not name:
        raise OptionError("'embedded' are several reward models.", "name one, such as embedded:sentiment.")
    attribute = _find_attribute(arguments)
    check_reward_model(arguments.model, [attribute])
    target = Path(calibrated_folder(arguments.model, attribute))
    if not target.is_dir():
        raise OptionError(
            f"the strengths of {arguments.model!r} cannot be stored, since it is no folder.",
            "download the model into a folder, and calibrate it there.",
        )
    kinds = names_in_table("radq.judges.models:JUDGES")
    if arguments.judge.partition(":")[0] not in kinds:
        raise OptionError(f"there is no judge {arguments.judge!r}.", f"begin with one of {', '.join(kinds)}.")
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise OptionError(f"--plot must be an SVG file, got {str(arguments.plot)!r}.", "end its name with .svg.")
    options = vars(arguments) | {
        "folder": EMBEDDED if kind == EMBEDDED else arguments.model,
        "attribute": attribute,
        "kl_budget": read_budget(arguments.kl_budget),
    }
    plan = CalibrationPlan(**{field.name: options[field.name] for field in fields(CalibrationPlan)})
    sweep = plan.sweep()
    read_enough_prompts(sweep)
    sweep.check_models()
    _warn_of_shared_judge(plan, target)
    return plan, target


def _find_attribute(arguments: Arguments) -> str:
    from radq.errors import OptionError
    from radq.sources.model_source import ModelSource, require_reward_model

    if arguments.attribute is not None:
        return arguments.attribute
    stored = ModelSource.find(arguments.model).config
    require_reward_model(arguments.model, stored)
    known = stored.get("attributes") or []
    if len(known) != 1:
        raise OptionError(f"{arguments.model!r} has several attributes.", f"give --attribute {' or '.join(known)}.")
    return known[0]


def _warn_of_shared_judge(plan: "CalibrationPlan", target: Path) -> None:
    """Warn of a judge that is the guide itself, or that reads the hidden states of the base model."""
    import warnings

    from radq.sources.embedded import EMBEDDED

    judge = plan.judge.removeprefix("not:")
    kind, _, source = judge.partition(":")
    folder = source.partition("#")[0]
    same = Path(folder).resolve() == target.resolve() or folder == f"{EMBEDDED}:{plan.attribute}"
    if kind == "reward" and same:
        reason = "is the reward model itself, which sees the improvement that it makes"
    elif kind == "linear" and source.startswith(EMBEDDED) and plan.base == EMBEDDED:
        reason = "reads the hidden states of the base model, so it is not independent of it"
    else:
        return
    warnings.warn(f"the judge {plan.judge!r} {reason}. hint: use a judge of another family.", stacklevel=2)


def _write_command(arguments: Arguments) -> str:
    """Write the command with the options that differ from their defaults."""
    import shlex

    from radq.settings import exact

    words = ["radq", "calibrate", arguments.model]
    for option in fields(arguments):
        value = getattr(arguments, option.name)
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        if option.name in ("model", *PRINTED_ONLY) or value == default:
            continue
        flag = f"--{option.name.replace('_', '-')}"
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [flag, *(exact(one) if isinstance(one, float) else str(one) for one in values)]
    return shlex.join(words)


# --- results ---


def _warn(found: "Calibration") -> None:
    import warnings

    from radq.evaluation.estimates import TRUSTED_PROMPTS

    if found.limited_by == "range":
        warnings.warn(
            "the judge still improves at the largest level, which strength 1 now is. hint: give larger --levels.",
            stacklevel=2,
        )
    if found.num_prompts < TRUSTED_PROMPTS:
        warnings.warn(
            f"intervals from {found.num_prompts} prompts are too narrow. hint: give {TRUSTED_PROMPTS} or more.",
            stacklevel=2,
        )


def _draw(file: Path, found: "Calibration") -> None:
    from radq.files import atomic_file, explained_writing
    from radq.report.plots import plot_calibration

    with explained_writing(file), atomic_file(file) as temporary:
        temporary.write_text(plot_calibration(found).themed, encoding="utf-8")


REASONS = {
    "judge": "the judge improves no further by more than its interval",
    "perplexity": "the perplexity then leaves its bound",
    "range": "no larger level was tried",
}


def _show(arguments: Arguments, found: "Calibration", file: Path) -> None:
    from radq.commands.console import print_table
    from radq.sources.embedded import EMBEDDED

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    def interval(values: tuple[float, float, float]) -> str:
        return "{:.3f} ({:.3f} to {:.3f})".format(*values)

    print(f"{found.metric} of {found.judge} over {found.num_prompts} prompts × {found.samples} samples:")
    print_table(
        ["β", "KL budget", "score", "gain", "perplexity ratio", "ended", "tokens"],
        [
            [
                *map(number, (one.beta, one.kl_budget)),
                *map(interval, (one.score, one.gain, one.perplexity_ratio)),
                *(number(ends and ends[0]) for ends in (one.ended, one.length)),
            ]
            for one in found.measured
        ],
        words=0,
    )
    print_table(
        ["strength", "β", "KL budget", "expected score", "expected perplexity ratio"],
        [
            list(map(number, (one.strength, one.beta, one.kl_budget, one.score, one.perplexity_ratio)))
            for one in found.table
        ],
        words=0,
    )
    end = found.at(1.0)
    print(f"strength 1 is β = {end.beta:g} with the KL budget {number(end.kl_budget)}: {REASONS[found.limited_by]}")
    print(f"→ {file}")
    guide = EMBEDDED if arguments.model.startswith(f"{EMBEDDED}:") else arguments.model
    print(f"next: radq generate --base {arguments.base} --guide {guide}:{found.attribute}=strong --prompt …")
