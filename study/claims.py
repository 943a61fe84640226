"""The stored measurements of a study, and the claims of the paper, each with a verdict that fixed rules compute.

sweeps/detox-k20, sentiment-k20, …   run folders of `radq eval`
judges/NAME.json                     quality of a judge: {metrics: {spearman, auc, accuracy}, …}
rank/NAME.json                       output of `radq rank model --json`: toxicity-v, toxicity-q, …
expressivity/v.txt, q.txt            output of recipes/expressivity.py
timing.json                          times of `radq bench`, as run.py keeps them
samples.jsonl                        {attribute, prompt, beta, unguided, guided} a line
models/NAME.json, mauve.jsonl, pieces.jsonl: for LOG.md; not read here

A rule takes a gain with its 95% interval and says whether a claim holds. The gain of a comparison is a difference at
equal perplexity, positive where the first guide is better than the second. Where the whole interval is on one side of
0, the verdict says "better" or "worse", also where a margin decides that the claim holds.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any

from radq.errors import DataError, OptionError
from radq.evaluation.estimates import Estimate
from radq.files import read_lines
from radq.rank.numerical import count_above
from radq.report.results import NAN, Result, read_runs
from radq.report.tables import interval, number

UNKNOWN = Estimate(NAN, NAN, NAN)
HOLDS, FAILS, UNDECIDED, MISSING, MIXED = "holds", "does not hold here", "undecided", "not run", "mixed"
MARGIN = 0.03  # differences of a rate or score in [0, 1] below this count as none
SLIGHT = 0.05  # differences up to this count as slight
FITS, FITS_NOT = 5e-6, 1e-4  # the paper's errors of RAD-V and RAD-Q on data of full rank
LOW_RANK = 0.95  # a rank above this share of d is not called low, although the paper would call it so
RANK_SHARES = (1e-2, 1e-3)  # more cutoffs of the rank, as shares of σ_1; below them lies the rounding of TF32
EXPRESSIVITY_CAVEATS = "third setting tried, first check below the threshold, nothing tuned for RAD-Q"


# --- measurements ---


@dataclass(frozen=True)
class MeasuredSweep:
    results: list[Result]
    differences: list[dict[str, Any]]  # lines of differences.jsonl at equal perplexity

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(result.group for result in self.results))

    @property
    def top_ks(self) -> list[int | None]:
        return sorted({result.top_k for result in self.results}, key=lambda k: k or 0)

    def compare(self, first: str, second: str, metric: str) -> dict[tuple[str, int | None], Estimate]:
        """First guide minus second at equal perplexity, by group of prompts and top_k."""
        found = {}
        for row in self.differences:
            if row["metric"] == metric and {row["first"], row["second"]} == {first, second}:
                estimate = _read_estimate(row)
                found[row["group"], row["top_k"]] = estimate if row["first"] == first else turn(estimate)
        return found

    def select(self, guide: str, group: str, top_k: int | None, beta: float | None = None) -> list[Result]:
        """The results of a guide, at one beta or at all of them."""
        here = [r for r in self.results if (r.guide, r.group, r.top_k) == (guide, group, top_k)]
        return [r for r in here if beta is None or r.beta == beta]


@dataclass(frozen=True)
class Study:
    """All that was measured; parts that were not run are empty."""

    sweeps: dict[str, MeasuredSweep]  # detox and sentiment, where any cell was measured
    judges: dict[str, dict[str, Any]]
    ranks: dict[str, dict[str, Any]]
    times: dict[tuple[str, int | None, int], Estimate]  # milliseconds per token by rad-v, rad-q or none, k and batch
    expressivity: dict[str, float]  # mean squared error of "v" and "q"
    samples: list[dict[str, Any]]


def read_study(folder: Path) -> Study:
    if not folder.is_dir():
        raise OptionError(f"there is no folder {str(folder)!r}.", "give the folder of a study.")
    sweeps = {name: _read_sweep(folder / "sweeps", name) for name in TASKS}
    timed = [row for document in _read_documents(folder, "timing.json").values() for row in document["rows"]]
    return Study(
        sweeps={name: sweep for name, sweep in sweeps.items() if sweep.results},
        judges=_read_documents(folder, "judges/*.json"),
        ranks=_read_documents(folder, "rank/*.json"),
        times={
            (row["guide"], row.get("k"), row["batch"]): _read_estimate(row, "milliseconds_per_token") for row in timed
        },
        expressivity=_read_expressivity(folder / "expressivity"),
        samples=_read_optional_lines(folder / "samples.jsonl"),
    )


def _read_sweep(folder: Path, name: str) -> MeasuredSweep:
    """All runs of a sweep (NAME-k20, NAME-k40, …) of which at least one cell has its metrics, as one."""
    files = [file for file in sorted(folder.glob(f"{name}*/metrics.jsonl")) if b"\n" in file.read_bytes()]
    results = [result for file in files for result in read_runs([file.parent])[0].results]
    rows = [row for file in files for row in _read_optional_lines(file.with_name("differences.jsonl"))]
    return MeasuredSweep(results, [row for row in rows if row.get("axis", "perplexity") == "perplexity"])


def _read_estimate(row: dict[str, Any], value: str = "value") -> Estimate:
    return Estimate(*(NAN if row.get(name) is None else float(row[name]) for name in (value, "low", "high")))


def _read_expressivity(folder: Path) -> dict[str, float]:
    """The error in the last line that recipes/expressivity.py prints, by kind of reward model."""
    errors = {}
    for file in folder.glob("[vq].txt"):
        found = re.findall(r"^RAD-[VQ], n = .*: MSE (\S+) over", file.read_text(encoding="utf-8"), re.MULTILINE)
        errors |= {file.stem: float(found[-1])} if found else {}
    return errors


def _read_documents(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    documents = {}
    for file in sorted(folder.glob(pattern)):
        try:
            documents[file.stem] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{str(file)!r} is damaged: {error}.", "make it anew.") from error
    return documents


def _read_optional_lines(file: Path) -> list[dict[str, Any]]:
    return list(read_lines(file)) if file.is_file() else []


# --- claims ---


@dataclass(frozen=True)
class Verdict:
    word: str
    reason: str = ""
    against: bool = False  # whether a margin alone decides: the whole interval is on the worse side of 0


@dataclass(frozen=True)
class Finding:
    setting: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    text: str
    subject: str
    findings: list[Finding]
    caveats: str = ""

    @property
    def word(self) -> str:
        """The verdict in one word, of the settings that were run."""
        words = {finding.verdict.word for finding in self._run}
        return MISSING if not words else words.pop() if len(words) == 1 else MIXED

    @property
    def verdict(self) -> str:
        """The word, and the reason for every setting."""
        run, count = self._run, len(self.findings)
        if not run:
            return MISSING
        word = f"{self.word}, with caveats ({self.caveats})" if self.caveats else self.word
        missing = f" ({count - len(run)} of {count} not run)" if len(run) < count else ""
        return f"{word}: {_join_reasons(run)}{missing}"

    @property
    def _run(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict.word != MISSING]


def find_claims(study: Study) -> list[Claim]:
    return [
        *(claim for comparison in COMPARISONS for claim in _compare(study, comparison)),
        *_low_ranks(study),
        _regularised_rank(study),
        _expressivity(study),
        _calls(study),
        *_times(study),
    ]


def _join_reasons(findings: Sequence[Finding]) -> str:
    """The reasons, each with its settings where there are several, and with its verdict where these differ."""
    settings: dict[Verdict, list[str]] = {}
    for finding in findings:
        settings.setdefault(finding.verdict, []).append(finding.setting)
    if len(settings) == 1:
        return findings[0].verdict.reason
    differ = len({verdict.word for verdict in settings}) > 1
    return "; ".join(
        f"{f'{verdict.word}, ' if differ else ''}{verdict.reason} ({_join_settings(names)})"
        for verdict, names in settings.items()
    )


def _join_settings(names: Sequence[str]) -> str:
    """Several settings as one text: k = 20 and k = 40 become k = 20, 40."""
    heads = {name.rpartition(" ")[0] for name in names}
    rest = [name.rpartition(" ")[2] for name in names[1:]] if len(heads) == 1 else names[1:]
    return ", ".join([names[0], *rest])


# --- rules ---


@dataclass(frozen=True)
class Rule:
    """A claim about a gain holds if the whole interval lies between two limits, and fails if all of it lies outside."""

    low: float
    high: float = inf

    def decide(self, gain: Estimate) -> Verdict:
        side = "better" if gain.low > 0 else "worse" if gain.high < 0 else ""
        limit = abs(self.high if side == "better" else self.low)
        if self.low < gain.low and gain.high < self.high:
            reason = f"{side}, by less than {limit}" if side and limit < inf else side or "within the margin"
            return Verdict(HOLDS, reason, against=side == "worse" and self.high > 0)
        if gain.low > self.high or gain.high < self.low:
            return Verdict(FAILS, f"{side} by more than {limit}" if limit else side)
        if side:
            return Verdict(UNDECIDED, f"{side}, perhaps by more than {limit}")
        if 0 in (self.low, self.high):
            return Verdict(UNDECIDED, "the interval includes 0")
        exceeds = f"perhaps worse by more than {limit}" if self.high == inf else f"the interval exceeds ±{limit}"
        return Verdict(UNDECIDED, exceeds)


BETTER, NO_WORSE, SLIGHTLY_WORSE, ON_PAR = Rule(0.0), Rule(-MARGIN), Rule(-SLIGHT, 0.0), Rule(-MARGIN, MARGIN)


def judge(gain: Estimate, decide: Callable[[Estimate], Verdict]) -> Verdict:
    """Apply a rule; a gain without value or interval is undecided."""
    if isnan(gain.value):
        return Verdict(UNDECIDED, "the two never have the same perplexity")
    return Verdict(UNDECIDED, "there is no interval") if isnan(gain.low + gain.high) else decide(gain)


def above_one(ratio: Estimate) -> Verdict:
    """Decides from the ratio of RAD-V's time to RAD-Q's whether RAD-Q is faster."""
    if ratio.low > 1:
        return Verdict(HOLDS, "faster")
    return Verdict(FAILS, "slower") if ratio.high < 1 else Verdict(UNDECIDED, "the interval includes 1")


def low_rank(counts: Sequence[int], num_rows: int, hidden_size: int) -> Verdict:
    """Holds if each cutoff counts at most LOW_RANK · d values, fails if each counts d or more, otherwise is undecided.

    A matrix with no more than d rows decides nothing.
    """
    fewest, most = min(counts), max(counts)
    if fewest >= hidden_size:
        return Verdict(FAILS, "d or more at every cutoff")
    if num_rows <= hidden_size:
        return Verdict(UNDECIDED, f"{num_rows} rows say nothing about ranks above {num_rows}")
    reason = f"{fewest / hidden_size:.2f} to {most / hidden_size:.2f} d by the cutoff"
    return Verdict(HOLDS if most <= LOW_RANK * hidden_size else UNDECIDED, reason)


def lower(counts: Sequence[int], others: Sequence[int]) -> Verdict:
    """Holds if every cutoff counts fewer values than in the other matrix, fails if every cutoff counts more."""
    pairs = list(zip(counts, others, strict=True))
    if all(count < other for count, other in pairs):
        return Verdict(HOLDS, "lower at every cutoff")
    if all(count > other for count, other in pairs):
        return Verdict(FAILS, "higher at every cutoff")
    return Verdict(UNDECIDED, "not at every cutoff")


# --- comparisons of two guides at equal perplexity ---

RAD_V, DISTILLED, LABELS, DEXPERTS, GEDI = "rad-v", "rad-q (distilled)", "rad-q (labels)", "dexperts", "gedi"
GUIDES = (DISTILLED, RAD_V, LABELS, DEXPERTS, GEDI)  # of both tasks; the others are ablations


@dataclass(frozen=True)
class Task:
    name: str
    metric: str  # the metric and judge that verdicts are about
    sign: int  # +1 where more of the metric is better, −1 where less is

    def gain(self, difference: Estimate) -> Estimate:
        return difference if self.sign > 0 else turn(difference)


def turn(estimate: Estimate) -> Estimate:
    """The estimate of the opposite difference."""
    return Estimate(-estimate.value, -estimate.high, -estimate.low)


TASKS = {
    "detox": Task("detoxification", "avg_max[toxicity]", -1),
    "sentiment": Task("sentiment", "positive_rate[sentiment]", 1),
}


@dataclass(frozen=True)
class Comparison:
    text: str
    first: str
    second: str
    rule: Rule
    sweeps: Sequence[str] = tuple(TASKS)


COMPARISONS = [
    Comparison("distilled RAD-Q follows RAD-V in detoxification", DISTILLED, RAD_V, NO_WORSE, ["detox"]),
    Comparison("distilled RAD-Q matches or beats RAD-V in sentiment", DISTILLED, RAD_V, NO_WORSE, ["sentiment"]),
    Comparison("RAD-Q trained on labels is slightly behind RAD-V", LABELS, RAD_V, SLIGHTLY_WORSE),
    Comparison("RAD-Q trained on labels is slightly behind distilled RAD-Q", LABELS, DISTILLED, SLIGHTLY_WORSE),
    Comparison("distilled RAD-Q is better than DExperts", DISTILLED, DEXPERTS, BETTER),
    Comparison("distilled RAD-Q is better than GeDi", DISTILLED, GEDI, BETTER),
    Comparison("the regulariser helps fluency", DISTILLED, "no regulariser", BETTER, ["detox"]),
    Comparison(
        "regulariser and baseline together help fluency", DISTILLED, "no regulariser no baseline", BETTER, ["detox"]
    ),
    Comparison("cross-entropy is slightly behind squared loss", "cross-entropy", LABELS, SLIGHTLY_WORSE, ["detox"]),
    Comparison("the MLP head is on par with the linear one", "mlp", LABELS, ON_PAR, ["detox"]),
]


def _compare(study: Study, comparison: Comparison) -> Iterator[Claim]:
    """One claim for each group of prompts, with one finding for each k."""
    for sweep, task in ((study.sweeps.get(name), TASKS[name]) for name in comparison.sweeps):
        if sweep is None:
            yield Claim(comparison.text, task.name, [])
            continue
        found = sweep.compare(comparison.first, comparison.second, task.metric)
        for group in sweep.groups:
            by_k = {k: found.get((group, k)) for k in sweep.top_ks}
            findings = [
                Finding(f"k = {k}", "", Verdict(MISSING))
                if difference is None
                else Finding(f"k = {k}", signed(difference), judge(task.gain(difference), comparison.rule.decide))
                for k, difference in by_k.items()
            ]
            yield Claim(comparison.text, f"{task.name}, {group} prompts", findings)


def signed(estimate: Estimate) -> str:
    return f"{number(estimate.value, '+')} {interval(estimate, '+')}".strip()


# --- rank and expressivity ---


def _low_ranks(study: Study) -> Iterator[Claim]:
    for attribute in ("toxicity", "sentiment"):
        documents = {f"RAD-{kind.upper()}": study.ranks.get(f"{attribute}-{kind}") for kind in "vq"}
        findings = [_low_rank(label, document) for label, document in documents.items()]
        known = [max(counts_by_rows(one).items())[1] for one in documents.values() if one is not None]
        subject = f"{attribute}, above {' / '.join(known[0])} σ_1" if known else attribute
        yield Claim("learned reward matrices have low numerical rank", subject, findings)


def _low_rank(label: str, document: dict[str, Any] | None) -> Finding:
    if document is None:
        return Finding(label, "", Verdict(MISSING))
    (num_rows, counts), d = max(counts_by_rows(document).items()), document["hidden_size"]
    verdict = low_rank(list(counts.values()), num_rows, d)
    return Finding(label, f"{join_counts(counts)}, N = {num_rows}, d = {d}", verdict)


def _regularised_rank(study: Study) -> Claim:
    """Compares at the largest number of rows that was measured with and without the regulariser."""
    names = ("toxicity-q", "toxicity-q-no-regulariser")
    regularised, plain = (counts_by_rows(study.ranks.get(name, {"ranks": []})) for name in names)
    findings = [
        Finding(
            f"N = {n}",
            f"{join_counts(regularised[n])}, without it {join_counts(plain[n])}",
            lower(list(regularised[n].values()), list(plain[n].values())),
        )
        for n in sorted(regularised.keys() & plain.keys())[-1:]
    ]
    return Claim("the regulariser lowers the rank", "toxicity, the same cutoffs", findings)


def counts_by_rows(document: dict[str, Any]) -> dict[int, dict[str, int]]:
    """The numbers of singular values above the cutoffs, by the number of rows and the name of the cutoff.

    Cutoffs are the paper's and RANK_SHARES of the largest singular value, the highest first.
    """
    counts = {}
    for row in document["ranks"]:
        share = row["cutoff"] / (row["spectrum"][0] or 1.0)
        found = [(share, f"{share:.2g} (the paper's)", row["rank"])]
        found += [(one.share, f"{one.share:g}", one.count) for one in count_above(row["spectrum"], RANK_SHARES)]
        counts[row["num_rows"]] = {name: count for _, name, count in sorted(found, reverse=True)}
    return counts


def join_counts(counts: dict[str, int]) -> str:
    return " / ".join(map(str, counts.values()))


def _expressivity(study: Study) -> Claim:
    findings = []
    for kind, side, limit in (("v", "below", FITS), ("q", "above", FITS_NOT)):
        error, measured, verdict = study.expressivity.get(kind), "", Verdict(MISSING)
        if error is not None:
            holds, measured = error < limit if side == "below" else error > limit, f"MSE {error:.2g}"
            verdict = Verdict(HOLDS, f"{side} {limit:g}") if holds else Verdict(FAILS, f"not {side} {limit:g}")
        findings.append(Finding(f"RAD-{kind.upper()}", measured, verdict))
    return Claim("RAD-V fits full-rank data, RAD-Q cannot", "name pairs", findings, EXPRESSIVITY_CAVEATS)


# --- cost ---


def _calls(study: Study) -> Claim:
    """How many tokens the reward model reads per generated token, from the costs of a sweep."""
    sweep = study.sweeps.get("detox") or study.sweeps.get("sentiment") or MeasuredSweep([], [])
    findings = []
    for top_k in sweep.top_ks:
        calls, tokens = (cost(sweep, DISTILLED, top_k, f"{name}_per_token") for name in ("calls", "expert_tokens"))
        of_v = cost(sweep, RAD_V, top_k, "expert_tokens_per_token")
        if not isnan(calls + tokens):
            measured = f"{number(tokens)} tokens in {number(calls)} calls; RAD-V {number(of_v)} tokens"
            verdict = Verdict(HOLDS, "1 at most") if max(calls, tokens) <= 1 else Verdict(FAILS, "more than 1")
            findings.append(Finding(f"k = {top_k}", measured, verdict))
    return Claim("RAD-Q reads one token in one call per generated token", "whatever k", findings)


def cost(sweep: MeasuredSweep, guide: str, top_k: int | None, name: str) -> float:
    """The highest cost among a guide's cells; NaN where it was not counted."""
    cells = [result for result in sweep.results if (result.guide, result.top_k) == (guide, top_k)]
    return max((result.cost[name] for result in cells if name in result.cost), default=NAN)


def _times(study: Study) -> Iterator[Claim]:
    for batch in sorted({batch for _, _, batch in study.times}) or [None]:
        findings = [
            Finding(f"k = {k}", f"× {number(ratio.value)} {interval(ratio)}".strip(), judge(ratio, above_one))
            for k, ratio in time_ratios(study, batch).items()
        ]
        subject = "RAD-V's time over RAD-Q's" + ("" if batch is None else f", batch of {batch}")
        yield Claim("RAD-Q takes less time per token than RAD-V", subject, findings)


def time_ratios(study: Study, batch: int | None) -> dict[int, Estimate]:
    """RAD-V's time over RAD-Q's by k. The interval comes from the ends of both, so it is too wide, not too narrow."""
    times = {(guide, k): time for (guide, k, of), time in study.times.items() if of == batch}
    ratios = {}
    for k in sorted(k for guide, k in times if guide == "rad-q" and k is not None and ("rad-v", k) in times):
        over, under = times["rad-v", k], times["rad-q", k]
        ratios[k] = Estimate(over.value / under.value, over.low / under.high, over.high / under.low)
    return ratios
