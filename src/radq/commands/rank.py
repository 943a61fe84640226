"""radq rank data reviews.csv --labels praise --backbone gpt2

Also `radq rank model DIR --data reviews.csv` and `radq rank verify MATRIX CERTIFICATE`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from radq.data.dataset import RewardData
    from radq.models.vocabulary import Vocabulary
    from radq.rank.analysis import RankResult
    from radq.rank.embedding_bound import EmbeddingBound
    from radq.rank.matrix import RewardMatrix
    from radq.rank.numerical import NumericalRank
    from radq.rank.verdict import Backbone


ROWS_PRINTED = 10


@dataclass
class Data:
    """Say whether RAD-Q can fit the responses of a data set, before training one.

    Ranks that meet the responses stand beside those that meet shuffled responses, and with --backbone beside a lower
    bound of the error that its frozen output embedding leaves.
    """

    files: tyro.conf.Positional[list[str]]
    """csv, tsv, jsonl or parquet, maybe compressed; or one .npz that --save-matrix has written."""
    labels: str = ""
    """Columns with the responses, separated by commas; several attributes share one stacked matrix."""
    tokenizer: str = ""
    """Hub name, folder, tokenizer.json, or a folder with GPT-2's encoder.json and vocab.bpe; else the backbone's."""
    backbone: str | None = None
    """Language model whose hidden size and frozen output embedding the verdict is about."""
    ranks: str = ""
    """Ranks to try, separated by commas; by default five up to where an exact fit is likely."""
    eps: float = 1e-6
    """Mean squared error over Ω_2 that counts as a fit."""
    iterations: int = 200
    """At most so many per rank."""
    penalty: float = 1e-4
    """On the squares of the factors."""
    tolerance: float = 0.01
    """Stop when an iteration lowers the objective by less than this share, unless eps is still in reach."""
    text: str = "text"
    """Column with the texts."""
    prompt: str | None = None
    """Column with context before each text."""
    weight: str | None = None
    """Column with the weight of each row."""
    label_range: tuple[float, float] | None = None
    """Low and high of the label, to be mapped to [0, 1]; by default it stays as it is."""
    skip_empty: bool = False
    """Leave rows with an empty text out, and say how many."""
    max_length: int | None = None
    """Cut longer texts off; by default they stay whole."""
    cache: str | None = None
    """Folder for tokenised data; by default in the user's cache."""
    save_matrix: Path | None = None
    """Write the reward matrix as npz, which scipy.sparse.load_npz reads."""
    certificates: Path | None = None
    """Folder for the factors of each rank; those that are there already are gone on from."""
    seed: int = 0
    """Of the random start, and of the shuffle unless a matrix brings its own."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    dtype: Literal["float64", "float32"] = "float64"
    """Of the factors."""
    json: bool = False
    """Print JSON, and no progress."""


@dataclass
class Model:
    """Measure the numerical rank of the rewards that a trained model gives."""

    reward: tyro.conf.Positional[str]
    """Reward model folder."""
    data: Annotated[list[str], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE")] = field(default_factory=list)
    """Files to draw prefixes from; repeat for more."""
    text: str = "text"
    """Column with the texts."""
    skip_empty: bool = False
    """Leave rows with an empty text out."""
    attribute: str | None = None
    """Which reward; by default the first."""
    rows: str = "64,128,256,512,1024,2048"
    """Numbers of prefixes, separated by commas."""
    batch_size: int = 16
    """Prefixes read together."""
    out: Path | None = None
    """Folder for rank.json and the plots rank.png and spectrum.png."""
    cache: str | None = None
    """Folder for tokenised data; by default in the user's cache."""
    seed: int = 0
    """Of the draw."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of the model and so of the cutoff."""
    json: bool = False
    """Print JSON, and no progress."""


@dataclass
class Verify:
    """Check a certificate: compute the error of its factors from the matrix."""

    matrix: tyro.conf.Positional[Path]
    """What --save-matrix has written."""
    certificate: tyro.conf.Positional[Path]
    """A file that --certificates has written."""
    json: bool = False
    """Print JSON."""


