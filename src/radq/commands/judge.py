"""radq judge score --judge JUDGE --text "…" and radq judge train --data FILE --labels COLUMN --out FOLDER"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from radq.commands import label

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Train:
    """Train a linear judge: a logistic regression on sentence embeddings of labelled texts."""

    data: list[str]
    """Files (csv, tsv, jsonl, parquet, each also .gz .xz .zst) or hub data sets (name or name:split)."""
    labels: str
    """Column with the labels. Pairs of words such as no and yes become 0 and 1; numbers outside 0 to 1 are mapped by
    their own range."""
    out: Path
    """Folder to write the judge into."""
    encoder: str = "minilm"
    """Sentence encoder: a hub name, a folder (safetensors or ONNX), or minilm or embedded, which pip installs."""
    text: str = "text"
    """Column with the texts."""
    label_map: str = ""
    """Numbers of words, such as bad=0,ok=0.5,good=1."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label, which are mapped to 0 and 1."""
    held_out: float = 0.1
    """Share of the rows on which the penalty is chosen; the result is measured on as many more rows."""
    limit: int | None = None
    """Number of rows to use, drawn at random; by default all."""
    seed: int = 0
    """Random seed of that draw, and of the rows that are held out."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    overwrite: bool = False
    """Replace the judge that the folder holds."""
    json: bool = False
    """Print the judge's card as JSON, without progress bars."""


Arguments = (
    Annotated[label.Arguments, tyro.conf.subcommand("score", prefix_name=False)]  # the same as `radq label`
    | Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
)


def run(arguments: label.Arguments | Train) -> None:
    if isinstance(arguments, label.Arguments):
        label.run(arguments)
    else:
        _train(arguments)


def _train(arguments: Train) -> None:
    from dataclasses import asdict

    from radq.commands.console import announce, print_json
    from radq.data.tables import check_sources
    from radq.errors import OptionError
    from radq.files import require_own_folder
    from radq.judges.base import CARD

    require_own_folder(arguments.out, lambda folder: (folder / CARD).is_file(), "a judge")
    if arguments.out.exists() and not arguments.overwrite:
        raise OptionError(f"{str(arguments.out)!r} exists.", "choose another folder, or replace it with --overwrite.")
    check_sources(arguments.data, [arguments.text, arguments.labels])
    announce(f"loading {arguments.encoder}", arguments.json)
    from radq.judges.encoders import load_encoder
    from radq.judges.linear import Card, LinearModel, split_rows
    from radq.models.loading import find_device

    texts, labels, blank = _read_labelled_texts(arguments)
    split = split_rows(labels, arguments.held_out, arguments.seed)
    source = arguments.encoder if not Path(arguments.encoder).is_dir() else str(Path(arguments.encoder).resolve())
    encoder = load_encoder(source, find_device(arguments.device))
    features = encoder.encode(texts, progress=not arguments.json)
    announce(f"fitting a judge on {len(texts)} texts", arguments.json)
    model = LinearModel.fit(features, labels, split, Card(source, encoder.name, arguments.labels, arguments.data))
    model.save(arguments.out)
    if arguments.json:
        print_json(asdict(model.card) | {"truncated": encoder.truncated, "blank": blank})
        return
    rows = model.card.rows
    print(f"judge of {arguments.labels} → {arguments.out}   (linear:{arguments.out})")
    print(f"  fitted on {rows['fitted']} rows, penalty {model.card.penalty:g} chosen on {rows['chosen_on']}")
    print(f"  metrics on {rows['measured_on']} other rows:")
    for name, value in model.card.metrics.items():
        print(f"    {name:<15} {value:.4f}")
    if encoder.truncated or blank:
        print(f"  {encoder.truncated} texts were too long, and were cut; {blank} blank ones are left out")


def _read_labelled_texts(arguments: Train) -> "tuple[list[str], np.ndarray, int]":
    """Read texts and their labels, and count the rows that are left out because their text is blank."""
    import numpy as np

    from radq.data.examples import DataColumns, read_examples
    from radq.data.label_cells import join_cells
    from radq.data.label_scale import LabelRules, find_scales, scale_labels
    from radq.errors import DataError, OptionError

    if arguments.limit is not None and arguments.limit < 1:
        raise OptionError(f"limit must be at least 1, got {arguments.limit}.", "leave it out to use all rows.")
    if arguments.seed < 0:
        raise OptionError(f"seed must be at least 0, got {arguments.seed}.", "give another seed.")
    rules = LabelRules.parse(arguments.label_map, arguments.label_range)
    columns = DataColumns(arguments.text, [arguments.labels], skip_empty=True)
    pieces = [piece for source in arguments.data for piece in read_examples(source, columns)]
    texts = [text for piece in pieces for text in piece.texts]
    if not texts:
        raise DataError(f"{', '.join(arguments.data)}: there are no texts.", "give a file with texts and labels.")
    cells = join_cells([piece.labels for piece in pieces])
    scales = find_scales(cells, columns.labels, rules)
    labels = scale_labels(cells, columns.labels, scales)[:, 0]
    if not arguments.json:
        print(scales[0].describe(arguments.labels))
    blank = sum(piece.empty for piece in pieces)
    if arguments.limit is None or arguments.limit >= len(texts):
        return texts, labels, blank
    rows = np.random.default_rng(arguments.seed).choice(len(texts), size=arguments.limit, replace=False)
    return [texts[row] for row in rows], labels[rows], blank
