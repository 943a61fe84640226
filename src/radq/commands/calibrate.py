"""radq calibrate MODEL --base B --prompts FILE --judge JUDGE: strengths from 0 to 1 that mean something."""

import shlex
import warnings
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radq.commands import AsJson, Cache, Device
from radq.commands.console import announce, print_json, print_table
from radq.commands.judge import check_judge_kind
from radq.errors import OptionError
from radq.evaluation.calibration import CalibrationPlan, calibrate, read_enough_prompts
from radq.evaluation.estimates import TRUSTED_PROMPTS
from radq.files import atomic_file, explained_writing
from radq.models.calibration import calibrated_folder, write_calibration
from radq.settings import exact
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource, check_reward_model, require_reward_model

if TYPE_CHECKING:
    from radq.models.calibration import Calibration


@dataclass(frozen=True)
class Arguments(CalibrationPlan):
    """Find the β, or the KL budget, of strengths from 0 to 1, and store them in the folder of the reward model.

    Strength 1 is the point beyond which an independent judge no longer improves by more than its interval, or the
    perplexity leaves a bound; 50% reaches half of its improvement. `--guide MODEL:attribute=strong` and `=60%`
    then work. The same command goes on with a calibration that was stopped.
    """

    plot: Path | None = None
    """SVG file to draw: the judge's metric and the perplexity over β or the KL budget, with the safe zone."""
    cache: Cache = None
    device: Device = "auto"
    json: AsJson = False

    def __post_init__(self) -> None:
        """Leave the checks to the plan that `run` makes of these arguments."""


def run(arguments: Arguments) -> None:
    plan, target = _check(arguments)
    announce(f"calibrating {plan.attribute} of {arguments.folder} over {plan.base}", arguments.json)
    from radq.models.loading import find_device

    device = find_device(arguments.device)
    calibration = calibrate(plan, _write_command(arguments), device, arguments.cache, progress=not arguments.json)
    file = write_calibration(target, calibration)
    if calibration.limited_by == "range":
        warnings.warn(
            "the judge still improves at the largest level, which strength 1 now is. hint: give larger --levels.",
            stacklevel=2,
        )
    if calibration.num_prompts < TRUSTED_PROMPTS:
        warnings.warn(
            f"intervals from {calibration.num_prompts} prompts are too narrow. hint: give {TRUSTED_PROMPTS} or more.",
            stacklevel=2,
        )
    if arguments.plot is not None:
        from radq.report.plots import plot_calibration

        with explained_writing(arguments.plot), atomic_file(arguments.plot) as temporary:
            temporary.write_text(plot_calibration(calibration).themed, encoding="utf-8")
    if arguments.json:
        print_json(asdict(calibration) | {"out": str(file)})
    else:
        _show(arguments, calibration, file)


# --- checks ---


def _check(arguments: Arguments) -> tuple[CalibrationPlan, Path]:
    """Refuse what can be refused before torch is imported; return the plan, and the folder to write into."""
    kind, _, name = arguments.folder.partition(":")
    if kind == EMBEDDED and not name:
        raise OptionError("'embedded' are several reward models.", "name one, such as embedded:sentiment.")
    attribute = arguments.attribute or _find_attribute(arguments.folder)
    check_reward_model(arguments.folder, [attribute])
    target = Path(calibrated_folder(arguments.folder, attribute))
    if not target.is_dir():
        raise OptionError(
            f"the strengths of {arguments.folder!r} cannot be stored, since it is no folder.",
            "download the model into a folder, and calibrate it there.",
        )
    check_judge_kind(arguments.judge)
    if arguments.plot is not None and arguments.plot.suffix != ".svg":
        raise OptionError(f"--plot must be an SVG file, got {str(arguments.plot)!r}.", "end its name with .svg.")
    settings: dict[str, Any] = {option.name: getattr(arguments, option.name) for option in fields(CalibrationPlan)}
    folder = EMBEDDED if kind == EMBEDDED else arguments.folder
    settings |= {"folder": folder, "attribute": attribute}
    plan = CalibrationPlan(**settings)
    sweep = plan.sweep()
    read_enough_prompts(sweep)
    sweep.check_models()
    _warn_of_shared_judge(plan, target)
    return plan, target


def _find_attribute(model: str) -> str:
    stored = ModelSource.find(model).config
    require_reward_model(model, stored)
    known = stored.get("attributes") or []
    if len(known) != 1:
        raise OptionError(f"{model!r} has several attributes.", f"give --attribute {' or '.join(known)}.")
    return known[0]


def _warn_of_shared_judge(plan: CalibrationPlan, target: Path) -> None:
    """Warn of a judge that is the guide itself, or that reads the hidden states of the base model."""
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
    """Write the command with the options that differ from their defaults, and that change the strengths."""
    words = ["radq", "calibrate", arguments.folder]
    for option in fields(CalibrationPlan)[1:]:
        value: Any = getattr(arguments, option.name)
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        if value != default:
            values = value if isinstance(value, list) else [] if value is True else [value]
            words.append(f"--{option.name.replace('_', '-')}")
            words += [exact(part) if isinstance(part, float) else str(part) for part in values]
    return shlex.join(words)


# --- results ---


REASONS = {
    "judge": "the judge improves no further by more than its interval",
    "perplexity": "the perplexity then leaves its bound",
    "range": "no larger level was tried",
}


def _show(arguments: Arguments, calibration: "Calibration", file: Path) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    def interval(values: tuple[float, float, float]) -> str:
        return "{:.3f} ({:.3f} to {:.3f})".format(*values)

    texts = f"{calibration.num_prompts} prompts × {calibration.samples} samples"
    print(f"{calibration.metric} of {calibration.judge} over {texts}:")
    rows = [
        [
            *map(number, (point.beta, point.kl_budget)),
            *map(interval, (point.score, point.gain, point.perplexity_ratio)),
            *(number(ends and ends[0]) for ends in (point.ended, point.length)),
        ]
        for point in calibration.measured
    ]
    print_table(["β", "KL budget", "score", "gain", "perplexity ratio", "ended", "tokens"], rows)
    rows = [
        list(map(number, (point.strength, point.beta, point.kl_budget, point.score, point.perplexity_ratio)))
        for point in calibration.table
    ]
    print_table(["strength", "β", "KL budget", "expected score", "expected perplexity ratio"], rows)
    end = calibration.at(1.0)
    reason = REASONS[calibration.limited_by]
    print(f"strength 1 is β = {end.beta:g} with the KL budget {number(end.kl_budget)}: {reason}")
    print(f"→ {file}")
    guide = EMBEDDED if arguments.folder.startswith(f"{EMBEDDED}:") else arguments.folder
    print(f"next: radq generate --base {arguments.base} --guide {guide}:{calibration.attribute}=strong --prompt …")