Arguments = (
    Annotated[Data, tyro.conf.subcommand("data")]
    | Annotated[Model, tyro.conf.subcommand("model")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
)


def run(arguments: Data | Model | Verify) -> None:
    with _explained_failures():
        if isinstance(arguments, Data):
            rank_data(arguments)
        elif isinstance(arguments, Model):
            rank_model(arguments)
        else:
            verify_certificate(arguments)


@contextmanager
def _explained_failures() -> Iterator[None]:
    """One line with a hint for what disks and memory do: full, not writable, a folder where a file is meant."""
    from radq.errors import DataError, MemoryLimitError, RadqError

    try:
        yield
    except (RadqError, BrokenPipeError):
        raise
    except OSError as error:
        where = f"{error.filename!r} cannot be used" if error.filename else "a file cannot be used"
        reason = (error.strerror or str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{where}: {reason}.", "check that paths are right and writable, and the room on disk."
        ) from error
    except MemoryError as error:
        raise MemoryLimitError("the memory of this machine is full.", "use less data or lower ranks.") from error


# --- radq rank data ---


def rank_data(arguments: Data) -> None:
    from radq.commands.console import console, print_json
    from radq.models.loading import find_device
    from radq.numerics import peak_memory
    from radq.rank.analysis import describe
    from radq.rank.verdict import give_verdict

    _check(arguments)
    device = find_device(arguments.device)
    ranks = parse_numbers(arguments.ranks, "ranks")
    backbone = _describe_backbone(arguments)
    matrix = _read_matrix(arguments)
    facts = describe(matrix)
    if not arguments.json:
        _print_facts(facts)
    bound = _bound(arguments, matrix)
    results, shuffled = _complete(arguments, matrix, ranks, device)
    verdict = give_verdict(matrix, results, shuffled, arguments.eps, backbone, bound)
    peak = {"peak_memory": peak_memory()} | ({"peak_gpu_memory": peak_memory(device)} if device != "cpu" else {})
    if arguments.json:
        answer = {
            "eps": arguments.eps,
            "table": [asdict(result) for result in results],
            "shuffled": None if shuffled is None else [asdict(result) for result in shuffled],
            "embedding_bound": None if bound is None else {"backbone": arguments.backbone} | asdict(bound),
            "verdict": verdict.text,
            "verdict_code": verdict.code,
        }
        print_json(facts | answer | peak)
        return
    _print_results(results, shuffled)
    _print_bound(bound, arguments.backbone)
    console().print(f"verdict: {verdict.text}", markup=False)
    console().print(", ".join(f"{name.replace('_', ' ')} {size / 2**30:.2f} GiB" for name, size in peak.items()))


def _check(arguments: Data) -> None:
    from radq.errors import OptionError
    from radq.rank.completion import check_options

    check_options(arguments.penalty, arguments.iterations, arguments.tolerance, arguments.seed)
    if not 0 <= arguments.eps < float("inf"):
        raise OptionError(f"eps is {arguments.eps}.", "give a mean squared error, 1e-6 say.")
    if arguments.max_length is not None and not 1 <= arguments.max_length < 2**31:
        raise OptionError(f"max_length is {arguments.max_length}.", "give 1 token or more, or leave it out.")
    if arguments.save_matrix is not None and (not arguments.save_matrix.name or arguments.save_matrix.is_dir()):
        raise OptionError(
            f"the matrix cannot be saved as {str(arguments.save_matrix)!r}.", "name a file, matrix.npz say."
        )
    low, high = arguments.label_range or (0.0, 1.0)
    if not -float("inf") < low < high < float("inf"):
        raise OptionError(f"the label range is {low} to {high}.", "give two finite numbers, the lower one first.")


def _describe_backbone(arguments: Data) -> "Backbone | None":
    from radq.errors import ModelError
    from radq.models.loading import load_config
    from radq.rank.verdict import Backbone

    if arguments.backbone is None:
        return None
    hidden_size = getattr(load_config(arguments.backbone).get_text_config(), "hidden_size", None)
    if not isinstance(hidden_size, int):
        raise ModelError(f"{arguments.backbone!r} names no hidden size.", "choose a causal language model.")
    return Backbone(arguments.backbone, hidden_size)


def _read_matrix(arguments: Data) -> "RewardMatrix":
    from radq.errors import OptionError
    from radq.models.loading import load_tokenizer
    from radq.models.vocabulary import read_vocabulary
    from radq.rank.matrix import RewardMatrix, build_matrix, shuffle_responses

    labels = [label.strip() for label in arguments.labels.split(",")]
    if len(arguments.files) == 1 and arguments.files[0].endswith(".npz"):
        matrix = RewardMatrix.load(arguments.files[0])
    else:
        name = arguments.tokenizer or arguments.backbone
        if not name:
            raise OptionError("there is no tokenizer.", "give --tokenizer, or the --backbone it belongs to.")
        if not all(labels) or len(set(labels)) < len(labels):
            raise OptionError(
                f"the labels are {arguments.labels!r}.", "give --labels with one column, or different ones with commas."
            )
        tokenizer = load_tokenizer(name)
        vocabulary = read_vocabulary(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), tokenizer)
        if arguments.tokenizer and arguments.backbone is not None:
            _check_vocabulary(arguments.backbone, vocabulary)
        data = _load(arguments, tokenizer, labels)
        shuffled = build_matrix(shuffle_responses(data, arguments.seed), vocabulary.size).omega2.values
        matrix = replace(build_matrix(data, vocabulary.size, labels), shuffled=shuffled, vocabulary=vocabulary)
    if arguments.save_matrix is not None:
        matrix.save(arguments.save_matrix)
    return matrix


