"""The outcome of a run in words: whether it has learned anything, how to go on, and a model card for the hub.

    push_to_hub("praise", "owner/praise", license="apache-2.0")

The figures are those of texts that were held out, beside those of a constant, which always answers the mean label. A
card says what the model is, its data, settings, figures and limits. Nothing in it is guessed: a folder without a run,
such as that of a converted model, has a shorter card. Paths of this machine are left out.
"""

import contextlib
import json
import math
import shlex
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from radq.data.label_scale import read_scale
from radq.errors import ModelError, OptionError, ServerError, first_line
from radq.files import MODEL_FILES
from radq.models.calibration import Calibration, read_calibrations
from radq.settings import read_yaml
from radq.sources.embedded import EMBEDDED, HUB_NAME
from radq.sources.hub import looks_like_path
from radq.sources.model_source import ModelSource, check_reward_model
from radq.training.config import RewardTrainingConfig
from radq.training.run_folder import LABELS, RESULTS, SETTINGS

CARD = "README.md"
SHOWN = (  # settings that a card names
    *("kind", "reads", "head", "num_layers", "lora_rank", "loss", "epochs", "max_steps", "batch_size"),
    *("learning_rate", "max_length", "reg_weight", "seed", "teacher", "teacher_classifier", "base"),
)
INTRODUCTION = """# {title}

A {kind} reward model of radq{origin}. It gives each token of a text a reward for {attributes}, and steers a language \
model with the same vocabulary. Rewards are clamped to {limits}.

```python
from radq import RewardGuide, RewardModel

reward = RewardModel.from_pretrained("{name}")
guide = RewardGuide(reward, {{"{attribute}": 20.0}})  # a negative strength steers away
```"""
LIMITS = """- Rewards are meant for language models with the vocabulary of the base above; radq refuses others.
- It repeats what its labels say, with their mistakes and prejudices, and was measured on texts like those alone.
- Guidance shifts probabilities and guarantees nothing: check texts with a judge that was not trained on the same data.
- Strong guidance makes texts less fluent. Begin with a small strength."""
BETA = 20.0  # a strength to begin with, for rewards from 0 to 1
PAIR_BETA = 60.0  # the same for pairs, times the width of their range, which is that of whole texts: tokens differ less
HINT = "look at some rows, give more rows, more --epochs, or another --learning-rate"
ERRORS = {"weighted_mse": "the labels", "distillation_mse": "the teacher's rewards"}
RANKS = {  # figures of an attribute, with their meaning
    "auc": ("AUC", "ranks a random high {unit} above a random low one {value:.0%} of the time; chance does so 50%"),
    "spearman": ("rank correlation", "1 is the order of the labels, 0 is chance"),
}


class Finding(NamedTuple):
    """A figure of the held-out texts, with its meaning."""

    sentence: str
    problem: str = ""  # what is wrong if the figure is no better than chance, or than a constant


def describe_outcome(metrics: dict[str, float], attributes: list[str], unit: str = "text") -> list[str]:
    """Write sentences about the figures of each attribute and their meaning; `unit` is what has labels."""
    nothing = "no texts were held out, so nothing is known about its quality; --eval-share 0.1 holds out a tenth"
    found = [finding.sentence for finding in _find(metrics, attributes, unit)]
    return found if "eval_loss" in metrics else [nothing, *found]


def warn_of_chance(metrics: dict[str, float], attributes: list[str]) -> None:
    """Warn if the model is no better than chance, or than a constant: the mean of the labels or teacher's rewards."""
    if problems := [finding.problem for finding in _find(metrics, attributes) if finding.problem]:
        warnings.warn(f"on the held-out texts {'; '.join(problems)}. hint: {HINT}.", stacklevel=2)


