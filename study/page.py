"""Write docs/results.md and its figures from the stored measurements of a study.

    python study/page.py study/measured --out docs

The page holds the results: sentences, figures, sample texts, claims with verdicts, limits. LOG.md has the rest.
"""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import tyro
from claims import (
    DEXPERTS,
    DISTILLED,
    FAILS,
    GEDI,
    GUIDES,
    HOLDS,
    LABELS,
    MARGIN,
    MISSING,
    MIXED,
    RAD_V,
    SLIGHT,
    TASKS,
    UNDECIDED,
    UNKNOWN,
    Claim,
    MeasuredSweep,
    Study,
    cost,
    counts_by_rows,
    find_claims,
    join_counts,
    read_study,
    signed,
    time_ratios,
)

from radq.errors import RadqError
from radq.evaluation.estimates import Estimate
from radq.files import atomic_file, atomic_folder
from radq.report.plots import Plot, plot_by_candidates
from radq.report.results import NAN
from radq.report.tables import interval, number

FIGURES = {"sentiment": "neutral", "detox": "nontoxic"}  # the prompts whose curves are drawn
SHOWN_BETA = {"sentiment": 35.0, "detox": -100.0}  # of distilled RAD-Q, in the first sentences
TOP_K = 20  # the number of candidates that the sentences are about
SHOWN_K = (20, 100)  # the numbers of candidates whose times are named
DIST_2 = 0.85  # the share of the base's Dist-2 at which texts count as equally varied

RANK_LIMIT = (
    "The rewards behind the ranks were multiplied in TF32, which has three digits, from one model and one draw of "
    "prefixes each. Lower cutoffs are not shown, since rounding may exceed them; how much of the counts at 0.001 is "
    "rounding was not measured."
)
EXPRESSIVITY_LIMIT = (
    "The error on data of full rank comes from the third setting that was tried, with one seed, in TF32. Training of "
    "RAD-V stopped at its first check below 5e-6, and its error rose and fell between checks: it reached that error, "
    "and need not stay there. Nothing was tuned for RAD-Q, so its error is no lower limit "
    "([rank.md](rank.md))."
)


def main(study: tyro.conf.Positional[Path], out: Path = Path("docs")) -> None:
    """Write results.md and results/.

    Args:
        study: folder of the study, such as study/measured.
        out: folder of the page.
    """
    found = read_study(study)
    plots = draw_figures(found)
    write_page(out, "results", compose(found, plots), plots)


def compose(study: Study, plots: Sequence[Plot]) -> str:
    claims = find_claims(study)
    parts = [
        "<!-- Written by study/page.py from study/measured: change those, not this file. -->\n",
        "# Results\n",
        _introduction(),
        "".join(item(f"{place}.", sentence) for place, sentence in enumerate(_sentences(study), 1)),
        *(f"![{plot.title}](results/{plot.name}.svg)\n" for plot in plots),
        f"## Five texts\n\n{_texts(study)}",
        f"## The paper's claims\n\n{_claims(claims)}",
        f"## Limits\n\n{_limits(study)}",
    ]
    return "\n".join(parts)


def _introduction() -> str:
    text = (
        "The claims of [the paper](https://openreview.net/forum?id=cjRsEGLT8B), measured with small models: "
        "SmolLM2-135M-Instruct steered by reward models over its first 12 layers, 1,000 prompts of each kind, 25 "
        "samples of 20 tokens each, judged by models that saw none of the reward models' training data. Toxicity is "
        "the average over prompts of the most toxic of 25 samples, sentiment the share of positive samples. "
        f"Guides are compared at equal perplexity, in the sentences at k = {TOP_K} with positive numbers where the "
        "first guide is better; brackets hold 95% intervals. "
        "[study](../study/README.md) has the code and the measurements, "
        "[LOG.md](../study/LOG.md) the settings, more tables and how the runs went."
    )
    return wrapped(text)


# --- markdown and files of both pages ---


def item(mark: str, text: str) -> str:
    return wrapped(f"{mark} {text}", indent=" " * (len(mark) + 1))


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def plain(text: str) -> str:
    """Text on one line that markdown leaves as it is."""
    return re.sub(r"([\\`*_|<])", r"\\\1", " ".join(text.split()))


def write_page(out: Path, name: str, text: str, plots: Sequence[Plot]) -> None:
    """Write a page with its figures, and delete the figures of an earlier study."""
    with atomic_folder(out / name, replaces=["*.svg"]) as temporary:
        for plot in plots:
            (temporary / f"{plot.name}.svg").write_text(plot.themed, encoding="utf-8")
    with atomic_file(out / f"{name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")


# --- figures ---


def draw_figures(study: Study) -> list[Plot]:
    """One trade-off plot for each task, with a panel for each k."""
    plots = []
    for name, group in FIGURES.items():
        sweep = study.sweeps.get(name) or MeasuredSweep([], [])
        results = [r for r in sweep.results if r.group == group and (r.unguided or r.guide in GUIDES)]
        title = f"{TASKS[name].name}, {group} prompts: attribute against perplexity"
        plots.append(plot_by_candidates(f"{name}-{group}", title, results, TASKS[name].metric))
    return [plot for plot in plots if plot is not None]