def _check_vocabulary(backbone: str, vocabulary: "Vocabulary") -> None:
    """Refuse a backbone whose token ids mean something else: its embeddings would be those of other tokens."""
    from radq.errors import VocabularyError
    from radq.models.loading import find_tokenizer, load_config
    from radq.models.vocabulary import read_vocabulary

    tokenizer = find_tokenizer(backbone)
    if tokenizer is None:
        same = getattr(load_config(backbone).get_text_config(), "vocab_size", None) == vocabulary.size
    else:
        same = read_vocabulary(vocabulary.num_tokens or 0, tokenizer).fingerprint == vocabulary.fingerprint
    if not same:
        raise VocabularyError(
            f"the tokens of the matrix are not those of the backbone {backbone!r}.",
            "leave --tokenizer out to use the backbone's own, or leave --backbone out to ask about ranks alone.",
        )


def _bound(arguments: Data, matrix: "RewardMatrix") -> "EmbeddingBound | None":
    """None without a backbone, and for matrices that do not say what their tokens are."""
    from radq.errors import VocabularyError
    from radq.models.loading import find_tokenizer, load_output_embedding
    from radq.rank.embedding_bound import bound_by_embedding

    if arguments.backbone is None or matrix.vocabulary is None or matrix.omega2_prefixes is None:
        return None
    _check_vocabulary(arguments.backbone, matrix.vocabulary)
    embedding = load_output_embedding(arguments.backbone)
    highest = int(matrix.tokens.max())
    if highest >= len(embedding):
        raise VocabularyError(
            f"the data have the token {highest}, but the output embedding of {arguments.backbone!r} has "
            f"{len(embedding)} rows.",
            "use the tokenizer that the backbone was trained with.",
        )
    tokenizer = find_tokenizer(arguments.backbone)
    decode = str if tokenizer is None else lambda tokens: str(tokenizer.decode(tokens))
    return bound_by_embedding(matrix, embedding, decode, progress=not arguments.json)


def _complete(
    arguments: Data, matrix: "RewardMatrix", ranks: list[int], device: str
) -> "tuple[list[RankResult], list[RankResult] | None]":
    """The table of the responses, and that of shuffled ones where the matrix has them."""
    import torch

    from radq.rank.analysis import complete_all, complete_shuffled, suggest_ranks

    if not len(matrix.omega2):
        return [], []
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("penalty", "iterations", "tolerance", "seed")
    }
    options |= {"device": device, "dtype": getattr(torch, arguments.dtype), "progress": not arguments.json}
    ranks = ranks or suggest_ranks(matrix)
    results = list(complete_all(matrix, ranks, arguments.eps, arguments.certificates, **options))
    if matrix.shuffled is None:
        return results, None
    return results, list(complete_shuffled(matrix, ranks, arguments.eps, **options))


