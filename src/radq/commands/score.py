"""radq score "…" --reward DIR and radq score --reward DIR --data reviews.csv"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from radq.commands import AsJson, Device, LabelMap, LabelRange
from radq.commands.console import announce, console, print_json, print_table
from radq.data.label_scale import LabelRules
from radq.data.table_copy import check_copy, copy_with_columns, name_copy
from radq.data.tables import check_sources, read_table
from radq.errors import DataError, ModelError, OptionError
from radq.settings import COUNT
from radq.sources.model_source import check_reward_model

if TYPE_CHECKING:
    from radq.evaluation.table_scores import TableScores
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
    label_map: LabelMap = ""
    label_range: LabelRange = None
    missing_labels: bool = False
    """Compare rewards with the labels that are there, instead of stopping with an error where one is missing."""
    skip_empty: bool = False
    """Give rows with an empty text no reward, instead of stopping with an error."""
    max_length: Annotated[int, COUNT] = 512
    """Largest number of tokens of a text of the table; longer texts are cut off."""
    batch_size: Annotated[int, COUNT] = 64
    """Number of texts of the table that are read together."""
    device: Device = "auto"
    json: AsJson = False


def run(arguments: Arguments) -> None:
    texts = [text.rstrip() for text in arguments.texts]
    if arguments.data is not None:
        if texts:
            raise OptionError("both texts and --data are given.", "give one of them.")
        check_sources([arguments.data], [name for name in (arguments.text, arguments.prompt) if name is not None])
    elif not texts or not all(texts):
        message = "text must not be empty." if texts else "there is no text to score."
        raise OptionError(message, "give a text, or --data FILE.")
    check_reward_model(arguments.reward)
    announce(f"loading {arguments.reward}", arguments.json)
    from radq.models.loading import find_device
    from radq.models.reward import RewardModel

    model = RewardModel.from_pretrained(arguments.reward, find_device(arguments.device))
    if model.tokenizer is None:
        raise ModelError(f"{arguments.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    if arguments.data is None:
        _score_texts(model, texts, arguments.json)
    else:
        _score_data(arguments, model, arguments.data)


# --- tokens of texts ---


def _score_texts(model: "RewardModel", texts: list[str], as_json: bool) -> None:
    from radq.report.tokens import score_text

    scores = [score_text(model, text) for text in texts]
    if as_json:
        print_json({"attributes": model.config.attributes, "texts": scores})
        return
    for score in scores:
        _print_score(score, dict(zip(model.config.attributes, model.config.attribute_ranges, strict=True)))


def _print_score(score: dict[str, Any], ranges: dict[str, tuple[float, float]]) -> None:
    """Print a table of the rewards, and the text once per attribute. `ranges` are the lowest and highest rewards."""
    from radq.report.tokens import coloured, legend

    tokens = [(token["token"], token["rewards"]) for token in score["tokens"]]
    rows = [
        [token, *(coloured([(f"{rewards[name]:.3f}", rewards[name])], *ranges[name]) for name in ranges)]
        for token, rewards in tokens
    ]
    print_table(["token", *ranges], rows, words=1)
    for attribute, (low, high) in ranges.items():
        pieces = [(f"{attribute}: ", (low + high) / 2), *((token, rewards[attribute]) for token, rewards in tokens)]
        console().print(coloured(pieces, low, high))
        console().print(legend(low, high, f"rewards from {low:g} to {high:g}"))


# --- texts of a table ---


def _score_data(arguments: Arguments, model: "RewardModel", source: Path) -> None:
    attributes = model.config.attributes
    target = arguments.out or name_copy(source)
    check_copy(source, target, [f"reward_{name}" for name in attributes], arguments.overwrite)
    label_columns = _find_labels(arguments.labels, attributes, source)
    scores = _score_table(arguments, model, source, label_columns)
    columns = {f"reward_{name}": scores.by_row(n) for n, name in enumerate(attributes)}
    copy_with_columns(source, target, columns)
    result = _summarise(model, scores, label_columns)
    if arguments.json:
        print_json({"data": str(source), "out": str(target)} | result)
        return
    print(f"{source}: {result['texts']} texts; {scores.truncated} cut off, {scores.empty} empty without a reward")
    for attribute, mean in result["mean_rewards"].items():
        print(f"mean reward of {attribute}: {mean:.4f}")
    for (attribute, agreement), scale in zip(result["agreement"].items(), scores.scales, strict=True):
        column = agreement["column"]
        print(f"\n{attribute}, compared with the column {column!r}\n{scale.describe(column)}")
        _print_agreement(agreement)
    print(f"→ {target}")


def _find_labels(given: str | None, attributes: list[str], source: Path) -> dict[str, str]:
    """The label columns by their attributes, from --labels or else from the columns of the table."""
    if given is None:
        columns = next((list(table.columns) for table in read_table(source)), [])
        return {name: name for name in attributes if name in columns}
    named: dict[str, str] = {}
    for part in filter(None, map(str.strip, given.split(","))):
        attribute, _, column = part.partition("=") if "=" in part else (part, "", part)
        if len(attributes) == 1 and "=" not in part:
            attribute = attributes[0]
        if attribute not in attributes or attribute in named or not column:
            raise OptionError(
                f"labels must name columns of different attributes, got {part!r}.",
                f"write ATTRIBUTE=COLUMN; the attributes are {', '.join(attributes)}.",
            )
        named[attribute] = column
    return named


def _score_table(
    arguments: Arguments, model: "RewardModel", source: Path, label_columns: dict[str, str]
) -> "TableScores":
    from radq.data.examples import DataColumns
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


def _summarise(model: "RewardModel", scores: "TableScores", label_columns: dict[str, str]) -> dict[str, Any]:
    """Counts, mean rewards, and the agreement of rewards and labels for each attribute with labels."""
    import numpy as np

    from radq.judges.agreement import measure_agreement

    compared = {}
    for n, (attribute, column) in enumerate(label_columns.items()):
        place = model.config.attributes.index(attribute)
        rewards, labels = scores.rewards[:, place], scores.labels[:, n]
        known = np.isfinite(rewards) & np.isfinite(labels)  # texts with tokens and a label
        agreement = measure_agreement(rewards[known], labels[known], model.config.attribute_ranges[place])
        bins = {"bins": [part._asdict() for part in agreement.bins]}
        compared[attribute] = {"column": column, "scale": asdict(scores.scales[n])} | asdict(agreement) | bins
    means = np.nanmean(scores.rewards, axis=0).tolist()
    return {
        "texts": len(scores.rewards),
        "truncated": scores.truncated,
        "empty": scores.empty,
        "mean_rewards": dict(zip(model.config.attributes, means, strict=True)),
        "agreement": compared,
    }


MEANINGS = {
    "auc": ("AUC", "how often a text with a label above {threshold:g} has a higher reward than one below"),
    "accuracy": ("accuracy", "share of texts whose reward and label are on the same side of {threshold:g}"),
    "spearman": ("rank correlation", "Spearman's: 1 if rewards and labels have the same order, 0 by chance"),
    "mse": ("squared error", "mean; always guessing the mean label gives {constant_mse:.4f}"),
    "calibration_error": ("calibration error", "mean distance of the last two columns below"),
}


def _print_agreement(agreement: dict[str, Any]) -> None:
    for metric, (name, meaning) in MEANINGS.items():
        value = "-" if agreement[metric] is None else f"{agreement[metric]:.4f}"
        print(f"  {name:<18} {value:>7}  {meaning.format(**agreement)}")
    rows = [
        [f"{part['low']:g} to {part['high']:g}", str(part["texts"])]
        + [f"{part[name]:.3f}" for name in ("mean_reward", "mean_label")]
        for part in agreement["bins"]
        if part["texts"]
    ]
    print_table(["rewards", "texts", "mean reward", "mean label"], rows)
