"""docs/results.md and its figures from the files of a study, whole or in parts.

    python recipes/study/results.py runs/study --out docs

Verdicts are computed (verdicts.py); what has not been run yet is said to be so.
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
from verdicts import LOW_RANK, MISSING, RULES

from radq.errors import RadqError
from radq.evaluation.plots import Plot
from radq.files import whole_file, whole_folder


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
        f"## How verdicts come about\n\n{_rules()}",
        f"## What was done\n\n{describe_protocol(study)}",
        write_sections(study, claims, plots),
        write_limits(study, claims),
    ]
    return "\n".join(parts)


# --- claims ---


def _summary(claims: Sequence[Claim]) -> str:
    words = Counter(claim.verdict.split(":")[0] for claim in claims)
    counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    return (
        f"The claims of [the paper](https://openreview.net/forum?id=cjRsEGLT8B), measured by this code with small models. Of the {len(claims)} "
        f"lines below: {counts}. Numbers are differences at equal perplexity unless said otherwise, first guide minus second, with 95% intervals."
    )


def _claims_table(claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        mixed = claim.verdict.startswith("mixed")
        found = [
            f"{finding.setting}: {finding.measured or MISSING}" + (f" ({finding.verdict})" if mixed else "")
            for finding in claim.findings
        ]
        rows.append(
            [f"[{claim.text}]({anchor(claim.section)})", claim.subject, claim.verdict, "<br>".join(found) or "–"]
        )
    return markdown_table(["claim", "of", "verdict", "measured"], rows, words=4)


def _rules() -> str:
    used = dict.fromkeys(comparison.rule for comparison in COMPARISONS)
    attributes = dict.fromkeys(
        f"`{task.attribute}` ({'less' if task.sign < 0 else 'more'} is better)" for task in TASKS.values()
    )
    lines = [
        f"Of {', '.join(attributes)}: the curves of two guides over log perplexity, joined by straight lines; their mean distance over the perplexities "
        "that both reach, with an interval from resampling the prompts of both alike. At equal perplexity, a better attribute is the same "
        "as better fluency at an equal attribute.",
        *(RULES[rule] for rule in used),
        f"**Low rank**: holds if the rank at the largest N is at most {LOW_RANK} d and N is above d; does not hold here if it is d or more.",
        "**Several settings** (k, prompts): one word if all of them agree, else how many are which.",
    ]
    claims = [f"{comparison.text}: {_rule_name(RULES[comparison.rule])}" for comparison in COMPARISONS]
    return "".join(f"- {line}\n" for line in lines) + f"\nRules of the claims. {'; '.join(dict.fromkeys(claims))}.\n"


def _rule_name(description: str) -> str:
    return description.split("**")[1]


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
