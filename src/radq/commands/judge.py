"""radq judge score --judge openai:MODEL --rubric rubric.md --data texts.csv --out scored.csv

Also `radq judge train --data FILE --labels COLUMN --out FOLDER`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from radq.settings import COUNT, Range

if TYPE_CHECKING:
    import numpy as np

    from radq.judges.base import CachedJudge, Judge

RANGES = {"jobs": Range(1, 256), "timeout": Range(0, 86_400, without_low=True), "max_tokens": COUNT}


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
    data: list[str] = field(default_factory=list)
    """Files with texts (csv, tsv, jsonl, parquet, each also .gz .xz .zst) or hub data sets (name or name:split)."""
    out: Path | None = None
    """Copy of the file of --data with a column of scores; by default the scores are printed."""
    text: str = "text"
    """Column with the texts in the files of --data."""
    name: str = "score"
    """Name of the column of scores."""
    overwrite: bool = False
    """Replace the file --out."""
    jobs: int = 8
    """For openai: number of texts that are judged at the same time."""
    timeout: float = 120.0
    """For openai: seconds to wait for an answer before the question is repeated."""
    max_tokens: int = 64
    """For openai: most tokens of an answer. A model that thinks before it answers needs more."""
    cache: Path | None = None
    """Folder in which scores are kept; by default in the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto uses a GPU if there is one."""
    json: bool = False
    """Print the result as JSON, without progress bars."""


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


Arguments = Annotated[Score, tyro.conf.subcommand("score")] | Annotated[Train, tyro.conf.subcommand("train")]


def run(arguments: Score | Train) -> None:
    if isinstance(arguments, Score):
        _score(arguments)
    else:
        _train(arguments)


# --- radq judge score ---


def _score(arguments: Score) -> None:
    from radq.commands.console import announce
    from radq.data.tables import check_sources, read_text_column
    from radq.errors import OptionError

    _check_options(arguments)
    asked = _check_judge(arguments)
    check_sources(arguments.data, [arguments.text])
    texts = [
        *arguments.texts,
        *(text for source in arguments.data for text in read_text_column(source, arguments.text)),
    ]
    if not texts:
        raise OptionError("there is no text to score.", "give texts, or --data FILE.")
    announce(f"loading {arguments.judge}", arguments.json)
    from radq.judges.base import CachedJudge

    judge = CachedJudge(asked or _load_judge(arguments), arguments.cache)
    scores = judge.score(texts, progress=not arguments.json)
    result = _summarise(judge, texts, scores)
    if arguments.out is not None:
        _write(arguments, arguments.out, scores)
        result = {"data": arguments.data[0], "out": str(arguments.out)} | result
    _warn_of_missing(judge.inner, result)
    _show(arguments, judge, texts, scores, result)


# --- checks ---


def _check_options(arguments: Score) -> None:
    from radq.data.table_copy import check_copy
    from radq.errors import OptionError

    for name, allowed in RANGES.items():
        if getattr(arguments, name) not in allowed:
            raise OptionError(f"{name} must be {allowed}, got {getattr(arguments, name)}.", "give such a number.")
    if not arguments.name.strip():
        raise OptionError("name must not be empty.", "give the name of a column.")
    if arguments.out is not None:
        if len(arguments.data) != 1 or arguments.texts:
            raise OptionError("out is a copy of one file of texts.", "give one --data FILE, and no other texts.")
        check_copy(Path(arguments.data[0]), arguments.out, [arguments.name], arguments.overwrite)


def _check_judge(arguments: Score) -> "Judge | None":
    """Refuse a judge that is none, before torch is imported. A judge that asks a server needs no torch: it is made."""
    from radq.errors import OptionError
    from radq.settings import names_in_table

    kind, _, source = arguments.judge.partition(":")
    kinds = names_in_table("radq.judges.models:JUDGES")
    if kind not in kinds:
        raise OptionError(f"there is no judge {arguments.judge!r}.", f"begin with one of {', '.join(kinds)}.")
    if kind == "openai":
        return _make_rubric_judge(arguments, source)
    if arguments.rubric is not None:
        raise OptionError(f"rubric is for the judge openai:MODEL, got {arguments.judge!r}.", "leave --rubric out.")
    return None


def _make_rubric_judge(arguments: Score, source: str) -> "Judge":
    from radq.errors import OptionError
    from radq.judges.chat import find_server
    from radq.judges.llm import RubricJudge, read_rubric, split_rubric

    model, file = split_rubric(source)
    if bool(file) == (arguments.rubric is not None):
        number = "two rubrics" if file else "no rubric"
        raise OptionError(f"the judge {arguments.judge!r} has {number}.", "give one --rubric FILE.")
    rubric = read_rubric(arguments.rubric or file)
    return RubricJudge(find_server(model, arguments.timeout, arguments.max_tokens), rubric, arguments.jobs)


def _load_judge(arguments: Score) -> "Judge":
    from radq.judges.models import load_judge
    from radq.models.loading import find_device

    return load_judge(arguments.judge, find_device(arguments.device))


# --- results ---


def _summarise(judge: "CachedJudge", texts: list[str], scores: "np.ndarray") -> dict[str, Any]:
    from dataclasses import asdict

    import numpy as np

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


def _write(arguments: Score, target: Path, scores: "np.ndarray") -> None:
    from radq.data.table_copy import copy_with_columns

    column = [None if score != score else float(score) for score in scores]
    copy_with_columns(Path(arguments.data[0]), target, {arguments.name: column})


def _warn_of_missing(judge: "Judge", result: dict[str, Any]) -> None:
    import warnings

    if result["missing"]:
        reason = getattr(judge, "problem", "")
        warnings.warn(
            f"{result['missing']} of {result['missing'] + result['scored']} texts have no score: {reason}. "
            "hint: the same command asks for them again.",
            stacklevel=2,
        )


def _show(arguments: Score, judge: "Judge", texts: list[str], scores: "np.ndarray", result: dict[str, Any]) -> None:
    from radq.commands.console import print_json

    if arguments.json:
        rows = [{"text": t, "score": None if s != s else float(s)} for t, s in zip(texts, scores, strict=True)]
        print_json(result | ({} if arguments.out is not None else {"texts": rows}))
        return
    print(result["judge"])
    if arguments.out is None:
        _print_scores(judge, texts, scores)
    print(f"{result['scored']} texts scored, {result['kept']} of them before; ", end="")
    print(f"{result['missing']} missing, {result['blank']} blank")
    if result["truncated"]:
        print(f"note: {result['truncated']} texts were too long, and were judged by their beginnings.")
    if result["usage"] is not None:
        _print_usage(result["usage"])
    if arguments.out is not None:
        print(f"→ {arguments.out}")


def _print_scores(judge: "Judge", texts: list[str], scores: "np.ndarray") -> None:
    import numpy as np
    from rich.table import Table

    from radq.commands.console import console
    from radq.report.tokens import coloured

    found = scores[~np.isnan(scores)]
    low, high = judge.limits if np.isfinite(judge.limits).all() else (found.min(initial=0), found.max(initial=1))
    table = Table()
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for text, score in zip(texts, scores, strict=True):
        unknown = "missing" if text.strip() else "blank"
        table.add_row(unknown if score != score else coloured([(f"{score:.3f}", score)], low, high), text)
    console().print(table)


def _print_usage(usage: dict[str, int]) -> None:
    print(
        f"{usage['calls']} answers, after {usage['failures']} failures: {usage['prompt_tokens']:,} tokens read, "
        f"{usage['completion_tokens']:,} written"
    )


# --- radq judge train ---


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

    from radq.data.examples import DataColumns
    from radq.data.label_scale import LabelRules, find_scales, join_cells, scale_labels
    from radq.errors import DataError, OptionError

    if arguments.limit is not None and arguments.limit < 1:
        raise OptionError(f"limit must be at least 1, got {arguments.limit}.", "leave it out to use all rows.")
    if arguments.seed < 0:
        raise OptionError(f"seed must be at least 0, got {arguments.seed}.", "give another seed.")
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
