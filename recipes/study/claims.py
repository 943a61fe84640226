"""The claims of the paper, each with what the study found about it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from study import Difference, MeasuredSweep, Study, letters
from verdicts import (
    FAILS,
    HOLDS,
    MISSING,
    Rule,
    Verdict,
    above_one,
    better,
    combine,
    fits,
    fits_not,
    judge,
    low_rank,
    lower,
    no_worse,
    on_par,
    slightly_worse,
)

from radq.evaluation.metrics import Estimate
from radq.report.results import NAN
from radq.report.tables import interval, number

RAD_V, DISTILLED, RESPONSES, DEXPERTS, GEDI = "rad-v", "rad-q (distilled)", "rad-q (responses)", "dexperts", "gedi"
NO_REGULARISER, NO_BASELINE = "no regulariser", "no regulariser, no baseline"
CROSS_ENTROPY, MLP = "cross-entropy", "mlp"
TRADE_OFF = (RAD_V, DISTILLED, RESPONSES, DEXPERTS, GEDI)

FOLLOWS = "Detoxification: distilled RAD-Q and RAD-V"
MATCHES = "Sentiment: distilled RAD-Q and RAD-V"
ON_RESPONSES = "RAD-Q trained on responses"
RIVALS = "DExperts and GeDi"
RANK = "Rank of the learned rewards"
REGULARISER = "Regulariser and baseline"
LOSS = "Loss and head"
EXPRESSIVITY = "Expressivity"
TIME = "Time per token"
ABLATIONS = {REGULARISER: (DISTILLED, NO_REGULARISER, NO_BASELINE), LOSS: (RESPONSES, CROSS_ENTROPY, MLP)}


@dataclass(frozen=True)
class Task:
    name: str
    attribute: str  # metric and judge that verdicts are about
    sign: int  # +1 where more of it is better

    def gain(self, difference: Estimate) -> Estimate:
        low, high = sorted([self.sign * difference.low, self.sign * difference.high])
        return Estimate(self.sign * difference.value, low, high)


TASKS = {
    "detox": Task("detoxification", "avg_max[toxicity]", -1),
    "sentiment": Task("sentiment", "positive_rate[sentiment]", 1),
}


@dataclass(frozen=True)
class Comparison:
    """A claim about two guides at equal perplexity: first against second."""

    text: str
    section: str
    sweep: str
    first: str
    second: str
    rule: Rule

    @property
    def task(self) -> Task:
        return TASKS[self.sweep]

    def judge(self, difference: Difference) -> Verdict:
        return judge(self.task.gain(difference.estimate), self.rule)


def _in_both(text: str, section: str, first: str, second: str, rule: Rule) -> list[Comparison]:
    return [Comparison(text, section, sweep, first, second, rule) for sweep in ("detox", "sentiment")]


COMPARISONS = [
    Comparison("distilled RAD-Q follows RAD-V in detoxification", FOLLOWS, "detox", DISTILLED, RAD_V, no_worse),
    Comparison("distilled RAD-Q matches or beats RAD-V in sentiment", MATCHES, "sentiment", DISTILLED, RAD_V, no_worse),
    *_in_both("RAD-Q on responses only is slightly behind RAD-V", ON_RESPONSES, RESPONSES, RAD_V, slightly_worse),
    *_in_both(
        "RAD-Q on responses only is slightly behind distilled RAD-Q", ON_RESPONSES, RESPONSES, DISTILLED, slightly_worse
    ),
    *_in_both("distilled RAD-Q is better than DExperts", RIVALS, DISTILLED, DEXPERTS, better),
    *_in_both("distilled RAD-Q is better than GeDi", RIVALS, DISTILLED, GEDI, better),
    Comparison("the regulariser helps fluency", REGULARISER, "detox", DISTILLED, NO_REGULARISER, better),
    Comparison("regulariser and baseline together help fluency", REGULARISER, "detox", DISTILLED, NO_BASELINE, better),
    Comparison(
        "cross-entropy is slightly behind squared loss", LOSS, "detox", CROSS_ENTROPY, RESPONSES, slightly_worse
    ),
    Comparison("the MLP head is on par with the linear one", LOSS, "detox", MLP, RESPONSES, on_par),
]


@dataclass(frozen=True)
class Finding:
    setting: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    text: str
    subject: str
    section: str
    findings: list[Finding]

    @property
    def verdict(self) -> str:
        return combine([finding.verdict for finding in self.findings])


def find_claims(study: Study) -> list[Claim]:
    """In the order of the sections."""
    compared = [claim for comparison in COMPARISONS for claim in _compare(study, comparison)]
    claims = [
        *compared,
        *_low_ranks(study),
        _regularised_rank(study),
        _expressivity(study),
        _calls(study),
        *_times(study),
    ]
    sections = [FOLLOWS, MATCHES, ON_RESPONSES, RIVALS, RANK, REGULARISER, LOSS, EXPRESSIVITY, TIME]
    return sorted(claims, key=lambda claim: sections.index(claim.section))


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    return "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- at equal perplexity ---


def _compare(study: Study, comparison: Comparison) -> Iterator[Claim]:
    sweep, task = study.sweeps.get(comparison.sweep), comparison.task
    if sweep is None:
        yield Claim(comparison.text, task.name, comparison.section, [])
        return
    for group in sweep.groups:
        findings = [finding for top_k in sweep.top_ks for finding in _findings(sweep, comparison, group, top_k)]
        yield Claim(comparison.text, f"{task.name}, {group} prompts", comparison.section, findings)


def _findings(sweep: MeasuredSweep, comparison: Comparison, group: str, top_k: int | None) -> list[Finding]:
    """One per seed."""
    wanted = (comparison.task.attribute, group, top_k)
    pairs = sweep.compare(comparison.first, comparison.second)
    found = [one for one in pairs if (one.metric, one.group, one.top_k) == wanted]
    if not found:
        return [Finding(f"k = {top_k}", "", Verdict(MISSING))]
    return [
        Finding(
            f"k = {top_k}, seed {one.seed}" if len(found) > 1 else f"k = {top_k}",
            signed(one.estimate),
            comparison.judge(one),
        )
        for one in found
    ]


def signed(estimate: Estimate) -> str:
    return f"{number(estimate.value, '+')} {interval(estimate, '+')}".strip()


# --- rank ---


def _low_ranks(study: Study) -> Iterator[Claim]:
    for task in ("toxicity", "sentiment"):
        findings = [_low_rank(f"RAD-{kind.upper()}", study.ranks.get(f"{task}-{kind}")) for kind in "vq"]
        yield Claim("learned reward matrices have low numerical rank", task, RANK, findings)


def _low_rank(label: str, document: dict[str, Any] | None) -> Finding:
    if document is None:
        return Finding(label, "", Verdict(MISSING))
    (num_rows, rank), d = max(ranks_by_rows(document).items()), document["hidden_size"]
    return Finding(f"{label}, N = {num_rows}", f"rank {rank}, d = {d}", low_rank(rank, num_rows, d))


def _regularised_rank(study: Study) -> Claim:
    found = [ranks_by_rows(study.ranks[n]) for n in ("toxicity-q", "toxicity-q-no-regulariser") if n in study.ranks]
    common = sorted(set.intersection(*map(set, found))) if len(found) == 2 else []
    findings = []
    if common:
        n = common[-1]
        regularised, plain = (ranks[n] for ranks in found)
        findings = [Finding(f"N = {n}", f"rank {regularised}, without it {plain}", lower(regularised, plain))]
    return Claim("the regulariser lowers the rank", "toxicity", REGULARISER, findings)


def ranks_by_rows(document: dict[str, Any]) -> dict[int, int]:
    return {row["num_rows"]: row["rank"] for row in document["ranks"]}


def _expressivity(study: Study) -> Claim:
    findings = [
        _error("RAD-V", study.expressivity.get("v"), fits),
        _error("RAD-Q", study.expressivity.get("q"), fits_not),
    ]
    return Claim("RAD-V fits full-rank data, RAD-Q cannot", "name pairs", EXPRESSIVITY, findings)


def _error(label: str, error: float | None, rule: Callable[[float], Verdict]) -> Finding:
    return Finding(label, "", Verdict(MISSING)) if error is None else Finding(label, f"MSE {error:.2g}", rule(error))


# --- cost ---


def _calls(study: Study) -> Claim:
    """What the reward model does per generated token, from the costs of a sweep."""
    sweep = study.sweeps.get("detox") or study.sweeps.get("sentiment")
    findings = []
    for top_k in sweep.top_ks if sweep is not None else []:
        assert sweep is not None
        calls, tokens = (
            _cost(sweep, DISTILLED, top_k, name) for name in ("calls_per_token", "expert_tokens_per_token")
        )
        of_v = _cost(sweep, RAD_V, top_k, "expert_tokens_per_token")
        if calls == calls and tokens == tokens:
            measured = f"{number(tokens)} tokens in {number(calls)} calls; RAD-V {number(of_v)} tokens"
            verdict = Verdict(HOLDS, "1 at most") if max(calls, tokens) <= 1 else Verdict(FAILS, "more than 1")
            findings.append(Finding(f"k = {top_k}", measured, verdict))
    return Claim("RAD-Q reads one token in one call per generated token", "whatever k", TIME, findings)


def _cost(sweep: MeasuredSweep, guide: str, top_k: int | None, name: str) -> float:
    """The highest of a guide's cells; NaN where it was not counted."""
    cells = [result for result in sweep.results if letters(result.guide) == letters(guide) and result.top_k == top_k]
    return max((result.cost[name] for result in cells if name in result.cost), default=NAN)


def _times(study: Study) -> Iterator[Claim]:
    rows = study.timing.rows if study.timing is not None else []
    for batch in sorted({row.batch for row in rows}) or [None]:
        times = {(row.guide, row.k): row.milliseconds for row in rows if row.batch == batch}
        both = sorted(k for guide, k in times if guide == "rad-q" and k is not None and ("rad-v", k) in times)
        ratios = {k: divide(times["rad-v", k], times["rad-q", k]) for k in both}
        findings = [
            Finding(f"k = {k}", f"× {number(ratio.value)} {interval(ratio)}".strip(), judge(ratio, above_one))
            for k, ratio in ratios.items()
        ]
        subject = "RAD-V's time over RAD-Q's" + ("" if batch is None else f", batch of {batch}")
        yield Claim("RAD-Q takes less time per token than RAD-V", subject, TIME, findings)


def divide(over: Estimate, under: Estimate) -> Estimate:
    """With an interval from the ends of both, which is rather too wide than too narrow."""
    return Estimate(over.value / under.value, over.low / under.high, over.high / under.low)
