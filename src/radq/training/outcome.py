"""The outcome of a run in words: what its figures mean, whether it has learned anything, and how to go on.

The figures are those of texts that were held out, beside those of a constant, which always answers the mean label.
"""

import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

from radq.errors import OptionError
from radq.settings import read_yaml
from radq.training.config import RewardTrainingConfig
from radq.training.run_folder import SETTINGS

ERRORS = {"weighted_mse": "the labels", "distillation_mse": "the teacher's rewards"}
BETA = 20.0  # a strength to begin with, for rewards from 0 to 1
PAIR_BETA = 60.0  # the same for pairs, times the width of their range, which is that of whole texts: tokens differ less
HINT = "look at some rows, give more rows, more --epochs, or another --learning-rate"


def describe_outcome(metrics: dict[str, float], attributes: list[str], unit: str = "text") -> list[str]:
    """Write sentences about the figures of each attribute and their meaning; `unit` is what has labels."""
    lines = []
    if "eval_loss" not in metrics:
        lines += ["no texts were held out, so nothing is known about its quality; --eval-share 0.1 holds out a tenth"]
    for attribute in attributes:
        if (auc := metrics.get(f"eval_auc_{attribute}")) is not None:
            meaning = f"ranks a random high {unit} above a random low one {auc:.0%} of the time; chance does so 50%"
            lines.append(f"{attribute}: AUC {auc:.2f}: {meaning}")
        if (correlation := metrics.get(f"eval_spearman_{attribute}")) is not None:
            meaning = "1 is the order of the labels, 0 is chance"
            lines.append(f"{attribute}: rank correlation {correlation:.2f}: {meaning}")
    if (accuracy := metrics.get("eval_pair_accuracy")) is not None:
        meaning = f"the preferred text has the larger reward in {accuracy:.0%} of the held-out pairs"
        lines.append(f"{attributes[0]}: pair accuracy {accuracy:.2f}: {meaning}; chance does so in 50%")
    for name, targets in ERRORS.items():
        if f"eval_{name}" in metrics and f"eval_constant_{name}" in metrics:
            own, constant = metrics[f"eval_{name}"], metrics[f"eval_constant_{name}"]
            lines.append(f"mean squared distance to {targets}: {own:.4f}; that of a constant is {constant:.4f}")
    if (correlation := metrics.get("eval_candidate_correlation")) is not None:
        own, constant = metrics["eval_candidate_error"], metrics["eval_constant_candidate_error"]
        meaning = "1 is the order of the teacher, 0 is chance"
        lines.append(
            f"differences between candidates for the next token: correlation {correlation:.2f}: {meaning}; error "
            f"{own:.4f}; that of equal rewards is {constant:.4f}"
        )
    return lines


def warn_of_chance(metrics: dict[str, float], attributes: list[str]) -> None:
    """Warn if the model is no better than chance, or than a constant: the mean of the labels or teacher's rewards."""
    problems = list(_find_wrong_pairs(metrics))
    for attribute in attributes:
        for name, title in {"auc": "AUC", "spearman": "rank correlation"}.items():
            value = metrics.get(f"eval_{name}_{attribute}")
            chance = metrics.get(f"eval_chance_{name}_{attribute}")
            if value is not None and chance is not None and value <= chance:
                problems.append(
                    f"the {title} of {attribute!r} is {value:.2f}, which is no better than chance: random answers "
                    f"reach {chance:.2f} in one of twenty cases"
                )
    for name, targets in ERRORS.items():
        own, constant = metrics.get(f"eval_{name}"), metrics.get(f"eval_constant_{name}")
        if own is not None and constant is not None and own >= constant:
            problems.append(
                f"the model does not beat a constant: its mean squared distance to {targets} is {own:.4g}, that of a "
                f"constant {constant:.4g}"
            )
    own, constant = metrics.get("eval_candidate_error"), metrics.get("eval_constant_candidate_error")
    if own is not None and constant is not None and own >= constant:
        problems.append(
            f"the differences between candidates for the next token have an error of {own:.4g}, and equal rewards one "
            f"of {constant:.4g}"
        )
    if problems:
        warnings.warn(f"on the held-out texts {'; '.join(problems)}. hint: {HINT}.", stacklevel=2)


def _find_wrong_pairs(metrics: dict[str, float]) -> Iterator[str]:
    """Say what is wrong with the accuracy on held-out pairs."""
    accuracy, chance = metrics.get("eval_pair_accuracy"), metrics.get("eval_chance_pair_accuracy")
    if accuracy is None or chance is None:
        return
    if accuracy < 0.5:
        yield (
            f"the preferred text has the larger reward in {accuracy:.0%} of the pairs, less than one half: chosen and "
            "rejected may be swapped in one of the files"
        )
    elif accuracy <= chance:
        yield (
            f"the pair accuracy is {accuracy:.2f}, which is no better than chance: random rewards reach {chance:.2f} "
            "in one of twenty cases"
        )


def next_commands(config: RewardTrainingConfig, attributes: list[str], beta: float = BETA) -> list[str]:
    """List commands that use the model: to score, to generate, and to distil a RAD-V into a faster RAD-Q."""
    first = _find_first_run(config)
    base = config.base or find_language_model(config)
    out, data = shlex.quote(config.out), shlex.quote(config.data[0])
    text = config.response_columns[0] if config.compares else config.text
    column = "" if text == "text" else f" --text-column {shlex.quote(text)}"
    guide = shlex.quote(f"{config.out}:{attributes[0]}={beta:.2g}")
    texts = '--text "I think that"' if config.responses else f"--data {data}{column}"
    commands = [
        f"radq score --reward {out} {texts}",
        f'radq generate --base {shlex.quote(base)} --guide {guide} --prompt "I think that"',
    ]
    if config.kind == "v" and not config.responses:
        column = "" if text == "text" else f" --text {shlex.quote(text)}"
        # a readout has no transformer that the student could begin as a copy of
        reads = f" --backbone {shlex.quote(base)} --reads base" if first and first.reads == "base" else ""
        student = f"{reads} --out {shlex.quote(config.out + '-q')}"
        commands.append(f"radq distill --teacher {out} --data {data}{column}{student}")
    return commands


def find_language_model(config: RewardTrainingConfig) -> str:
    """Find the language model that the reward model began as, perhaps several runs ago; BASE if no run folder says."""
    first = _find_first_run(config)
    return "BASE" if first is None else first.backbone


def _find_first_run(config: RewardTrainingConfig) -> RewardTrainingConfig | None:
    """Find the settings of the run that began with a language model; None if no run folder has them."""
    seen = {config.out}
    while not config.backbone:
        before = config.init or config.teacher
        if before in seen:
            return None
        seen.add(before)
        try:
            config = read_yaml(Path(before) / SETTINGS, RewardTrainingConfig)
        except OptionError:
            return None
    return config