# --- sentences ---


def _sentences(study: Study) -> list[str]:
    return [
        f"**Sentiment.** {_defaults(study, 'sentiment')}",
        f"**Toxicity.** {_defaults(study, 'detox')}",
        f"**RAD-Q and RAD-V.** {_compare(study, 'Distilled RAD-Q', DISTILLED, 'RAD-V', RAD_V)}.",
        f"**Without a teacher.** {_compare(study, 'RAD-Q trained on labels', LABELS, 'RAD-V', RAD_V)}.",
        f"**DExperts.** {_compare(study, 'Distilled RAD-Q', DISTILLED, 'DExperts', DEXPERTS)}.",
        f"**GeDi.** {_compare(study, 'Distilled RAD-Q', DISTILLED, 'GeDi', GEDI)}; GeDi's texts are less varied: "
        f"where Dist-2 is {DIST_2:g} of the base's (neutral prompts), {_rate_at_equal_variety(study, DISTILLED)} of "
        f"RAD-Q's samples are positive and {_rate_at_equal_variety(study, GEDI)} of GeDi's.",
        f"**Rank.** {_ranks(study)}",
        f"**Cost.** {_costs(study)}",
    ]


def _defaults(study: Study, name: str) -> str:
    """The effect of distilled RAD-Q at one β."""
    sweep, group, metric = study.sweeps.get(name, MeasuredSweep([], [])), FIGURES[name], TASKS[name].metric
    beta = SHOWN_BETA[name]
    (before, fluency), (after, cost_of_it) = (
        [_metric(sweep, guide, group, one, strength) for one in (metric, "perplexity")]
        for guide, strength in (("none", None), (DISTILLED, abs(beta)))
    )
    if not isfinite(after.value):
        return "Not run."
    what = "share of positive samples" if name == "sentiment" else "average maximal toxicity"
    return (
        f"At β = {_beta(beta)} distilled RAD-Q changes the {what} on {group} prompts from "
        f"{_value(before)} to {_value(after)}, at {cost_of_it.value / fluency.value:.2f} times the base's perplexity."
    )


def _metric(sweep: MeasuredSweep, guide: str, group: str, metric: str, beta: float | None) -> Estimate:
    return next((r.metrics[metric] for r in sweep.select(guide, group, TOP_K, beta) if metric in r.metrics), UNKNOWN)


def _compare(study: Study, first_name: str, first: str, second_name: str, second: str) -> str:
    """First guide against second in every task, in words; gains are positive where the first is better."""
    places: dict[str, list[str]] = {}
    for name, sweep in study.sweeps.items():
        found = sweep.compare(first, second, TASKS[name].metric)
        for group in (group for group in sweep.groups if (group, TOP_K) in found):
            gains = {k: TASKS[name].gain(found[group, k]) for k in sweep.top_ks if (group, k) in found}
            place = TASKS[name].name + (f" on {group} prompts" if len(sweep.groups) > 1 else "")
            places.setdefault(_standing(gains[TOP_K]), []).append(f"{place} ({_gains(gains)})")
    parts = [f"{_stands(standing, second_name)} in {', in '.join(where)}" for standing, where in places.items()]
    return f"{first_name} {'; it '.join(parts) or f'was not compared with {second_name}'}"


def _standing(gain: Estimate) -> str:
    if not isfinite(gain.value):
        return "never as fluent"
    return "better" if gain.low > 0 else "worse" if gain.high < 0 else "not told apart"


def _stands(standing: str, other: str) -> str:
    words = {"never as fluent": "never has the perplexity of", "not told apart": "cannot be told from"}
    return f"{words.get(standing, f'is {standing} than')} {other}"


def _gains(gains: dict[int | None, Estimate]) -> str:
    """The gain at TOP_K, and those at other k where the guides stand differently."""
    here = gains[TOP_K]
    differing = {k: gain for k, gain in gains.items() if _standing(gain) != _standing(here)}
    return signed(here) + "".join(f"; at k = {k} {_standing(gain)}: {signed(gain)}" for k, gain in differing.items())


def _rate_at_equal_variety(study: Study, guide: str) -> str:
    """The share of positive samples where a guide's Dist-2 crosses DIST_2 of the base's, by straight lines."""
    sweep, group, metric = study.sweeps.get("sentiment", MeasuredSweep([], [])), FIGURES["sentiment"], "dist_2"
    base = _metric(sweep, "none", group, metric, None).value
    results = sweep.select(guide, group, TOP_K)
    points = sorted((r.metrics[metric].value / base, r.metrics[TASKS["sentiment"].metric].value) for r in results)
    if not points:
        return number(NAN)
    ratios, rates = np.array(points).T
    return number(float(np.interp(np.log(DIST_2), np.log(ratios), rates, left=NAN, right=NAN)))


