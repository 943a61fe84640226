"""The labels of a classifier: which of them is meant, and how its outputs become scores.

Importing this module imports no torch, so that a mistake shows at once.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from radq.errors import ModelError, OptionError

Link = Literal["softmax", "sigmoid", "identity"]


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """The names that a config.json gives to the outputs of a classifier, in their order; none if it names none."""
    found = config.get("id2label") or {}
    try:
        return [str(found[number]) for number in sorted(found, key=int)]
    except (TypeError, ValueError) as error:
        raise ModelError(f"id2label in a config.json must map numbers to labels, got {found!r}.", "mend it.") from error


def find_link(problem_type: str | None, num_outputs: int) -> Link:
    """The function that turns outputs into scores, by the `problem_type` of a config.json.

    One output without a type is that of a binary classifier or of a reward model, and goes through a sigmoid.
    """
    if problem_type == "regression":
        return "identity"
    return "sigmoid" if problem_type == "multi_label_classification" or num_outputs == 1 else "softmax"


def choose_label(labels: Sequence[str], wanted: str | None, model: str, mark: str = "#") -> int:
    """Find the position of a label: the one that is wanted, the only one, or the one that the other one negates.

    `mark` stands before labels in the names of models, for the hint.
    """
    if wanted is not None:
        matches = [n for n, label in enumerate(labels) if label == wanted] or [
            n for n, label in enumerate(labels) if _plain(label) == _plain(wanted)
        ]
        if len(matches) == 1:
            return matches[0]
        if wanted.isdecimal():
            return _choose_by_number(labels, int(wanted), model)
        raise OptionError(f"{model} has no label {wanted!r}.", f"choose from {', '.join(labels)}.")
    if len(labels) == 1:
        return 0
    if len(labels) == 2:
        for n in (0, 1):
            if _negates(_plain(labels[1 - n]), _plain(labels[n])):
                return n
    raise OptionError(
        f"{model} has the labels {', '.join(labels)}, and it is not clear which of them is the attribute.",
        f"add the one you mean, such as {mark}{labels[-1]}.",
    )


def _choose_by_number(labels: Sequence[str], wanted: int, model: str) -> int:
    """Find the label with this number in its name, where all names have numbers; else the one at this position, from 0.

    In "1 star" to "5 stars", 1 is the first label, not the second. A number that might mean either is refused.
    """
    numbers = [_find_number(label) for label in labels]
    named = [n for n, number in enumerate(numbers) if number == wanted]
    if None in numbers and wanted < len(labels):
        named = sorted({wanted, *named})
    if len(named) == 1:
        return named[0]
    problem = f"{wanted} may be {' or '.join(repr(labels[n]) for n in named)}" if named else f"has no label '{wanted}'"
    raise OptionError(f"{model}{':' * bool(named)} {problem}.", f"choose a name from {', '.join(labels)}.")


def _find_number(label: str) -> float | None:
    """The number with which the name of a label begins, or else the last one in it."""
    numbers = re.findall(r"\d+(?:\.\d+)?", label)
    return None if not numbers else float(numbers[0 if label[0].isdecimal() else -1])


def _plain(label: str) -> str:
    return "".join(character for character in label.lower() if character.isalnum())


def _negates(label: str, other: str) -> bool:
    return (label, other) in (("negative", "positive"), ("neg", "pos")) or label in (f"non{other}", f"not{other}")