def _load(arguments: Data | Model, tokenizer: Any, labels: list[str]) -> "RewardData":
    from radq.data.dataset import NO_LIMIT, DataColumns, load_data

    files = arguments.files if isinstance(arguments, Data) else arguments.data
    columns = DataColumns(arguments.text, labels, skip_empty=arguments.skip_empty)
    limit = NO_LIMIT
    if isinstance(arguments, Data):
        columns = DataColumns(
            arguments.text, labels, arguments.prompt, arguments.weight, arguments.label_range, arguments.skip_empty
        )
        limit = NO_LIMIT if arguments.max_length is None else arguments.max_length
    return load_data(files, tokenizer, columns, limit, arguments.cache, progress=not arguments.json)


def parse_numbers(text: str, what: str) -> list[int]:
    """`64,128,256`"""
    from radq.errors import OptionError

    try:
        return [int(number) for number in text.split(",")] if text.strip() else []
    except ValueError as error:
        raise OptionError(f"the {what} are {text!r}.", "give whole numbers separated by commas.") from error


def _print_facts(facts: dict[str, Any]) -> None:
    from radq.commands.console import console

    ambiguous, contradicting = (
        f"{facts[name] / max(1, facts['entries']):.2%}" for name in ("ambiguous_entries", "contradicting_entries")
    )
    console().print(
        f"{facts['utterances']:,} utterances, {facts['prefixes']:,} prefixes (rows), {facts['entries']:,} entries; "
        f"{ambiguous} average over several utterances, {contradicting} over different responses"
    )
    console().print(
        f"Ω_2, the rows with two or more continuations: {facts['omega2_rows']:,} rows, "
        f"{facts['omega2_columns']:,} columns, {facts['omega2_entries']:,} entries"
    )