def _find(metrics: dict[str, float], attributes: list[str], unit: str = "text") -> Iterator[Finding]:
    """Say what the known figures mean: ranks of each attribute, pairs, and errors beside those of a constant."""
    known = {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")}
    for attribute, (name, (title, meaning)) in product(attributes, RANKS.items()):
        if (value := known.get(f"{name}_{attribute}")) is not None:
            chance = known.get(f"chance_{name}_{attribute}", -math.inf)
            problem = f"the {title} of {attribute!r} is {value:.2f}, which is no better than chance: random answers "
            problem += f"reach {chance:.2f} in one of twenty cases"
            sentence = f"{attribute}: {title} {value:.2f}: {meaning.format(unit=unit, value=value)}"
            yield Finding(sentence, problem * (value <= chance))
    if (accuracy := known.get("pair_accuracy")) is not None:
        chance, share = known.get("chance_pair_accuracy", 0.5), f"the larger reward in {accuracy:.0%} of the"
        problem = f"the pair accuracy is {accuracy:.2f}, which is no better than chance: random rewards reach "
        problem += f"{chance:.2f} in one of twenty cases"
        if accuracy < 1 - chance:  # which random rewards do in one of twenty cases, too
            problem = f"the preferred text has {share} pairs, less than one half: chosen and rejected may be "
            problem += "swapped in one of the files"
        sentence = f"pair accuracy {accuracy:.2f}: the preferred text has {share} held-out pairs; chance does so in 50%"
        yield Finding(f"{''.join(attributes[:1])}: {sentence}", problem * (accuracy <= chance))
    for name, target in ERRORS.items():
        own, constant = known.get(name), known.get(f"constant_{name}")
        if own is not None and constant is not None:
            problem = f"the model does not beat a constant: its mean squared distance to {target} is {own:.4g}, that "
            problem += f"of a constant {constant:.4g}"
            sentence = f"mean squared distance to {target}: {own:.4f}; that of a constant is {constant:.4f}"
            yield Finding(sentence, problem * (own >= constant))
    own, constant = known.get("candidate_error"), known.get("constant_candidate_error")
    if own is not None and constant is not None:
        differences = "differences between candidates for the next token"
        sentence = f"{differences}: correlation {known.get('candidate_correlation', math.nan):.2f}: 1 is the order of "
        sentence += f"the teacher, 0 is chance; error {own:.4f}; that of equal rewards is {constant:.4f}"
        problem = f"the {differences} have an error of {own:.4g}, and equal rewards one of {constant:.4g}"
        yield Finding(sentence, problem * (own >= constant))


def next_commands(config: RewardTrainingConfig, attributes: list[str], beta: float = BETA) -> list[str]:
    """List commands that use the model: to score, to generate, and to distil a RAD-V into a faster RAD-Q."""
    first = _find_first_run(config)
    base = config.base or ("BASE" if first is None else first.backbone)
    out, data = shlex.quote(config.out), shlex.quote(config.data[0])
    text = config.response_columns[0] if config.compares else config.text
    column = "" if text == "text" else f" --text {shlex.quote(text)}"
    guide = shlex.quote(f"{config.out}:{attributes[0]}={beta:.2g}")
    commands = [
        f'radq score "I think that" --reward {out}'
        if config.responses
        else f"radq score --reward {out} --data {data}{column}",
        f'radq generate --base {shlex.quote(base)} --guide {guide} --prompt "I think that"',
    ]
    if config.kind == "v" and not config.responses:
        # a readout has no transformer that the student could begin as a copy of
        reads = f" --backbone {shlex.quote(base)} --reads base" if first and first.reads == "base" else ""
        student = f"{reads} --out {shlex.quote(config.out + '-q')}"
        commands.append(f"radq distill --teacher {out} --data {data}{column}{student}")
    return commands


def _find_first_run(config: RewardTrainingConfig) -> RewardTrainingConfig | None:
    """Find the settings of the run that began with a language model; None if no run folder has them."""
    seen = {config.out}
    run: RewardTrainingConfig | None = config
    while run is not None and not run.backbone:
        before = run.init or run.teacher
        if before in seen:
            return None
        seen.add(before)
        run = _read_run(Path(before))
    return run


# --- the hub ---


def push_to_hub(
    folder: str | Path,
    name: str,
    license: str | None = None,  # noqa: A002
    private: bool = False,
    token: str | None = None,
) -> str:
    """Upload a reward model with its card, in one commit, and return the address of the commit.

    Args:
        folder: the folder of a reward model, such as the --out of a run. A README.md in it is the card; otherwise the
            card is written from the run. Checkpoints and other files of the run stay here.
        name: the name on the hub, OWNER/NAME. The repository is made if it does not exist.
        license: the licence, as the hub writes it, such as apache-2.0.
        private: whether a new repository is private.
        token: a token that may write there; by default that of `hf auth login` or of HF_TOKEN.
    """
    folder = Path(folder)
    if name.count("/") != 1:
        raise OptionError(f"the name must be written as OWNER/NAME, got {name!r}.", "put your name before it.")
    if not folder.is_dir():
        raise ModelError(f"there is no folder {str(folder)!r}.", "give the folder of a reward model.")
    check_reward_model(folder)
    stored = ModelSource.find(folder).config
    backbone = stored.get("backbone_name")
    if backbone and backbone != EMBEDDED and not stored.get("backbone_revision"):
        warnings.warn(
            f"the backbone {Path(backbone).name!r} of this model is a folder, which is not uploaded: others have to "
            "name it by from_pretrained(…, backbone=FOLDER).",
            stacklevel=2,
        )
    paths = {path for pattern in MODEL_FILES for path in folder.glob(pattern)}  # without those of a run
    inside = sorted(file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    files: dict[str, Path | bytes] = {file.relative_to(folder).as_posix(): file for file in inside}
    card = folder / CARD
    files[CARD] = card if card.is_file() else write_card(folder, name, license).encode()
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi

    hub = HfApi(token=token)
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        operations: Any = [CommitOperationAdd(path, contents) for path, contents in files.items()]
        return str(hub.create_commit(name, operations, commit_message="Upload a reward model of radq").commit_url)
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ServerError(
            f"{name!r} cannot be written on the hub {hub.endpoint}: {first_line(error)}.",
            "check the name, the network, and `hf auth login`.",
        ) from error


# --- the card ---


def write_card(folder: str | Path, name: str, license: str | None = None) -> str:  # noqa: A002
    """Write the card of a reward model that will be called `name` on the hub, as markdown with a YAML header."""
    folder = Path(folder)
    model, run, results = ModelSource.find(folder).config, _read_run(folder), _read_json(folder / RESULTS)
    base, commit = _describe_base(model, run)
    header: dict[str, Any] = {"library_name": "radq", "tags": ["radq", "reward-model", "controlled-generation"]}
    if license:
        header["license"] = license
    if "/" in base or commit:
        header["base_model"] = base
    if run is not None and (datasets := [name.partition(":")[0] for name in run.data if not _is_file(name)]):
        header["datasets"] = datasets
    introduction = INTRODUCTION.format(
        title=name.rpartition("/")[2],
        kind=f"RAD-{model['kind'].upper()}",
        origin=(f", trained from {base}" if base else "") + (f" at commit {commit}" if commit else ""),
        attributes=", ".join(f"`{attribute}`" for attribute in model["attributes"]),
        limits=model.get("response_range"),
        name=name,
        attribute=model["attributes"][0],
    )
    parts = [f"---\n{yaml.safe_dump(header, sort_keys=False)}---", introduction]
    if run is not None:
        parts += ["## Training", _describe_training(folder, run)]
    parts += ["## Evaluation", _write_figures(results)]
    if calibrations := read_calibrations(folder):
        parts += ["## Strengths", _write_strengths(calibrations)]
    licence = f"The licence is {license}." if license else "No licence is stated; those of the base and the data apply."
    return "\n\n".join([*parts, "## Limits", LIMITS, "## Licence", licence]) + "\n"


def _read_run(folder: Path) -> RewardTrainingConfig | None:
    """The settings of the run that made a model; None if there was none."""
    with contextlib.suppress(OptionError):
        return read_yaml(folder / SETTINGS, RewardTrainingConfig)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return {}


def _describe_base(model: dict[str, Any], run: RewardTrainingConfig | None) -> tuple[str, str | None]:
    """The name of the language model that a reward model began as, and its commit if it comes from the hub."""
    first = None if run is None else _find_first_run(run)
    name = model.get("backbone_name") or ("" if first is None else first.backbone)
    if name in ("", EMBEDDED):
        return HUB_NAME if name else "", None
    if looks_like_path(name) or Path(name).is_dir():
        return Path(name).name, None
    return name, model.get("backbone_revision") or ModelSource.find(name).snapshot.name


def _is_file(name: str) -> bool:
    return looks_like_path(name) or Path(name).exists() or bool(Path(name).suffix)


def _shorten(name: Any) -> Any:
    """The name of a file or folder without its path; other values as they are."""
    return Path(name).name if isinstance(name, str) and _is_file(name) else name


def _write_table(*rows: Sequence[Any]) -> str:
    """A table in markdown, of which the first row is the header."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _describe_training(folder: Path, run: RewardTrainingConfig) -> str:
    lines = [f"Data: {', '.join(map(_shorten, run.data))}."]
    for attribute, stored in _read_json(folder / LABELS).items():
        sentence = read_scale(stored, str(folder)).describe(attribute).partition(" (change")[0]
        lines.append(f"{sentence[0].upper()}{sentence[1:]}.")
    settings = {name: _shorten(getattr(run, name)) for name in SHOWN}
    shown = [(name, value) for name, value in settings.items() if value not in (None, "", -1, 0)]
    return "\n".join([*lines, "", _write_table(("setting", "value"), *shown)])


def _write_figures(results: dict[str, Any]) -> str:
    """A table of the figures on held-out texts, without those of speed."""
    figures = {name.removeprefix("eval_"): value for name, value in results.items() if name.startswith("eval_")}
    if not figures:
        return "No texts were held out, so nothing is known."
    ignored = ("runtime", "samples_per_second", "steps_per_second")
    rows = [(name, f"{value:.4g}") for name, value in figures.items() if name not in ignored]
    intro = "On held-out texts; `constant_…` and `chance_…` are what a constant and random answers reach."
    return f"{intro}\n\n{_write_table(('figure', 'value'), *rows)}"


def _write_strengths(calibrations: list[Calibration]) -> str:
    """A table of measured strengths, for each attribute and base model."""
    intro = (
        "These were measured with `radq calibrate`: 1 is the strength beyond which the judge improves no further, or "
        "the perplexity leaves its bound."
    )
    rows = [("attribute", "base", "judge", "strength", "β", "KL budget", "judge's score", "perplexity ratio")]
    for calibration in calibrations:
        base, judge = _shorten(calibration.base), calibration.judge
        judge = Path(judge).name if _is_file(judge.rpartition(":")[2]) else judge
        for point in calibration.table:
            budget = "none" if point.kl_budget is None else f"{point.kl_budget:.3g}"
            numbers = f"{point.beta:.3g}", budget, f"{point.score:.3g}", f"{point.perplexity_ratio:.3g}"
            rows.append((calibration.attribute, base, judge, f"{point.strength:.2g}", *numbers))
    return f"{intro}\n\n{_write_table(*rows)}"
