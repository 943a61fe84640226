"""radq judge score --judge openai:MODEL --rubric rubric.md --data texts.csv --out scored.csv

Also `radq judge train --data FILE --labels COLUMN --out FOLDER`.
"""

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from rich.table import Table
from rich.text import Text

from radq.commands import AsJson, Cache, Device, Files, LabelMap, LabelRange, Limit
from radq.commands.console import announce, console, print_json
from radq.data.label_scale import LabelRules, find_scales, join_cells, scale_labels
from radq.data.table_copy import check_copy, copy_with_columns
from radq.data.tables import check_sources, read_text_column
from radq.errors import DataError, OptionError
from radq.files import require_own_folder
from radq.settings import COUNT, Range, names_in_table

if TYPE_CHECKING:
    from radq.judges.base import CachedJudge, Judge


@dataclass
class Score:
    """Score texts with a judge, and print the scores or write them into a copy of a table, as labels to train on.

    Scores are kept on disk, so that the same texts are not judged again: a command that was stopped goes on when it is
    called again."""

    judge: str
    """The judge, as KIND:SOURCE: classifier:NAME_OR_FOLDER[#label], onnx:FOLDER[#label], linear:FOLDER,
    linear:embedded:sentiment, linear:embedded:toxicity or reward:FOLDER[#attribute]. not:JUDGE is 1 − its score.
    openai:MODEL asks a model of an OpenAI-compatible server by the --rubric; the variables OPENAI_BASE_URL and
    OPENAI_API_KEY say which server."""
    rubric: Path | None = None
    """For openai: a file of text that says what is scored and on which scale, with a line such as "Scale: 1 to 5"."""
    texts: Annotated[tyro.conf.Positional[list[str]], tyro.conf.arg(metavar="TEXT")] = field(default_factory=list)
    """Texts to score."""
    data: Files = field(default_factory=list)
    out: Path | None = None
    """Copy of the file of --data with a column of scores; by default the scores are printed."""
    text: str = "text"
    """Column with the texts in the files of --data."""
    name: str = "score"
    """Name of the column of scores."""
    overwrite: bool = False
    """Replace the file --out."""
    jobs: Annotated[int, Range(1, 256)] = 8
    """For openai: number of texts that are judged at the same time."""
    timeout: Annotated[float, Range(0, 86_400, without_low=True)] = 120.0
    """For openai: seconds to wait for an answer before the question is repeated."""
    max_tokens: Annotated[int, COUNT] = 64
    """For openai: most tokens of an answer. A model that thinks before it answers needs more."""
    cache: Cache = None
    device: Device = "auto"
    json: AsJson = False


@dataclass
class Train:
    """Train a linear judge: a logistic regression on sentence embeddings of labelled texts."""

    data: Files
    labels: str
    """Column with the labels."""
    out: Path
    """Folder to write the judge into."""
    encoder: str = "minilm"
    """Sentence encoder: a hub name, a folder (safetensors or ONNX), or minilm or embedded, which pip installs."""
    text: str = "text"
    """Column with the texts."""
    label_map: LabelMap = ""
    label_range: LabelRange = None
    held_out: float = 0.1
    """Share of the rows on which the penalty is chosen; the result is measured on as many more rows."""
    limit: Limit = None
    """Number of rows to use, drawn at random; by default all."""
    seed: Annotated[int, Range(0)] = 0
    """Random seed of that draw, and of the rows that are held out."""
    device: Device = "auto"
    overwrite: bool = False
    """Replace the judge that the folder holds."""
    json: AsJson = False


# --- radq judge score ---


def _score(arguments: Score) -> None:
    if not arguments.name.strip():
        raise OptionError("name must not be empty.", "give the name of a column.")
    if arguments.out is not None:
        if len(arguments.data) != 1 or arguments.texts:
            raise OptionError("out is a copy of one file of texts.", "give one --data FILE, and no other texts.")
        check_copy(Path(arguments.data[0]), arguments.out, [arguments.name], arguments.overwrite)
    asked = _check_judge(arguments)
    check_sources(arguments.data, [arguments.text])
    columns = (read_text_column(source, arguments.text) for source in arguments.data)
    texts = [*arguments.texts, *(text for column in columns for text in column)]
    if not texts:
        raise OptionError("there is no text to score.", "give texts, or --data FILE.")
    announce(f"loading {arguments.judge}", arguments.json)
    from radq.judges.base import CachedJudge
    from radq.judges.models import load_judge
    from radq.models.loading import find_device

    judge = CachedJudge(asked or load_judge(arguments.judge, find_device(arguments.device)), arguments.cache)
    scores = judge.score(texts, progress=not arguments.json)
    column = [None if score != score else float(score) for score in scores]
    result = _summarise(judge, texts, scores)
    if arguments.out is not None:
        copy_with_columns(Path(arguments.data[0]), arguments.out, {arguments.name: column})
        result = {"data": arguments.data[0], "out": str(arguments.out)} | result
    if result["missing"]:
        warnings.warn(
            f"{result['missing']} of {result['missing'] + result['scored']} texts have no score: "
            f"{getattr(judge.inner, 'problem', '')}. hint: the same command asks for them again.",
            stacklevel=2,
        )
    rows = [{"text": text, "score": score} for text, score in zip(texts, column, strict=True)]
    if arguments.json:
        print_json(result | ({} if arguments.out is not None else {"texts": rows}))
    else:
        _print_result(judge, rows, result)