def _ranks(study: Study) -> str:
    """The singular values of one attribute (the table has both), and the errors on data of full rank."""
    attributes = [name for name in ("sentiment", "toxicity") if {f"{name}-v", f"{name}-q"} <= study.ranks.keys()]
    ranks = _ranks_of(study, attributes[0]) if attributes else "The ranks of RAD-V and RAD-Q were not measured."
    errors = " and ".join(f"{study.expressivity[k]:.2g} for RAD-{k.upper()}" for k in "vq" if k in study.expressivity)
    fit = f"{errors}, with the caveats below" if errors else MISSING
    return f"{ranks} On constructed data of full rank the error is {fit}."


def _ranks_of(study: Study, attribute: str) -> str:
    of_v, of_q = (study.ranks[f"{attribute}-{kind}"] for kind in "vq")
    (rows, counts), (_, others) = (max(counts_by_rows(document).items()) for document in (of_v, of_q))
    d = of_v["hidden_size"]
    beyond = [f"{count} is more than d = {d}" for count in counts.values() if count > d]
    return (
        f"The rewards of {attribute} after {rows:,} prefixes have {join_counts(counts)} singular values above "
        f"{' / '.join(counts)} times the largest with RAD-V{f' ({beyond[-1]})' if beyond else ''}, "
        f"{join_counts(others)} with RAD-Q, whose limit is d."
    )


def _costs(study: Study) -> str:
    sweep = study.sweeps.get("detox", MeasuredSweep([], []))
    batch = max((batch for _, _, batch in study.times), default=0)
    ratios = [
        f"{number(ratio.value)} times RAD-Q's time at k = {k}"
        for k, ratio in time_ratios(study, batch).items()
        if k in SHOWN_K
    ]
    tokens = " and ".join(number(cost(sweep, guide, TOP_K, "expert_tokens_per_token")) for guide in (DISTILLED, RAD_V))
    return (
        f"Per generated token RAD-Q and RAD-V read {tokens} tokens (k = {TOP_K}); on two CPU cores with a batch of "
        f"{batch}, RAD-V takes {' and '.join(ratios) or 'not run'}."
    )


def _value(estimate: Estimate) -> str:
    return f"{number(estimate.value)} {interval(estimate)}"


def _beta(beta: float) -> str:
    return f"{beta:g}".replace("-", "−")


# --- texts, claims, limits ---


def _texts(study: Study) -> str:
    """Prompts with the unguided and the guided continuation side by side."""
    introduction = (
        "The first sample of the first prompts, not selected: seed 0, k = 20, the readouts that radq ships at their "
        "default β.\n\n"
    )
    rows = [
        [
            f"{row['attribute']}, {_beta(row['beta'])}",
            *(plain(row[n]) for n in ("prompt", "unguided", "guided")),
        ]
        for row in study.samples
    ]
    return introduction + markdown_table(["attribute, β", "prompt", "unguided", "guided"], rows)


def _claims(claims: Sequence[Claim]) -> str:
    words = Counter(claim.word for claim in claims)
    counts = ", ".join(f"{words[word]} × {word}" for word in (HOLDS, FAILS, MIXED, UNDECIDED, MISSING) if words[word])
    against = sum(any(finding.verdict.against for finding in claim.findings) for claim in claims)
    text = (
        f"Of {len(claims)} lines: {counts}. In {against} of them a claim holds in some setting by the margin alone, "
        "although the first is worse. Verdicts are computed by the rules of "
        "[claims.py](../study/claims.py). Unless said otherwise, the numbers are differences at equal "
        "perplexity, first guide minus second: less toxicity and more sentiment are better."
    )
    rows = [[claim.text, claim.subject.removesuffix(" prompts"), claim.verdict, _measured(claim)] for claim in claims]
    return f"{wrapped(text)}\n{markdown_table(['claim', 'where', 'verdict', 'measured'], rows)}"


def _measured(claim: Claim) -> str:
    """The findings in one cell: of many settings the first and the last."""
    found = claim.findings if len(claim.findings) <= 2 else [claim.findings[0], claim.findings[-1]]
    return "; ".join(f"{finding.setting}: {finding.measured or MISSING}" for finding in found) or "–"


def _limits(study: Study) -> str:
    judges = [
        f"{name} {number(one['metrics']['auc'])}"
        for name, one in study.judges.items()
        if "auc" in one.get("metrics", {})
    ]
    points = [
        "Base, reward models and data are smaller than the paper's, and the judges differ: a claim that fails here may "
        "hold there.",
        "Intervals are over prompts. Each model was trained once, so they do not include the effect of another seed.",
        "About one 95% interval in twenty misses; nothing corrects for the number of comparisons.",
        *([RANK_LIMIT] if any(document.get("tf32", True) for document in study.ranks.values()) else []),
        *([EXPRESSIVITY_LIMIT] if study.expressivity else []),
        f"The margins ({MARGIN} for no difference, {SLIGHT} for a slight one) are chosen here; the paper has none.",
        f"Judges are models that err, and guidance may exploit their errors. AUC on unseen texts: {', '.join(judges)}.",
        "Perplexity does not see that texts become alike. GeDi's filter leaves the base few tokens to choose from; at "
        "equal Dist-2 or MAUVE its lead is smaller or gone ([LOG.md](../study/LOG.md)).",
    ]
    return "".join(item("-", point) for point in points)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except RadqError as error:
        sys.exit(f"error: {error}")
