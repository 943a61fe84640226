"""docs/results.md and its figures from the files of a study, whole or in parts.

    python recipes/study/results.py runs/study --out docs

Verdicts are computed (verdicts.py); what has not been run yet is said to be so. A study folder may hold

    sweeps/detox, sentiment              what `radq eval` writes
    mauve.jsonl                          {sweep, cell, group, value, low, high} a line
    judges/NAME.json                     {data, rows, metrics, note}
    models/NAME.json                     {command, seconds, metrics, parameters}
    rank/NAME.json                       what `radq rank model --json` prints: toxicity-v, toxicity-q, …
    expressivity/v.txt, q.txt            what recipes/expressivity.py prints
    timing.json                          {machine, base, rows: [{guide, k, batch, milliseconds_per_token, low, high}]}
    notes.md                             what those who ran it have to say
    pieces.jsonl                         {piece, command, commit, hardware, torch, transformers, seconds} a line
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from claims import COMPARISONS, TASKS, Claim, anchor, find_claims
from figures import draw_all
from protocol import describe_protocol, markdown_table
from sections import write_limits, write_sections
from study import Study, read_study
from verdicts import FAILS, FITS, FITS_NOT, HOLDS, LOW_RANK, MISSING, MIXED, RULES, UNDECIDED, Rule

from radq.errors import RadqError
from radq.files import whole_file, whole_folder
from radq.report.plots import Plot


@dataclass
class Arguments:
    study: tyro.conf.Positional[Path]
    """Folder with sweeps, judges, models, rank, timing.json and pieces.jsonl."""
    out: Path = Path("docs")
    """Folder for results.md and results/."""


def main(arguments: Arguments) -> None:
    study = read_study(arguments.study)
    plots = draw_all(study)
    _write_figures(arguments.out / "results", plots)
    with whole_file(arguments.out / "results.md") as temporary:
        temporary.write_text(write_page(study, plots, _command(arguments)), encoding="utf-8")


def write_page(study: Study, plots: dict[str, Plot], command: str) -> str:
    claims = find_claims(study)
    parts = [
        f"<!-- Written by `{command}`. Change that, or the study, and not this file. -->\n",
        "# The paper's claims, measured\n",
        f"{_summary(claims)}\n",
        _claims_table(claims),
        *([f"## Notes on this run\n\n{study.notes}\n"] if study.notes else []),
        f"## How verdicts come about\n\n{_rules()}",
        f"## What was done\n\n{describe_protocol(study)}",
        write_sections(study, claims, plots),
        write_limits(study, claims),
    ]
    return "\n".join(parts)


# --- claims ---


def _summary(claims: Sequence[Claim]) -> str:
    words = Counter(claim.verdict.partition(":")[0].partition(" (")[0] for claim in claims)
    counts = ", ".join(f"{words[word]} × {word}" for word in (HOLDS, FAILS, MIXED, UNDECIDED, MISSING) if words[word])
    failing = [f"{claim.text} ({claim.subject})" for claim in claims if claim.verdict.startswith((FAILS, MIXED))]
    plainly = f" Not, or not everywhere: {'; '.join(failing)}." if failing else ""
    return (
        "The claims of [the paper](https://openreview.net/forum?id=cjRsEGLT8B), measured by this code with small "
        f"models. The {len(claims)} lines below: {counts}.{plainly}\n\nUnless said otherwise, numbers are differences "
        "at equal perplexity, first guide minus second, of average maximal toxicity (less is better) or the rate of "
        "positive samples (more is better), with 95% intervals."
    )


def _claims_table(claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        mixed = claim.verdict.startswith(MIXED)
        found = [
            f"{finding.setting}: {finding.measured or MISSING}" + (f" ({finding.verdict})" if mixed else "")
            for finding in claim.findings
        ]
        measured = "–" if claim.verdict == MISSING else "<br>".join(found)
        rows.append([f"[{claim.text}]({anchor(claim.section)})", claim.subject, claim.verdict, measured])
    return markdown_table(["claim", "where", "verdict", "measured"], rows, words=4)


def _rules() -> str:
    attributes = dict.fromkeys(f"`{task.attribute}`" for task in TASKS.values())
    lines = [
        f"{' and '.join(attributes)}: the curves of two guides over log perplexity, joined by straight lines; their "
        "mean distance over the perplexities that both reach; an interval from resampling the prompts of both alike. "
        "Where a stronger guide always costs fluency, a better attribute at equal perplexity is also better fluency at "
        "an equal attribute.",
        *(f"{text} For: {_claims_of(rule)}." for rule, text in RULES.items()),
        f"**low rank**: holds if the rank at the largest N is at most {LOW_RANK} d and N is above d, does not hold "
        "here if it is d or more, else undecided.",
        f"**expressivity**: holds if RAD-V's error is below {FITS:g} and RAD-Q's above {FITS_NOT:g}, as in the paper.",
        "**Several settings** (values of k, models): one word if all that were run agree, else how many are which.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def _claims_of(rule: Rule) -> str:
    return "; ".join(dict.fromkeys(comparison.text for comparison in COMPARISONS if comparison.rule is rule))


# --- files ---


def _command(arguments: Arguments) -> str:
    folder = arguments.study.name if arguments.study.is_absolute() else arguments.study.as_posix()
    return f"python recipes/study/results.py {folder} --out docs"


def _write_figures(folder: Path, plots: dict[str, Plot]) -> None:
    """All of them, and none of an earlier study."""
    with whole_folder(folder) as temporary:
        for name, plot in plots.items():
            (temporary / f"{name}.svg").write_text(plot.themed, encoding="utf-8")
    for file in folder.glob("*.svg"):
        if file.stem not in plots:
            file.unlink()


if __name__ == "__main__":
    try:
        main(tyro.cli(Arguments))
    except RadqError as error:
        sys.exit(f"error: {error}")
