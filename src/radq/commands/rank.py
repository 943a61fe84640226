"""radq rank data reviews.csv --labels praise --backbone gpt2

Also `radq rank model DIR --data reviews.csv` and `radq rank verify MATRIX CERTIFICATE`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from radq.commands import AsJson
from radq.commands.console import announce, console, print_json, print_table
from radq.rank.config import DataRankConfig, ModelRankConfig

if TYPE_CHECKING:
    from radq.rank.analysis import RankResult
    from radq.rank.embedding_bound import EmbeddingBound
    from radq.rank.numerical import ModelRanks

ROWS_PRINTED = 10


@dataclass
class VerifyArguments:
    """Check a certificate: compute the error of its factors from the matrix."""

    matrix: tyro.conf.Positional[Path]
    """File that `radq rank data --save-matrix` has written."""
    certificate: tyro.conf.Positional[Path]
    """File that `radq rank data --certificates` has written."""
    json: AsJson = False


# --- radq rank data ---


def rank_data(arguments: DataRankConfig) -> None:
    arguments.check()
    announce(f"loading {arguments.backbone or arguments.tokenizer or arguments.files[0]}", arguments.json)
    from radq.models.loading import find_device
    from radq.numerics import peak_memory
    from radq.rank.analysis import Backbone, complete_ranks, describe_matrix, give_verdict, read_matrix
    from radq.rank.embedding_bound import bound_by_backbone

    device, progress = find_device(arguments.device), not arguments.json
    name = arguments.backbone
    backbone = None if name is None else Backbone.read(name)
    matrix = read_matrix(arguments, progress)
    facts = describe_matrix(matrix)
    if not arguments.json:
        _print_facts(facts)
    bound = None if name is None else bound_by_backbone(matrix, name, progress)
    results, shuffled = complete_ranks(arguments, matrix, device, progress)
    verdict = give_verdict(matrix, results, shuffled, arguments.eps, backbone, bound)
    peak = {"peak_memory": peak_memory()} | ({"peak_gpu_memory": peak_memory(device)} if device != "cpu" else {})
    if arguments.json:
        answer = {
            "eps": arguments.eps,
            "table": [asdict(result) for result in results],
            "shuffled": None if shuffled is None else [asdict(result) for result in shuffled],
            "embedding_bound": None if bound is None else {"backbone": name} | asdict(bound),
            "verdict": verdict.text,
            "verdict_code": verdict.code,
        }
        print_json(facts | answer | peak)
        return
    _print_results(results, shuffled)
    if bound is not None:
        _print_bound(bound, str(name))
    console().print(f"verdict: {verdict.text}", markup=False)
    console().print(", ".join(f"{name.replace('_', ' ')} {size / 2**30:.2f} GiB" for name, size in peak.items()))


def _print_facts(facts: dict[str, Any]) -> None:
    ambiguous, contradicting = (
        f"{facts[name] / max(1, facts['entries']):.2%}" for name in ("ambiguous_entries", "contradicting_entries")
    )
    console().print(
        f"{facts['utterances']:,} utterances, {facts['prefixes']:,} prefixes (rows), {facts['entries']:,} entries; "
        f"{ambiguous} are the mean of several utterances, {contradicting} of different labels"
    )
    console().print(
        f"Ω_2, the rows with two or more continuations: {facts['omega2_rows']:,} rows, "
        f"{facts['omega2_columns']:,} columns, {facts['omega2_entries']:,} entries"
    )


def _print_results(results: "list[RankResult]", shuffled: "list[RankResult] | None") -> None:
    header = ["rank", "MSE over Ω_2", "shuffled", "over nm", "ε-rank", "iterations", "seconds"]
    rows = [
        [
            str(result.rank),
            f"{result.mse:.3g}",
            "?" if shuffled is None else f"{shuffled[index].mse:.3g}",
            f"{result.mse_nm:.3g}",
            "?" if result.bound is None else f"≤ {result.bound}",
            str(result.iterations),
            f"{result.seconds:.2f}",
        ]
        for index, result in enumerate(results)
    ]
    print_table(header, rows)


def _print_bound(bound: "EmbeddingBound", backbone: str) -> None:
    from radq.rank.analysis import quote_prefix

    out = console()
    out.print(
        f"With the frozen output embedding of {backbone}, a RAD-Q with a linear head has at least these errors:",
        markup=False,
    )
    for part in bound.attributes:
        out.print(
            f"  {part.attribute}: {part.mse_omega2:.3g} over Ω_2, {part.mse_omega:.3g} over Ω, "
            f"{part.weighted_loss:.3g} of the training loss. Utterances that contradict each other add "
            f"{part.contradiction_loss:.3g} to the loss of every model.",
            markup=False,
        )
    if not bound.rows:
        return
    title = f"{bound.costly_rows} rows that the embedding cannot meet; those with the largest errors"
    rows = [
        [quote_prefix(row), row.attribute, f"{row.continuations:,}", f"{row.variance:.3g}", f"{row.mse:.3g}"]
        for row in bound.rows[:ROWS_PRINTED]
    ]
    print_table(["after", "attribute", "continuations", "variance", "best fit"], rows, words=2, title=title)


# --- radq rank model ---


def rank_model(arguments: ModelRankConfig) -> None:
    arguments.check()
    announce(f"loading {arguments.reward}", arguments.json)
    from radq.rank.numerical import measure_ranks

    measured = measure_ranks(arguments, progress=not arguments.json)
    if arguments.out is not None:
        measured.save(arguments.out)
    if arguments.json:
        print_json(asdict(measured))
        return
    _print_ranks(measured)
    if arguments.out is not None:
        console().print(f"plots → {arguments.out}")


def _print_ranks(measured: "ModelRanks") -> None:
    header = ["prefixes", "rank", "cutoff", "σ_1", *(f"> {count.share:g} σ_1" for count in measured.ranks[0].counts)]
    rows = [
        [str(rank.num_rows), str(rank.rank), f"{rank.cutoff:.3g}", f"{rank.spectrum[0]:.3g}"]
        + [str(count.count) for count in rank.counts]
        for rank in measured.ranks
    ]
    out = console()
    out.print(f"{measured.attribute}: {measured.vocabulary} tokens, d = {measured.hidden_size}, {measured.dtype}")
    print_table(header, rows)
    out.print(
        "The rank is the number of singular values above the cutoff. Another cutoff gives another number: the columns "
        "on the right count the singular values above shares of the largest, σ_1."
    )
    if measured.tf32:
        out.print(
            "note: NVIDIA_TF32_OVERRIDE=1 took digits from the products of float32 numbers, so small singular values "
            "may be rounding errors. Unset it and measure again."
        )


# --- radq rank verify ---


def verify(arguments: VerifyArguments) -> None:
    from radq.rank.analysis import check_certificate
    from radq.rank.matrix import RewardMatrix

    result = check_certificate(RewardMatrix.load(arguments.matrix), arguments.certificate)
    if arguments.json:
        print_json(result)
        return
    console().print(
        f"rank {result['rank']}: MSE {result['mse']:.3g} over Ω_2, {result['mse_nm']:.3g} over nm; for any ε "
        f"of at least that error, the minimal ε-rank is at most {result['bound']}"
    )


SUBCOMMANDS = {
    "data": (DataRankConfig, rank_data),
    "model": (ModelRankConfig, rank_model),
    "verify": (VerifyArguments, verify),
}
