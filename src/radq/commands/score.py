"""radq score "…" --reward DIR and radq score --reward DIR --data reviews.csv"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from radq.evaluation.table_scores import TableScores
    from radq.judges.agreement import Agreement
    from radq.models.reward import RewardModel


@dataclass
class Arguments:
    """Show the reward of every token of a text, or write the rewards of all texts of a table into a copy of it."""

    reward: str
    """Folder or hub name of the reward model; embedded:sentiment and embedded:toxicity come with radq."""
    texts: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Texts whose tokens are scored."""
    data: Path | None = None
    """Table of texts to score (csv, tsv, jsonl or parquet, each also .gz .xz .zst), in place of texts."""
    out: Path | None = None
    """Copy of the table with a column reward_ATTRIBUTE for each attribute; by default NAME.scored.csv beside it."""
    overwrite: bool = False
    """Replace the file --out."""
    text: str = "text"
    """Column of the table with the texts."""
    prompt: str | None = None
    """Column with a context that is read before each text."""
    labels: str | None = None
    """Columns with labels to compare the rewards with, separated by commas: COLUMN or ATTRIBUTE=COLUMN. By default
    columns that are named like attributes; an empty text compares with none."""
    label_map: str = ""
    """Numbers of words, such as bad=0,ok=0.5,good=1; by default as in the training of the model."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label, which are mapped to 0 and 1; by default as in the training of the model."""
    missing_labels: bool = False
    """Compare rewards with the labels that are there, instead of stopping with an error where one is missing."""
    skip_empty: bool = False
    """Give rows with an empty text no reward, instead of stopping with an error."""
    max_length: int = 512
    """Largest number of tokens of a text of the table; longer texts are cut off."""
    batch_size: int = 64
    """Number of texts of the table that are read together."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the result as JSON, without progress bars."""


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce
    from radq.data.tables import check_sources
    from radq.errors import ModelError, OptionError
    from radq.sources.model_source import check_reward_model

    if arguments.data is not None and arguments.texts:
        raise OptionError("both texts and --data are given.", "give one of them.")
    texts = [] if arguments.data is not None else _strip_texts(arguments.texts)
    if arguments.data is not None:
        columns = [name for name in (arguments.text, arguments.prompt) if name is not None]
        check_sources([arguments.data], columns)
        _check_numbers(arguments)
    check_reward_model(arguments.reward)
    announce(f"loading {arguments.reward}", arguments.json)
    from radq.models.loading import find_device
    from radq.models.reward import RewardModel

    model = RewardModel.from_pretrained(arguments.reward, find_device(arguments.device))
    if model.tokenizer is None:
        raise ModelError(f"{arguments.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    if arguments.data is None:
        _score_texts(arguments, model, texts)
    else:
        _score_data(arguments, model, arguments.data)


# --- tokens of texts ---


def _score_texts(arguments: Arguments, model: "RewardModel", texts: list[str]) -> None:
    from radq.commands.console import print_json
    from radq.report.tokens import score_text

    scores = [score_text(model, text) for text in texts]
    if arguments.json:
        print_json({"attributes": model.config.attributes, "texts": scores})
    else:
        for score in scores:
            _print_score(score, dict(zip(model.config.attributes, model.config.attribute_ranges, strict=True)))


def _strip_texts(texts: list[str]) -> list[str]:
    """The texts without whitespace at the end; empty ones are refused."""
    from radq.errors import OptionError

    texts = [text.rstrip() for text in texts]
    if not texts or not all(texts):
        message = "text must not be empty." if texts else "there is no text to score."
        raise OptionError(message, "give a text, or --data FILE.")
    return texts


def _print_score(score: dict[str, Any], ranges: dict[str, tuple[float, float]]) -> None:
    """Print a table of the rewards, and the text once per attribute. `ranges` are the lowest and highest rewards."""
    from rich.table import Table

    from radq.commands.console import console
    from radq.report.tokens import coloured, legend

    table = Table()
    table.add_column("token")
    for attribute in ranges:
        table.add_column(attribute, justify="right")
    for token in score["tokens"]:
        rewards = token["rewards"]
        cells = [coloured([(f"{rewards[name]:.3f}", rewards[name])], *ranges[name]) for name in ranges]
        table.add_row(token["token"], *cells)
    console().print(table)
    for attribute, (low, high) in ranges.items():
        pieces = ((token["token"], token["rewards"][attribute]) for token in score["tokens"])
        console().print(coloured([(f"{attribute}: ", (low + high) / 2)], low, high) + coloured(pieces, low, high))
        console().print(legend(low, high, f"rewards from {low:g} to {high:g}"))


# --- texts of a table ---


def _score_data(arguments: Arguments, model: "RewardModel", source: Path) -> None:
    from radq.commands.console import print_json
    from radq.data.table_copy import check_copy, copy_with_columns, name_copy

    attributes = model.config.attributes
    target = arguments.out or name_copy(source)
    check_copy(source, target, [f"reward_{name}" for name in attributes], arguments.overwrite)
    label_columns = _find_labels(arguments.labels, attributes, source)
    scores = _score_table(arguments, model, source, label_columns)
    columns = {f"reward_{name}": scores.by_row(n) for n, name in enumerate(attributes)}
    copy_with_columns(source, target, columns)
    found = _compare(model, scores, label_columns)
    if arguments.json:
        print_json(_as_document(source, target, attributes, scores, label_columns, found))
    else:
        _print_table(source, target, attributes, scores, label_columns, found)


def _check_numbers(arguments: Arguments) -> None:
    from radq.errors import OptionError
    from radq.settings import COUNT

    for name in ("max_length", "batch_size"):
        if getattr(arguments, name) not in COUNT:
            raise OptionError(f"{name} must be {COUNT}, got {getattr(arguments, name)}.", "give such a number.")


def _find_labels(given: str | None, attributes: list[str], source: Path) -> dict[str, str]:
    """The label columns by their attributes, from --labels or else from the columns of the table."""
    from radq.data.tables import read_table
    from radq.errors import OptionError

    if given is None:
        found = next((list(table.columns) for table in read_table(source)), [])
        return {name: name for name in attributes if name in found}
    columns = {}
    for part in filter(None, map(str.strip, given.split(","))):
        attribute, _, column = part.partition("=") if "=" in part else (part, "", part)
        if len(attributes) == 1 and "=" not in part:
            attribute = attributes[0]
        if attribute not in attributes or attribute in columns or not column:
            raise OptionError(
                f"labels must name columns of different attributes, got {part!r}.",
                f"write ATTRIBUTE=COLUMN; the attributes are {', '.join(attributes)}.",
            )
        columns[attribute] = column
    return columns


def _score_table(
    arguments: Arguments, model: "RewardModel", source: Path, label_columns: dict[str, str]
) -> "TableScores":
    from radq.data.examples import DataColumns
    from radq.data.label_scale import LabelRules
    from radq.errors import DataError
    from radq.evaluation.table_scores import score_table
    from radq.training.run_folder import scales_of_model

    rules = LabelRules.parse(arguments.label_map, arguments.label_range)
    known = dict(zip(model.config.attributes, scales_of_model(model.config, arguments.reward), strict=True))
    scales = [None if rules != LabelRules() else known[name] for name in label_columns]
    columns = DataColumns(
        arguments.text,
        list(label_columns.values()),
        arguments.prompt,
        label_rules=rules,
        skip_empty=arguments.skip_empty,
        missing_labels=arguments.missing_labels,
    )
    options = (arguments.max_length, arguments.batch_size, not arguments.json)
    try:
        return score_table(model, source, columns, scales, *options)
    except DataError as error:
        if arguments.labels is None and any(f"{name!r}" in error.message for name in label_columns.values()):
            raise DataError(error.message, f"{error.hint} --labels '' scores without labels.") from error
        raise


def _compare(model: "RewardModel", scores: "TableScores", label_columns: dict[str, str]) -> "dict[str, Agreement]":
    """The agreement of rewards and labels, for each attribute with labels."""
    import numpy as np

    from radq.judges.agreement import measure_agreement

    found = {}
    for n, attribute in enumerate(label_columns):
        column = model.config.attributes.index(attribute)
        known = np.isfinite(scores.rewards[:, column]) & np.isfinite(scores.labels[:, n])  # texts with tokens and label
        limits = model.config.attribute_ranges[column]
        found[attribute] = measure_agreement(scores.rewards[known, column], scores.labels[known, n], limits)
    return found


def _as_document(
    source: Path,
    target: Path,
    attributes: list[str],
    scores: "TableScores",
    label_columns: dict[str, str],
    found: "dict[str, Agreement]",
) -> dict[str, Any]:
    from dataclasses import asdict

    import numpy as np

    means = np.nanmean(scores.rewards, axis=0).tolist()
    compared = {
        attribute: {"column": column, "scale": asdict(scale)}
        | asdict(found[attribute])
        | {"bins": [one._asdict() for one in found[attribute].bins]}
        for (attribute, column), scale in zip(label_columns.items(), scores.scales, strict=True)
    }
    counts = {"texts": len(scores.rewards), "truncated": scores.truncated, "empty": scores.empty}
    means = {"mean_rewards": dict(zip(attributes, means, strict=True))}
    return {"data": str(source), "out": str(target)} | counts | means | {"agreement": compared}


def _print_table(
    source: Path,
    target: Path,
    attributes: list[str],
    scores: "TableScores",
    label_columns: dict[str, str],
    found: "dict[str, Agreement]",
) -> None:
    import numpy as np

    print(f"{source}: {len(scores.rewards)} texts; {scores.truncated} cut off, {scores.empty} empty without a reward")
    for attribute, mean in zip(attributes, np.nanmean(scores.rewards, axis=0), strict=True):
        print(f"mean reward of {attribute}: {mean:.4f}")
    for (attribute, column), scale in zip(label_columns.items(), scores.scales, strict=True):
        print(f"\n{attribute}, compared with the column {column!r}\n{scale.describe(column)}")
        _print_agreement(found[attribute])
    print(f"→ {target}")


def _print_agreement(found: "Agreement") -> None:
    from radq.commands.console import console, make_table

    middle = f"{found.threshold:g}"
    lines = [
        ("AUC", found.auc, f"how often a text with a label above {middle} has a higher reward than one below"),
        ("accuracy", found.accuracy, f"share of texts whose reward and label are on the same side of {middle}"),
        ("rank correlation", found.spearman, "Spearman's: 1 if rewards and labels have the same order, 0 by chance"),
        ("squared error", found.mse, f"mean; always guessing the mean label gives {found.constant_mse:.4f}"),
        ("calibration error", found.calibration_error, "mean distance of the last two columns below"),
    ]
    for name, value, meaning in lines:
        print(f"  {name:<18} {'-' if value is None else f'{value:.4f}':>7}  {meaning}")
    table = make_table("rewards", "texts", "mean reward", "mean label")
    for one in (one for one in found.bins if one.texts):
        cells = (f"{one.low:g} to {one.high:g}", str(one.texts), f"{one.mean_reward:.3f}", f"{one.mean_label:.3f}")
        table.add_row(*cells)
    console().print(table)
