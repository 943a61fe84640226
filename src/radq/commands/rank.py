"""radq rank data reviews.csv --labels praise --tokenizer gpt2

Also `radq rank model DIR --data reviews.csv` and `radq rank verify MATRIX CERTIFICATE`.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from radq.data import RewardData
    from radq.rank.matrix import RewardMatrix
    from radq.rank.numerical import NumericalRank


@dataclass
class Data:
    """Say whether a low-rank reward model can fit the responses of a data set, before training one."""

    files: tyro.conf.Positional[list[str]]
    """csv, tsv, jsonl or parquet, maybe compressed; or one .npz that --save-matrix has written."""
    labels: str = ""
    """Column with the response."""
    tokenizer: str = ""
    """Hub name, folder, tokenizer.json, or a folder with GPT-2's encoder.json and vocab.bpe; else the backbone's."""
    backbone: str | None = None
    """Language model whose hidden size the verdict is about."""
    ranks: str = ""
    """Ranks to try, separated by commas; by default five up to where an exact fit is likely."""
    eps: float = 1e-6
    """Mean squared error over Ω_2 that counts as a fit."""
    iterations: int = 1000
    """At most so many per rank."""
    penalty: float = 1e-4
    """On the squares of the factors."""
    tolerance: float = 0.01
    """Stop when an iteration lowers the objective by less than this share."""
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
    """Of the random start."""
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
    if isinstance(arguments, Data):
        rank_data(arguments)
    elif isinstance(arguments, Model):
        rank_model(arguments)
    else:
        verify_certificate(arguments)


# --- radq rank data ---


def rank_data(arguments: Data) -> None:
    import torch

    from radq.backbones import find_device, load_config
    from radq.commands.console import console, print_json
    from radq.errors import OptionError
    from radq.memory import peak_memory
    from radq.rank.analysis import complete_all, describe, give_verdict, suggest_ranks
    from radq.rank.completion import check_options

    check_options(arguments.penalty, arguments.iterations)
    if not 0 <= arguments.eps < float("inf"):
        raise OptionError(f"eps is {arguments.eps}.", "give a mean squared error, 1e-6 say.")
    device = find_device(arguments.device)
    hidden_size = None if arguments.backbone is None else load_config(arguments.backbone).hidden_size
    given = parse_numbers(arguments.ranks, "ranks")
    matrix = _read_matrix(arguments)
    facts = describe(matrix)
    if not arguments.json:
        _print_facts(facts)
    results = []
    if len(matrix.omega2):
        options = {name: getattr(arguments, name) for name in ("penalty", "iterations", "tolerance", "seed")}
        for result in complete_all(
            matrix,
            given or suggest_ranks(matrix),
            arguments.eps,
            arguments.certificates,
            progress=not arguments.json,
            device=device,
            dtype=getattr(torch, arguments.dtype),
            **options,
        ):
            results.append(result)
    verdict = give_verdict(matrix, results, arguments.eps, arguments.backbone, hidden_size)
    peak = {"peak_memory": peak_memory()} | ({"peak_gpu_memory": peak_memory(device)} if device != "cpu" else {})
    if arguments.json:
        table = [asdict(result) for result in results]
        print_json(facts | {"eps": arguments.eps, "table": table, "verdict": verdict} | peak)
        return
    _print_results(results)
    console().print(verdict)
    console().print(", ".join(f"{name.replace('_', ' ')} {size / 2**30:.2f} GiB" for name, size in peak.items()))


def _read_matrix(arguments: Data) -> "RewardMatrix":
    from radq.backbones import load_tokenizer
    from radq.errors import OptionError
    from radq.rank.matrix import RewardMatrix, build_matrix

    if len(arguments.files) == 1 and arguments.files[0].endswith(".npz"):
        return RewardMatrix.load(arguments.files[0])
    name = arguments.tokenizer or arguments.backbone
    if not name:
        raise OptionError("there is no tokenizer.", "give --tokenizer, or the --backbone it belongs to.")
    label = arguments.labels.strip()
    if not label or "," in label:
        raise OptionError(f"the label is {label!r}.", "give --labels with one column; each label has its own matrix.")
    tokenizer = load_tokenizer(name)
    data = _load(arguments, tokenizer, [label])
    matrix = build_matrix(data, max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())))
    if arguments.save_matrix is not None:
        matrix.save(arguments.save_matrix)
    return matrix


def _load(arguments: Data | Model, tokenizer: Any, labels: list[str]) -> "RewardData":
    from radq.data import NO_LIMIT, DataColumns, load_data

    files = arguments.files if isinstance(arguments, Data) else arguments.data
    columns = DataColumns(arguments.text, labels, skip_empty=arguments.skip_empty)
    limit = NO_LIMIT
    if isinstance(arguments, Data):
        columns = DataColumns(
            arguments.text, labels, arguments.prompt, arguments.weight, arguments.label_range, arguments.skip_empty
        )
        limit = arguments.max_length or NO_LIMIT
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


def _print_results(results: list[Any]) -> None:
    from rich.table import Table

    from radq.commands.console import console

    table = Table()
    for column in ("rank", "MSE over Ω_2", "MSE over nm", "ε-rank", "fits", "iterations", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        reached = result.bound is not None
        table.add_row(
            str(result.rank),
            f"{result.mse:.3g}",
            f"{result.mse_nm:.3g}",
            f"≤ {result.bound}" if reached else "?",
            f"d ≥ {result.bound}" if reached else "-",
            str(result.iterations),
            f"{result.seconds:.2f}",
        )
    console().print(table)


# --- radq rank model ---


def rank_model(arguments: Model) -> None:
    import torch

    from radq.backbones import find_device
    from radq.commands.console import console, print_json
    from radq.errors import ModelError, OptionError, UnknownAttributeError
    from radq.models import RewardModel
    from radq.rank.numerical import numerical_ranks, reward_rows, sample_prefixes

    sizes = sorted(parse_numbers(arguments.rows, "rows"))
    if not sizes or sizes[0] < 1:
        raise OptionError(f"the rows are {arguments.rows!r}.", "give numbers of prefixes, 64,128,256 say.")
    device = find_device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    model = RewardModel.from_pretrained(arguments.reward, device, dtype=dtype)
    if model.tokenizer is None:
        raise ModelError(f"{arguments.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    attribute = arguments.attribute or model.config.attributes[0]
    if attribute not in model.config.attributes:
        raise UnknownAttributeError(
            f"the reward model has no attribute {attribute!r}.", f"it has {', '.join(model.config.attributes)}."
        )
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
