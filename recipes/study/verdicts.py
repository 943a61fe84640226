"""Verdicts on claims, computed from estimates by fixed rules.

A rule takes a gain, which is positive where the first guide is better than the second, with its 95% interval, and says
whether a claim holds. NaN is what was not measured.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan

from radq.evaluation.metrics import Estimate

HOLDS, FAILS, UNDECIDED, MISSING = "holds", "does not hold here", "undecided", "not run"
MIXED = "mixed"
MARGIN = 0.03  # of a rate or score in [0, 1]: smaller differences count as none
SLIGHT = 0.05  # "slightly" ends here
FITS, FITS_NOT = 5e-6, 1e-4  # the paper's errors of RAD-V and RAD-Q on data of full rank
LOW_RANK = 0.95  # of d: a rank above this share is not called low, though the paper would


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


Rule = Callable[[Estimate], Verdict]


def judge(gain: Estimate, rule: Rule) -> Verdict:
    if isnan(gain.value):
        return Verdict(UNDECIDED, "the two never have the same perplexity")
    if isnan(gain.low) or isnan(gain.high):
        return Verdict(UNDECIDED, "there is no interval")
    return rule(gain)


# --- rules ---


def better(gain: Estimate) -> Verdict:
    if gain.low > 0:
        return Verdict(HOLDS, "better")
    return Verdict(FAILS, "worse") if gain.high < 0 else Verdict(UNDECIDED, "the interval includes 0")


def no_worse(gain: Estimate) -> Verdict:
    if gain.low > -MARGIN:
        side = "better" if gain.low > 0 else "worse, by less than the margin" if gain.high < 0 else "within the margin"
        return Verdict(HOLDS, side)
    if gain.high < -MARGIN:
        return Verdict(FAILS, f"worse by more than {MARGIN}")
    return Verdict(UNDECIDED, f"perhaps worse by more than {MARGIN}")


def slightly_worse(gain: Estimate) -> Verdict:
    if gain.low > 0:
        return Verdict(FAILS, "better")
    if gain.high < -SLIGHT:
        return Verdict(FAILS, f"worse by more than {SLIGHT}")
    if gain.high >= 0:
        return Verdict(UNDECIDED, "the interval includes 0")
    if gain.low < -SLIGHT:
        return Verdict(UNDECIDED, f"worse, perhaps by more than {SLIGHT}")
    return Verdict(HOLDS, f"worse, by less than {SLIGHT}")


def on_par(gain: Estimate) -> Verdict:
    if gain.low > -MARGIN and gain.high < MARGIN:
        return Verdict(HOLDS, "within the margin")
    if gain.low > MARGIN or gain.high < -MARGIN:
        return Verdict(FAILS, f"{'better' if gain.low > 0 else 'worse'} by more than {MARGIN}")
    return Verdict(UNDECIDED, f"the interval reaches beyond ±{MARGIN}")


RULES: dict[Rule, str] = {
    no_worse: f"**no worse**: holds if all of the interval is better than {MARGIN} worse, does not hold here if all "
    "of it is worse than that, else undecided.",
    slightly_worse: f"**slightly worse**: holds if the interval lies between 0 and {SLIGHT} worse, does not hold here "
    f"if all of it is better than 0 or more than {SLIGHT} worse, else undecided.",
    better: "**better**: holds if the interval lies on the better side of 0, does not hold here if it lies on the "
    "worse side, undecided if it includes 0.",
    on_par: f"**on par**: holds if the interval lies within ±{MARGIN}, does not hold here if all of it lies outside, "
    "else undecided.",
}


# --- other numbers ---


def above_one(ratio: Estimate) -> Verdict:
    """Of the rival's time over ours."""
    if ratio.low > 1:
        return Verdict(HOLDS, "faster")
    return Verdict(FAILS, "slower") if ratio.high < 1 else Verdict(UNDECIDED, "the interval includes 1")


def low_rank(rank: int, num_rows: int, hidden_size: int) -> Verdict:
    if rank >= hidden_size:
        return Verdict(FAILS, "d or more")
    if num_rows <= hidden_size:
        return Verdict(UNDECIDED, f"{num_rows} rows say nothing about ranks above {num_rows}")
    if rank > LOW_RANK * hidden_size:
        return Verdict(UNDECIDED, f"below d, but above {LOW_RANK} d")
    return Verdict(HOLDS, f"{rank / hidden_size:.2f} d")


def lower(rank: int, other: int) -> Verdict:
    if rank == other:
        return Verdict(UNDECIDED, "the same")
    return Verdict(HOLDS, "lower") if rank < other else Verdict(FAILS, "higher")


def fits(error: float) -> Verdict:
    return Verdict(HOLDS, f"below {FITS:g}") if error < FITS else Verdict(FAILS, f"not below {FITS:g}")


def fits_not(error: float) -> Verdict:
    return Verdict(HOLDS, f"above {FITS_NOT:g}") if error > FITS_NOT else Verdict(FAILS, f"not above {FITS_NOT:g}")


# --- several at once ---


def combine(verdicts: Sequence[Verdict]) -> str:
    """One word where all that was run agree, else how many there are of each."""
    words = Counter(verdict.word for verdict in verdicts if verdict.word != MISSING)
    if not words:
        return MISSING
    missing = f" ({len(verdicts) - words.total()} of {len(verdicts)} not run)" if words.total() < len(verdicts) else ""
    if len(words) == 1:
        (word,) = words
        reasons = {verdict.reason for verdict in verdicts if verdict.word == word}
        return str(Verdict(word, reasons.pop() if len(reasons) == 1 else "")) + missing
    counts = (f"{word} in {words[word]} of {words.total()}" for word in (HOLDS, FAILS, UNDECIDED) if words[word])
    return f"{MIXED}: {', '.join(counts)}{missing}"