def _print_results(results: "list[RankResult]", shuffled: "list[RankResult] | None") -> None:
    from rich.table import Table

    from radq.commands.console import console

    table = Table()
    for column in ("rank", "MSE over Ω_2", "shuffled", "over nm", "ε-rank", "iterations", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for index, result in enumerate(results):
        table.add_row(
            str(result.rank),
            f"{result.mse:.3g}",
            "?" if shuffled is None else f"{shuffled[index].mse:.3g}",
            f"{result.mse_nm:.3g}",
            "?" if result.bound is None else f"≤ {result.bound}",
            str(result.iterations),
            f"{result.seconds:.2f}",
        )
    console().print(table)


def _print_bound(bound: "EmbeddingBound | None", backbone: str | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    from radq.commands.console import console
    from radq.rank.verdict import quote_prefix

    if bound is None:
        return
    out = console()
    out.print(
        f"With the frozen output embedding of {backbone}, a RAD-Q with a linear head has at least these errors:",
        markup=False,
    )
    for part in bound.attributes:
        line = f"  {part.attribute}: {part.mse_omega2:.3g} over Ω_2, {part.mse_omega:.3g} over Ω"
        if part.weighted_loss is not None and part.contradiction_loss is not None:
            line += (
                f", {part.weighted_loss:.3g} of the training loss. Utterances that contradict each other add "
                f"{part.contradiction_loss:.3g} to the loss of every model."
            )
        out.print(line, markup=False)
    if not bound.rows:
        return
    table = Table(title=f"{bound.costly_rows} rows that the embedding cannot meet; those that cost most")
    for column in ("after", "attribute", "continuations", "variance", "best fit"):
        table.add_column(column, justify="left" if column in ("after", "attribute") else "right")
    for row in bound.rows[:ROWS_PRINTED]:
        numbers = (f"{row.continuations:,}", f"{row.variance:.3g}", f"{row.mse:.3g}")
        table.add_row(escape(quote_prefix(row)), escape(row.attribute), *numbers)
    out.print(table)


# --- radq rank model ---


def rank_model(arguments: Model) -> None:
    import torch

    from radq.commands.console import console, print_json
    from radq.errors import ModelError, OptionError, UnknownAttributeError
    from radq.models.loading import find_device
    from radq.models.reward import RewardModel
    from radq.rank.completion import check_seed
    from radq.rank.numerical import numerical_ranks, require_rows, reward_rows, sample_prefixes

    sizes = sorted(parse_numbers(arguments.rows, "rows"))
    if not sizes or sizes[0] < 1:
        raise OptionError(f"the rows are {arguments.rows!r}.", "give numbers of prefixes, 64,128,256 say.")
    if arguments.batch_size < 1:
        raise OptionError(f"the batch size is {arguments.batch_size}.", "give 1 prefix or more.")
    check_seed(arguments.seed)
    device = find_device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    model = RewardModel.from_pretrained(arguments.reward, device, dtype=dtype)
    if model.tokenizer is None:
        raise ModelError(f"{arguments.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    attribute = model.config.attributes[0] if arguments.attribute is None else arguments.attribute
    if attribute not in model.config.attributes:
        raise UnknownAttributeError(
            f"the reward model has no attribute {attribute!r}.", f"it has {', '.join(model.config.attributes)}."
        )
    require_rows(sizes[-1], model.vocabulary.size)
    data = _load(arguments, model.tokenizer, [])
    limit = None if model.max_tokens is None else model.max_tokens - 1  # and a candidate
    prefixes = sample_prefixes(data, sizes[-1], limit, arguments.seed)
    rows = reward_rows(model, prefixes, attribute, arguments.batch_size, progress=not arguments.json)
    ranks = numerical_ranks(rows, sizes, torch.finfo(dtype).eps, device)
    assert model.config.backbone is not None
    document = {
        "reward": arguments.reward,
        "kind": model.config.kind,
        "attribute": attribute,
        "hidden_size": model.config.backbone.hidden_size,
        "vocabulary": rows.shape[1],
        "dtype": arguments.dtype,
        "ranks": [asdict(rank) for rank in ranks],
    }
    if arguments.out is not None:
        _save(document, ranks, arguments.out)
    if arguments.json:
        print_json(document)
        return
    _print_ranks(document, ranks)
    if arguments.out is not None:
        console().print(f"plots → {arguments.out}")


def _print_ranks(document: dict[str, Any], ranks: "list[NumericalRank]") -> None:
    from rich.table import Table

    from radq.commands.console import console

    title = (
        f"{document['attribute']}: {document['vocabulary']} tokens, d = {document['hidden_size']}, {document['dtype']}"
    )
    table = Table(title=title)
    for column in ("prefixes", "rank", "σ_1", "cutoff", "σ at a tenth of N"):
        table.add_column(column, justify="right")
    for rank in ranks:
        spectrum = rank.spectrum
        tenth = spectrum[min(len(spectrum) - 1, rank.num_rows // 10)]
        cells = (f"{number:.3g}" for number in (spectrum[0], rank.cutoff, tenth))
        table.add_row(str(rank.num_rows), str(rank.rank), *cells)
    console().print(table)


def _save(document: dict[str, Any], ranks: "list[NumericalRank]", folder: Path) -> None:
    import json

    from radq.files import whole_folder
    from radq.rank.plots import plot_ranks, plot_spectrum

    with whole_folder(folder) as temporary:
        (temporary / "rank.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
        label = f"RAD-{document['kind'].upper()}, {document['attribute']}"
        plot_ranks({label: ranks}, document["hidden_size"], temporary / "rank.png")
        plot_spectrum({label: ranks[-1]}, document["hidden_size"], temporary / "spectrum.png")


# --- radq rank verify ---


def verify_certificate(arguments: Verify) -> None:
    from radq.commands.console import console, print_json
    from radq.rank.analysis import verify
    from radq.rank.matrix import RewardMatrix

    result = verify(RewardMatrix.load(arguments.matrix), arguments.certificate)
    if arguments.json:
        print_json(result)
        return
    console().print(
        f"rank {result['rank']}: MSE {result['mse']:.3g} over Ω_2, {result['mse_nm']:.3g} over nm; for any ε from "
        f"there on, the minimal ε-rank is at most {result['bound']}"
    )