def check_judge_kind(judge: str) -> str:
    """The kind of a judge that is written as KIND:SOURCE; an error if there is none."""
    kind, kinds = judge.partition(":")[0], names_in_table("radq.judges.models:JUDGES")
    if kind not in kinds:
        raise OptionError(f"there is no judge {judge!r}.", f"begin with one of {', '.join(kinds)}.")
    return kind


def _check_judge(arguments: Score) -> "Judge | None":
    """Refuse a judge that is none, before torch is imported. A judge that asks a server needs no torch: it is made."""
    if check_judge_kind(arguments.judge) != "openai":
        if arguments.rubric is not None:
            raise OptionError(f"rubric is for the judge openai:MODEL, got {arguments.judge!r}.", "leave --rubric out.")
        return None
    from radq.judges.chat import find_server
    from radq.judges.llm import RubricJudge, read_rubric

    model, _, file = arguments.judge.partition(":")[2].partition("#")
    if bool(file) == (arguments.rubric is not None):
        number = "two rubrics" if file else "no rubric"
        raise OptionError(f"the judge {arguments.judge!r} has {number}.", "give one --rubric FILE.")
    rubric = read_rubric(arguments.rubric or file)
    return RubricJudge(find_server(model, arguments.timeout, arguments.max_tokens), rubric, arguments.jobs)


def _summarise(judge: "CachedJudge", texts: list[str], scores: np.ndarray) -> dict[str, Any]:
    blank = sum(not text.strip() for text in texts)
    scored = int((~np.isnan(scores)).sum())
    server = getattr(judge.inner, "server", None)
    return {
        "judge": judge.name,
        "scored": scored,
        "kept": judge.kept,
        "missing": len(texts) - scored - blank,
        "blank": blank,
        "truncated": judge.truncated,
        "usage": None if server is None else asdict(server.usage),
    }


def _print_result(judge: "Judge", rows: list[dict[str, Any]], result: dict[str, Any]) -> None:
    print(result["judge"])
    if "out" not in result:
        _print_scores(judge, rows)
    print(f"{result['scored']} texts scored, {result['kept']} of them before; ", end="")
    print(f"{result['missing']} missing, {result['blank']} blank")
    if result["truncated"]:
        print(f"note: {result['truncated']} texts were too long, and were judged by their beginnings.")
    if usage := result["usage"]:
        print(
            f"{usage['calls']} answers, after {usage['failures']} failures: {usage['prompt_tokens']:,} tokens read, "
            f"{usage['completion_tokens']:,} written"
        )
    if "out" in result:
        print(f"→ {result['out']}")


def _print_scores(judge: "Judge", rows: list[dict[str, Any]]) -> None:
    from radq.report.tokens import coloured

    known = [row["score"] for row in rows if row["score"] is not None]
    low, high = judge.limits if np.isfinite(judge.limits).all() else (min([0, *known]), max([1, *known]))
    table = Table()
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for row in rows:
        unknown = "missing" if row["text"].strip() else "blank"
        score = row["score"]
        table.add_row(unknown if score is None else coloured([(f"{score:.3f}", score)], low, high), Text(row["text"]))
    console().print(table)


# --- radq judge train ---


def _train(arguments: Train) -> None:
    from radq.judges.base import CARD

    require_own_folder(arguments.out, lambda folder: (folder / CARD).is_file(), "a judge", arguments.overwrite)
    check_sources(arguments.data, [arguments.text, arguments.labels])
    announce(f"loading {arguments.encoder}", arguments.json)
    from radq.judges.linear import Card, LinearModel, split_rows
    from radq.judges.readers import load_encoder
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


def _read_labelled_texts(arguments: Train) -> tuple[list[str], np.ndarray, int]:
    """Read texts and their labels, and count the rows that are left out because their text is blank."""
    from radq.data.examples import DataColumns

    rules = LabelRules.parse(arguments.label_map, arguments.label_range)
    columns = DataColumns(arguments.text, [arguments.labels], skip_empty=True)
    pieces = [piece for source in arguments.data for piece in columns.read(source)]
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


SUBCOMMANDS = {"score": (Score, _score), "train": (Train, _train)}
