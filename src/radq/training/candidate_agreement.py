"""Rewards that a teacher gives to candidates for the next token, and the agreement of a student with its teacher.

    prefixes, candidates = [[464, 2646], [1026, 318]], torch.tensor([[373, 318], [257, 407]])
    measure_candidate_agreement(student, teacher, prefixes, candidates).correlation

Guidance only changes the order of candidates by the differences between their rewards, so these are compared: rewards
minus the mean over the candidates for the same place. Axes: n prefixes or rows of candidates, p positions, k
candidates, a attributes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from radq.errors import OptionError
from radq.guides.base import Guide
from radq.models.reward import RewardModel
from radq.numerics import pad_left, pad_right
from radq.training.teacher import GuideSource, RewardSource, Teacher

UNUSED = -1  # in place of a candidate
TOKENS_PER_FORWARD = {"cpu": 8192, "cuda": 65536}  # that a teacher reads, prefixes and candidates together
WIDTH = 768  # of hidden states, up to which so many tokens are read; wider teachers read fewer, to save memory


class MarkedPrefix(NamedTuple):
    """A text that begins with a prompt, and the places in it where candidates are compared.

    At place p, candidates stand in place of tokens[p], after the tokens before it. A place may be the end of the text.
    """

    tokens: list[int]
    places: list[int]
    prompt_length: int = 0


Prefixes = Sequence[MarkedPrefix]
Candidates = Int[np.ndarray, "n p k"]

# --- rewards of a teacher ---


def score_places(teacher: Teacher, prefixes: Prefixes, candidates: Candidates) -> Float[np.ndarray, "n p k a"]:
    """Compute the teacher's rewards of the candidates at all places; 0 for those that are not used.

    One forward over each text gives all of them, but what a model does not know would change how it reads.
    """
    tokens = (token for prefix in prefixes for token in _read_part(prefix))
    highest = max(max(tokens, default=0), int(candidates.max(initial=0)))
    read = _score_texts if teacher.reads_once and highest < teacher.num_known else _score_prefixes
    return np.where((candidates == UNUSED)[..., None], np.float32(0), read(teacher, prefixes, candidates))


def _read_part(prefix: MarkedPrefix) -> list[int]:
    """The tokens before the last place of a prefix."""
    return prefix.tokens[: max(prefix.places, default=0)]


@torch.no_grad()
def _score_texts(teacher: Teacher, prefixes: Prefixes, candidates: Candidates) -> Float[np.ndarray, "n p k a"]:
    """Compute the rewards at all places by one forward over each text."""
    _, num_places, k = candidates.shape
    targets = np.zeros((*candidates.shape, len(teacher.attributes)), np.float32)
    texts = [_read_part(prefix) for prefix in prefixes]
    positions = np.array([fill(prefix.places, num_places) for prefix in prefixes])
    order = sorted((n for n, text in enumerate(texts) if text), key=lambda n: len(texts[n]))
    for rows in chunks(order, _count_rows(teacher, texts, num_places * k)):
        batch = pad_right([texts[n] for n in rows], device=teacher.device)
        tokens = candidates[rows].astype(np.int64).clip(min=0)
        places = (torch.from_numpy(values).to(teacher.device) for values in (positions[rows], tokens))
        targets[rows] = teacher.place_rewards(*batch, *places).float().cpu().numpy()
    return targets


def _score_prefixes(teacher: Teacher, prefixes: Prefixes, candidates: Candidates) -> Float[np.ndarray, "n p k a"]:
    """Compute the rewards of each place by a forward over the tokens before it."""
    places = [(n, p) for n, prefix in enumerate(prefixes) for p in range(len(prefix.places))]
    starts = [prefix.prompt_length if teacher.reads_continuations else 0 for prefix in prefixes]
    texts = [prefixes[n].tokens[starts[n] : prefixes[n].places[p]] for n, p in places]
    rows = np.array([candidates[n, p] for n, p in places]).reshape(len(places), candidates.shape[2])
    rewards = score_rows(teacher, texts, rows)
    targets = np.zeros((*candidates.shape, len(teacher.attributes)), np.float32)
    for (n, p), reward in zip(places, rewards, strict=True):
        targets[n, p] = reward
    return targets


@torch.no_grad()
def score_rows(
    teacher: Teacher, texts: Sequence[Sequence[int]], candidates: Int[np.ndarray, "n k"]
) -> Float[np.ndarray, "n k a"]:
    """Compute the teacher's rewards of candidates for the next token of each text.

    Texts of similar length are read together.
    """
    n, k = candidates.shape
    rewards = np.zeros((n, k, len(teacher.attributes)))
    for rows in chunks(sorted(range(n), key=lambda row: len(texts[row])), _count_rows(teacher, texts, k)):
        input_ids, mask = pad_left([texts[row] for row in rows], device=teacher.device)
        tokens = torch.from_numpy(candidates[rows].astype(np.int64)).clamp(min=0).to(teacher.device)
        rewards[rows] = teacher.candidate_rewards(input_ids, mask, tokens).double().cpu().numpy()
    return rewards


def _count_rows(teacher: Teacher, texts: Sequence[Sequence[int]], num_candidates: int) -> int:
    """Choose how many texts, each with so many candidates, are read together."""
    longest = max(map(len, texts), default=1)
    tokens_per_forward = TOKENS_PER_FORWARD.get(teacher.device.type, TOKENS_PER_FORWARD["cpu"])
    widths = [module.embedding_dim for module in teacher.modules() if isinstance(module, nn.Embedding)]
    wider = max(1.0, max(widths, default=WIDTH) / WIDTH)
    return max(1, int(tokens_per_forward / wider) // (longest + num_candidates))


def chunks(items: Sequence[int], size: int) -> list[list[int]]:
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def fill(places: list[int], number: int) -> list[int]:
    return places + [0] * (number - len(places))


# --- agreement ---


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
    own, wanted = (score_rows(source, prefixes, tokens) for source in sources)
    return compare_rewards(own, wanted, tokens != UNUSED)


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
    own, wanted = (_subtract_mean(rewards.astype(np.float64), used) for rewards in (student, teacher))  # (n, k, a)
    products, own_squares, wanted_squares = (
        (x * y).sum(1)
        for x, y in ((own, wanted), (own, own), (wanted, wanted))  # (n, a)
    )
    norms = np.sqrt(own_squares * wanted_squares)
    each = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    differs = wanted_squares > 0
    number = max(1, int(used.sum()))
    return CandidateAgreement(
        ((each * differs).sum(0) / differs.sum(0).clip(min=1)).tolist(),
        np.sqrt(np.square(own - wanted).sum((0, 1)) / number).tolist(),
        np.sqrt(wanted_squares.sum(0) / number).tolist(),
    )


def _subtract_mean(rewards: Float[np.ndarray, "n k a"], used: Bool[np.ndarray, "n k"]) -> Float[np.ndarray, "n k a"]:
    """Subtract the mean of each row from its rewards; those that are not used become 0."""
    counted = np.where(used[..., None], rewards, 0)
    means = counted.sum(1, keepdims=True) / used.sum(1).clip(min=1)[:, None, None]
    differences = np.where(used[..., None], counted - means, 0)
    rounding = np.abs(counted).max(1, keepdims=True, initial=0) * 1e-6  # equal rewards must not differ by rounding
    return np.where(np.abs(differences).max(1, keepdims=True, initial=0) > rounding, differences, 0)


def metrics_of(agreement: CandidateAgreement, attributes: list[str]) -> dict[str, float]:
    """Turn the agreement into metrics: means over attributes and, if there are several, the numbers of each."""
    values = {
        "candidate_correlation": agreement.correlation,
        "candidate_error": agreement.error,
        "constant_candidate_error": agreement.constant_error,
    }
    metrics = {name: float(np.mean(numbers)) for name, numbers in values.items()}
    if len(attributes) > 1:
        for name, numbers in values.items():
            metrics |= {f"{name}_{attribute}": number for attribute, number in zip(attributes, numbers, strict=True)}
    return metrics
