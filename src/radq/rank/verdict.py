"""The answer to "will RAD-Q fit my data?", from the ranks of the labels, those of shuffled labels, and the embeddings.

The verdict is the first of these that holds:

    embeddings    the frozen embeddings of the backbone cost more than ε, which is proved whatever the ranks are
    no-rank       no rank that was tried meets the labels
    hidden-size   the smallest rank that meets them is more than the hidden size of the backbone
    sparse        shuffled labels are met at that rank too, so the rank says nothing about the labels
    unchecked     shuffled labels were not tried, since the matrix was saved without them
    no-obstacle   the labels are met at a rank at which shuffled ones are not
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from radq.errors import ModelError
from radq.models.loading import load_config
from radq.rank.analysis import RankResult, rank_outside_omega2
from radq.rank.completion import degeneracy
from radq.rank.embedding_bound import BoundedRow, EmbeddingBound
from radq.rank.matrix import RewardMatrix

NAMED_PREFIXES = 4
PREFIX_CHARACTERS = 40
MARGIN = 10  # shuffled labels count as met up to this times ε: so near to ε, errors depend on penalty and stopping
WITHOUT_BACKBONE = "The cost of frozen embeddings was not computed: name a backbone with --backbone."
WITHOUT_TOKENS = (
    "The cost of its frozen embeddings is not known: the matrix was saved without its vocabulary. Make it again from "
    "the data."
)


@dataclass(frozen=True)
class Verdict:
    code: str
    text: str


@dataclass(frozen=True)
class Backbone:
    """The facts about a language model that the verdict mentions."""

    name: str
    hidden_size: int

    @classmethod
    def read(cls, name: str) -> "Backbone":
        """Read the configuration of a language model by hub name or folder."""
        hidden_size = getattr(load_config(name).get_text_config(), "hidden_size", None)
        if not isinstance(hidden_size, int):
            raise ModelError(
                f"the configuration of {name!r} has no hidden_size.", "choose a causal language model as backbone."
            )
        return cls(name, hidden_size)


def give_verdict(
    matrix: RewardMatrix,
    results: Sequence[RankResult],
    shuffled: Sequence[RankResult] | None,
    eps: float,
    backbone: Backbone | None = None,
    embedding_bound: EmbeddingBound | None = None,
) -> Verdict:
    """Say whether RAD-Q can fit the labels, as a code and as sentences.

    Args:
        results: completions of the labels, at different ranks.
        shuffled: completions of shuffled labels at the same ranks; None if the matrix does not hold any.
        eps: mean squared error over Ω_2 that counts as a fit.
    """
    about_rank = _judge_rank(matrix, results, shuffled, eps, backbone)
    if backbone is None:
        return replace(about_rank, text=f"{about_rank.text} {WITHOUT_BACKBONE}")
    if embedding_bound is None:
        return replace(about_rank, text=f"{about_rank.text} {WITHOUT_TOKENS}")
    if embedding_bound.mse_omega2 <= eps:
        return about_rank
    text = f"{_describe_cost(embedding_bound, backbone)} Judged by rank alone: {about_rank.text}"
    return Verdict("embeddings", text)


def _judge_rank(
    matrix: RewardMatrix,
    results: Sequence[RankResult],
    shuffled: Sequence[RankResult] | None,
    eps: float,
    backbone: Backbone | None,
) -> Verdict:
    if not len(matrix.omega2):
        rank = max(1, rank_outside_omega2(matrix))
        return Verdict(
            "sparse",
            f"cannot tell: too sparse. No prefix has two continuations, so a matrix of rank {rank} meets every entry, "
            "whatever the labels are.",
        )
    reached = min((result for result in results if result.bound is not None), key=lambda r: r.rank, default=None)
    if reached is None:
        best = min(results, key=lambda result: result.mse)
        return Verdict(
            "no-rank",
            f"no rank tried reaches {eps:g} over Ω_2; the best was rank {best.rank} with {best.mse:.2g}. Try higher "
            f"ranks (values in general position are met from rank {degeneracy(matrix.omega2)} on) or prefer RAD-V.",
        )
    found = (
        f"rank {reached.rank} meets the labels with an error of {reached.mse:.2g} ≤ {eps:g} over Ω_2, so the data "
        f"need rank {reached.bound} at most"
    )
    if backbone is not None and (reached.bound or 0) > backbone.hidden_size:
        return Verdict(
            "hidden-size",
            f"{found}, more than the hidden size {backbone.hidden_size} of {backbone.name}, which limits the rank of "
            "RAD-Q. Try lower ranks, a wider backbone, or RAD-V.",
        )
    return _compare_with_shuffled(found, reached, shuffled, eps, backbone)


def _compare_with_shuffled(
    found: str,
    reached: RankResult,
    shuffled: Sequence[RankResult] | None,
    eps: float,
    backbone: Backbone | None,
) -> Verdict:
    if backbone is None:
        enough = f"any backbone with a hidden size of {reached.bound} or more has that rank"
    else:
        enough = f"RAD-Q over {backbone.name} has that rank: its hidden size is {backbone.hidden_size}"
    if shuffled is None:
        return Verdict(
            "unchecked",
            f"{found}; {enough}. Shuffled labels were not tried, since the matrix was saved without them. Make it "
            "again from the data.",
        )
    same_rank = next(result for result in shuffled if result.rank == reached.rank)
    if same_rank.mse <= MARGIN * eps:
        return Verdict(
            "sparse",
            f"cannot tell: too sparse. {found[0].upper()}{found[1:]}, and {enough}. But shuffled labels are met "
            f"about as well ({same_rank.mse:.2g}): the prefixes have so few continuations that the rank says nothing "
            "about the labels.",
        )
    return Verdict(
        "no-obstacle",
        f"rank is no obstacle. {found[0].upper()}{found[1:]}, and {enough}. Shuffled labels are not met at that rank: "
        f"their error is {same_rank.mse:.2g}.",
    )


def _describe_cost(bound: EmbeddingBound, backbone: Backbone) -> str:
    several = len(bound.attributes) > 1
    named = ", ".join(
        f"{quote_prefix(row)} ({f'{row.attribute}, ' if several else ''}{row.mse:.2g})"
        for row in bound.rows[:NAMED_PREFIXES]
    )
    more = bound.costly_rows - NAMED_PREFIXES
    weighted = "" if bound.weighted_loss is None else f" ({bound.weighted_loss:.2g} of the training loss)"
    return (
        f"frozen embeddings cost at least {bound.mse_omega2:.2g} over Ω_2{weighted}, at these prefixes: {named}"
        f"{f' and {more} more' if more > 0 else ''}. No RAD-Q with a linear head over {backbone.name} has a smaller "
        "error; an mlp head and RAD-V are not bound by it."
    )


def quote_prefix(row: BoundedRow) -> str:
    """The end of a prefix in quotes, short enough for a line."""
    text = row.prefix
    if not text:
        return "the empty prefix"
    return repr(text if len(text) <= PREFIX_CHARACTERS else "…" + text[-PREFIX_CHARACTERS:])
