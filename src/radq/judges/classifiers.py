"""Classifiers by their names: which of their labels are meant, and how their outputs become scores.

FOLDER                       a classifier with one label, or with two of which one negates the other
NAME:toxic                   one label of a classifier
NAME:LABEL_1=praise,LABEL_2  two labels; the attribute of the first is called praise
linear:FOLDER=praise         a judge as `radq judge score` takes it, whose attribute is called praise

`radq.judges.models.load_classifier` loads the judges of such a name. Importing this module imports no torch, so that a
mistake shows at once.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from radq.errors import ModelError, OptionError
from radq.settings import names_in_table
from radq.sources import MODEL_TYPE
from radq.sources.model_source import ModelSource

KINDS = names_in_table("radq.judges.models:JUDGES")
Link = Literal["softmax", "sigmoid", "identity"]


# --- names ---


class ClassifierName(NamedTuple):
    """The parts of the name of a classifier."""

    source: str
    labels: list[tuple[str | None, str | None]]  # with the names of their attributes; None where a name is not given
    is_judge: bool = False  # whether the source is the specification of a judge


def parse_classifier(text: str) -> ClassifierName:
    """Split the name of a classifier into its parts."""
    if Path(text).is_dir():
        return ClassifierName(text, [(None, None)])
    kind, _, rest = text.partition(":")
    if re.match("(not:)*openai:", text):
        raise OptionError(
            f"the judge {text!r} asks a server, and cannot teach a model directly.",
            "write its scores into a table with `radq judge score`, and train on them with `radq train`.",
        )
    if kind in KINDS and rest and not Path(kind).is_dir():
        judge, _, attribute = text.partition("=")
        return ClassifierName(judge, [(None, _check_attribute(attribute, text))], is_judge=True)
    heads = [text[: match.start()] for match in re.finditer(":", text)]
    source = next((head for head in heads if Path(head).is_dir()), kind)  # the name of a folder may have colons itself
    parts = [label.partition("=") for label in text[len(source) + 1 :].split(",")] if heads else []
    pairs = [(label.strip(), name.strip()) for label, _, name in parts]
    if not source or not all(label for label, _ in pairs):
        hint = "write it as NAME, NAME:label or NAME:label=attribute."
        raise OptionError(f"{text!r} is no name of a classifier.", hint)
    return ClassifierName(source, [(label, _check_attribute(name, text)) for label, name in pairs] or [(None, None)])


def _check_attribute(name: str, text: str) -> str | None:
    if re.search(r"[:,=]", name):
        raise OptionError(
            f"an attribute cannot be called {name!r} in {text!r}.", "write a name without : , and = after the label."
        )
    return name or None


def check_classifier(text: str) -> None:
    """Refuse a classifier that cannot be loaded, or whose label is not clear; only its config.json is read."""
    name = parse_classifier(text)
    if name.is_judge:
        return
    is_onnx = holds_onnx(name.source)
    if is_onnx and not (Path(name.source) / "config.json").is_file():
        return
    config = ModelSource.find(name.source).config
    if config.get("model_type") == MODEL_TYPE:
        raise ModelError(f"{name.source!r} holds a reward model of radq, not a classifier.", "give it as --teacher.")
    labels = read_labels(config)
    if not labels and not is_onnx:  # the number of outputs of a model in ONNX is known only when it is loaded
        number = config.get("num_labels")
        labels = [f"LABEL_{n}" for n in range(number if isinstance(number, int) else 2)]
    if labels:
        choose_labels(name, labels)


def choose_labels(name: ClassifierName, labels: list[str]) -> list[tuple[int, str]]:
    """The positions of the labels that a text names, with the names of their attributes, all different."""
    chosen = [(choose_label(labels, label, repr(name.source), ":"), attribute) for label, attribute in name.labels]
    named = [(index, attribute or labels[index]) for index, attribute in chosen]
    for index, attribute in named:
        if [other for _, other in named].count(attribute) > 1:
            raise OptionError(f"{name.source!r} would teach {attribute!r} twice.", "name each label once.")
        if re.search(r"[:,=]", attribute):
            hint = f"give it a simple name: {name.source}:{index}=NAME."
            raise OptionError(f"an attribute cannot be called {attribute!r}.", hint)
    return named


def holds_onnx(source: str) -> bool:
    """Whether a classifier is a folder with a model in ONNX, and not with one of transformers."""
    folder = Path(source)
    return folder.is_dir() and any(folder.glob("*.onnx")) and not any(folder.glob("*.safetensors"))


# --- labels ---


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """The names that a config.json gives to the outputs of a classifier, in their order; none if it names none."""
    names = config.get("id2label") or {}
    try:
        return [str(names[number]) for number in sorted(names, key=int)]
    except (TypeError, ValueError) as error:
        raise ModelError(f"id2label in a config.json must map numbers to labels, got {names!r}.", "mend it.") from error


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
