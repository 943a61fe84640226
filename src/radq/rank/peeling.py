"""Peeling: the order in which a matrix can be completed row by row and column by column.

In a completion of rank r, a row is a vector of r numbers, and each of its entries one linear equation for it once the
columns are known. So a row or column with at most r entries can wait until all others are done. Take all of those out,
then those that have at most r entries left, and so on. What cannot be taken out is the core, where every row and column
has more than r entries. Without a core, solving backwards meets all entries exactly, as long as the equations are
independent: for values in general position that is so, for particular ones (such as the identity) it need not be.
"""

from dataclasses import dataclass

import numpy as np

from radq.rank.matrix import Observed


@dataclass(frozen=True)
class Round:
    """Rows, or columns, taken out together, and the entries they had left."""

    of_rows: bool
    entries: np.ndarray


@dataclass(frozen=True)
class Peeling:
    rounds: list[Round]  # in the order of taking out
    core: np.ndarray  # entries that stay


def peel(observed: Observed, rank: int) -> Peeling:
    ends = (observed.rows, observed.columns)
    left = np.arange(len(observed))
    rounds: list[Round] = []
    idle, side = 0, 0
    while len(left) and idle < 2:
        members = ends[side][left]
        leaving = np.bincount(members, minlength=observed.shape[side])[members] <= rank
        if leaving.any():
            rounds.append(Round(side == 0, left[leaving]))
            left = left[~leaving]
        idle = 0 if leaving.any() else idle + 1
        side = 1 - side
    return Peeling(rounds, left)


def degeneracy(observed: Observed) -> int:
    """The smallest rank without a core: from there on, values in general position are met exactly."""
    low, high = 0, min(observed.shape)
    while low < high:
        middle = (low + high) // 2
        if len(peel(observed, middle).core):
            low = middle + 1
        else:
            high = middle
    return low
