"""Loads judges that teach: one for each label of a classifier, which reads every text once for all of them."""

from transformers import AutoModelForSequenceClassification

from radq.errors import OptionError
from radq.judges.base import Judge
from radq.judges.classifier_names import choose_labels, holds_onnx, parse_classifier
from radq.judges.models import ClassifierJudge, find_outputs, load_judge
from radq.judges.readers import OnnxReader, RememberingReader, TransformersReader


def load_classifier(text: str, device: str = "cpu") -> list[Judge]:
    """Load the judges that a text names, see `radq.judges.classifier_names`; `attribute` is what each teaches."""
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
