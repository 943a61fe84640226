"""Agreement of a student with its teacher about candidates for the next token.

    prefixes, candidates = [[464, 2646], [1026, 318]], torch.tensor([[373, 318], [257, 407]])
    measure_candidate_agreement(student, teacher, prefixes, candidates).correlation

Guidance only changes the order of candidates by the differences between their rewards, so these are compared: rewards
minus the mean over the candidates for the same place. Axes: n rows of candidates, k candidates, a attributes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.errors import OptionError
from radq.guides import Guide
from radq.models.reward import RewardModel
from radq.training.candidates import UNUSED, score_rows
from radq.training.teacher import GuideSource, RewardSource, Teacher


class CandidateAgreement(NamedTuple):
    """Agreement about differences between candidates, for each attribute."""

    correlation: list[float]  # Pearson's in each row, averaged over the rows in which the teacher's rewards differ
    error: list[float]  # root of the mean squared error of the student's differences
    constant_error: list[float]  # the same for a student to whom all candidates are equal


def measure_candidate_agreement(
    student: RewardModel | Guide,
    teacher: RewardModel | Guide,
    prefixes: Sequence[Sequence[int]],
    candidates: Int[Tensor, "n k"],
) -> CandidateAgreement:
    """Compare the rewards that student and teacher give to candidates for the next token of each prefix.

    Args:
        student, teacher: reward models with the same attributes, or guides with as many strengths.
        prefixes: token ids of n prefixes.
        candidates: k candidates for the next token of each; those below 0 are not used.
    """
    if len(prefixes) != len(candidates) or not len(prefixes):
        raise OptionError(
            f"there are {len(prefixes)} prefixes and {len(candidates)} rows of candidates.", "give a row for each."
        )
    tokens = candidates.cpu().numpy()
    sources = [_as_teacher(model) for model in (student, teacher)]
    sizes = [len(source.attributes) for source in sources]
    if sizes[0] != sizes[1]:
        raise OptionError(f"the student has {sizes[0]} attributes, the teacher {sizes[1]}.", "compare equal ones.")
    one, two = (score_rows(source, prefixes, tokens) for source in sources)
    return compare_rewards(one, two, tokens != UNUSED)


def _as_teacher(model: RewardModel | Guide) -> Teacher:
    if isinstance(model, RewardModel):
        return Teacher([[RewardSource(model)]])
    return Teacher([[GuideSource(model, [f"strength {n}" for n in range(len(model.beta))])]])


def compare_rewards(
    student: Float[np.ndarray, "n k a"], teacher: Float[np.ndarray, "n k a"], used: Bool[np.ndarray, "n k"]
) -> CandidateAgreement:
    """Measure the agreement of rewards of the same candidates, of which only those in `used` count.

    The correlation is 0 in a row where the student's rewards are all equal, and where no row of the teacher differs.
    """
    one, two = (_subtract_mean(rewards.astype(np.float64), used) for rewards in (student, teacher))  # (n, k, a)
    products, squares_one, squares_two = ((x * y).sum(1) for x, y in ((one, two), (one, one), (two, two)))  # (n, a)
    product = np.sqrt(squares_one * squares_two)
    each = np.divide(products, product, out=np.zeros_like(products), where=product > 0)
    differs = squares_two > 0
    number = max(1, int(used.sum()))
    return CandidateAgreement(
        ((each * differs).sum(0) / differs.sum(0).clip(min=1)).tolist(),
        np.sqrt(np.square(one - two).sum((0, 1)) / number).tolist(),
        np.sqrt(squares_two.sum(0) / number).tolist(),
    )


def _subtract_mean(rewards: Float[np.ndarray, "n k a"], used: Bool[np.ndarray, "n k"]) -> Float[np.ndarray, "n k a"]:
    """Subtract the mean of each row from its rewards; those that are not used become 0."""
    kept = np.where(used[..., None], rewards, 0)
    means = kept.sum(1, keepdims=True) / used.sum(1).clip(min=1)[:, None, None]
    differences = np.where(used[..., None], kept - means, 0)
    rounding = np.abs(kept).max(1, keepdims=True, initial=0) * 1e-6  # equal rewards must not differ by rounding
    return np.where(np.abs(differences).max(1, keepdims=True, initial=0) > rounding, differences, 0)


def metrics_of(found: CandidateAgreement, attributes: list[str]) -> dict[str, float]:
    """Turn the agreement into metrics: means over attributes and, if there are several, the numbers of each."""
    values = {
        "candidate_correlation": found.correlation,
        "candidate_error": found.error,
        "constant_candidate_error": found.constant_error,
    }
    metrics = {name: float(np.mean(numbers)) for name, numbers in values.items()}
    if len(attributes) > 1:
        for name, numbers in values.items():
            metrics |= {f"{name}_{attribute}": number for attribute, number in zip(attributes, numbers, strict=True)}
    return metrics
