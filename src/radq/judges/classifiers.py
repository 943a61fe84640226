"""Judges that teach: one for each label of a classifier, which reads every text once for all of them.

FOLDER                       a classifier with one label, or with two of which one negates the other
NAME:toxic                   one label of a classifier
NAME:LABEL_1=praise,LABEL_2  two labels; the attribute of the first is called praise
linear:FOLDER=praise         a judge as `radq judge score` takes it, whose attribute is called praise

Importing this module imports no torch, so that a mistake in such a text shows at once.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from radq.errors import ModelError, OptionError
from radq.judges.base import Judge
from radq.judges.labels import choose_label, read_labels
from radq.settings import names_in_table
from radq.sources import MODEL_TYPE
from radq.sources.model_source import ModelSource


def load_classifier(text: str, device: str = "cpu") -> list[Judge]:
    """Load the judges that a text names, see `radq.judges.classifiers`; `attribute` is what each teaches."""
    from transformers import AutoModelForSequenceClassification

    from radq.judges.models import ClassifierJudge, find_outputs, load_judge
    from radq.judges.readers import OnnxReader, RememberingReader, TransformersReader

    name = parse_classifier(text)
    if name.is_judge:
        judge = load_judge(name.source, device)
        judge.attribute = name.labels[0][1] or judge.attribute
        return [judge]
    kind = "onnx" if holds_onnx(name.source) else "classifier"
    reader = (
        OnnxReader(name.source, device)
        if kind == "onnx"
        else TransformersReader(name.source, AutoModelForSequenceClassification, device)
    )
    labels = find_outputs(reader)
    if not reader.labels and len(labels) > 1 and name.labels[0][0] is None:
        raise OptionError(
            f"{name.source!r} has {len(labels)} outputs without names, and it is not clear which of them is the "
            "attribute.",
            f"add the number of the one you mean and a name for it, such as :{len(labels) - 1}=toxicity.",
        )
    chosen = choose_labels(name, labels)
    shared = RememberingReader(reader) if len(chosen) > 1 else reader
    judges = []
    for index, attribute in chosen:
        judge = ClassifierJudge(kind, shared, labels[index])
        judge.attribute = attribute
        judges.append(judge)
    return judges


KINDS = names_in_table("radq.judges.models:JUDGES")


class ClassifierName(NamedTuple):
    """The parts of such a text.

    `labels` are pairs of a label and the name of its attribute; None stands for what is not said. `is_judge` tells
    whether the source is the specification of a judge.
    """

    source: str
    labels: list[tuple[str | None, str | None]]
    is_judge: bool = False


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
    source, labels = _split_source(text)
    if not source or any(not label.partition("=")[0].strip() for label in labels):
        hint = "write it as NAME, NAME:label or NAME:label=attribute."
        raise OptionError(f"{text!r} is no name of a classifier.", hint)
    pairs = [(label.partition("=")[0].strip(), label.partition("=")[2].strip()) for label in labels]
    return ClassifierName(source, [(label, _check_attribute(name, text)) for label, name in pairs] or [(None, None)])


def _split_source(text: str) -> tuple[str, list[str]]:
    """Split at the first colon, or at the first one after a folder whose name has colons itself."""
    places = [match.start() for match in re.finditer(":", text)]
    place = next((place for place in places if Path(text[:place]).is_dir()), next(iter(places), None))
    return (text, []) if place is None else (text[:place], text[place + 1 :].split(","))


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
    config = _read_classifier_config(name.source)
    if labels := _find_labels(name.source, config):
        choose_labels(name, labels)


def _read_classifier_config(source: str) -> dict[str, Any]:
    if holds_onnx(source) and not (Path(source) / "config.json").is_file():
        return {}
    config = ModelSource.find(source).config
    if config.get("model_type") == MODEL_TYPE:
        raise ModelError(f"{source!r} holds a reward model of radq, not a classifier.", "give it as --teacher.")
    return config


def _find_labels(source: str, config: dict[str, Any]) -> list[str]:
    """The labels by config.json, where those without names are LABEL_0 and so on; none if only the model tells."""
    labels = read_labels(config)
    number = config.get("num_labels")
    names = [f"LABEL_{n}" for n in range(number if isinstance(number, int) else 2)]
    return labels or ([] if holds_onnx(source) else names)


def choose_labels(name: ClassifierName, labels: list[str]) -> list[tuple[int, str]]:
    """The positions of the labels that a text names, with the names of their attributes, all different."""
    chosen = [(choose_label(labels, label, repr(name.source), ":"), attribute) for label, attribute in name.labels]
    found = [(index, attribute or labels[index]) for index, attribute in chosen]
    for index, attribute in found:
        if [other for _, other in found].count(attribute) > 1:
            raise OptionError(f"{name.source!r} would teach {attribute!r} twice.", "name each label once.")
        if re.search(r"[:,=]", attribute):
            hint = f"give it a simple name: {name.source}:{index}=NAME."
            raise OptionError(f"an attribute cannot be called {attribute!r}.", hint)
    return found


def holds_onnx(source: str) -> bool:
    """Whether a classifier is a folder with a model in ONNX, and not with one of transformers."""
    folder = Path(source)
    return folder.is_dir() and any(folder.glob("*.onnx")) and not any(folder.glob("*.safetensors"))
