"""Numbers about numbers, for training and evaluation alike."""

import numpy as np
from jaxtyping import Num
from scipy.stats import rankdata


def area_under_curve(scores: Num[np.ndarray, " n"], labels: Num[np.ndarray, " n"]) -> float:
    """The probability that a positive scores above a negative; ties count half."""
    positive = labels > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))
