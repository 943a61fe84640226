"""An evaluation in one call, for notebooks: prompts under several guides, judged and compared with the unguided texts.

    found = radq.evaluate(
        lm,
        tokenizer,
        ["The hotel that we booked was", "The film was"],
        guides={"strong": "embedded:sentiment=strong"},
        judges={"sentiment": "linear:embedded:sentiment"},
    )
    found         # a table in a notebook
    found.plot()  # each judge against perplexity

`radq eval` does the same for grids of settings in files, with resuming.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends
from radq.decoding.generate import generate
from radq.errors import OptionError, require_package
from radq.evaluation.estimates import Bootstrap, Estimate
from radq.evaluation.metrics import ATTRIBUTE_METRICS, check_metric, metric_and_judge
from radq.evaluation.sweep.config import UNGUIDED, SweepCell
from radq.evaluation.sweep.generate import measure_ends
from radq.evaluation.sweep.measure import ENDS, Estimates, Instruments, MeasuredCell
from radq.guides.base import Guide
from radq.guides.spec import GuideSpec, find_base, find_budget
from radq.judges.base import Judge
from radq.judges.models import load_judge, to_unit
from radq.models.loading import Wrappable
from radq.report.plots import COLOURS, INK, MARKERS, PANEL_HEIGHT, Plot, drawing, error_bars, render
from radq.report.results import NAN
from radq.settings import renamed

ENDINGS = {"value": "", "low": " low", "high": " high"}  # of names in a data frame
PLAIN_METRICS = ("corpus_perplexity", "kl", "dist_2", "repetition", *ENDS)


@dataclass(frozen=True)
class EvaluatedGuide:
    """The texts of a guide, its metrics, and their changes from the unguided base model."""

    name: str
    texts: list[list[str]]  # the continuations of each prompt
    metrics: Estimates
    changes: Estimates = field(default_factory=dict)
    kl_budget: float | None = None  # of each token; None for none, and for the unguided base model


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`: the unguided base model first, then each guide."""

    prompts: list[str]
    guides: list[EvaluatedGuide]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each guide, with its metrics and the ends of their intervals."""
        return [
            {"guide": guide.name, "kl_budget": guide.kl_budget}
            | {name + end: metric[key] for name, metric in guide.metrics.items() for key, end in ENDINGS.items()}
            for guide in self.guides
        ]

    def to_pandas(self) -> Any:
        """The rows as a data frame with a line for each guide."""
        return require_package("pandas", "eval").DataFrame(self.rows).set_index("guide")

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table)

    def _repr_html_(self) -> str:
        head, *body = self._table()
        lines = ["<table><thead><tr>", *(f"<th>{escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
        for row in body:
            lines += ["<tr>", *(f"<td>{escape(cell)}</td>" for cell in row), "</tr>"]
        return "".join([*lines, "</tbody></table>"])

    def _table(self) -> list[list[str]]:
        table = [["guide", *self.guides[0].metrics, "kl_budget"]]
        for guide in self.guides:
            budget = "–" if guide.kl_budget is None else f"{guide.kl_budget:g}"
            table.append([guide.name, *map(_show, guide.metrics.values()), budget])
        return table

    def plot(self) -> Plot:
        """Plot each metric of a judge against perplexity, with intervals; a notebook shows the result."""
        judged = [name for name in self.guides[0].metrics if metric_and_judge(name)[0] in ATTRIBUTE_METRICS]
        if not judged:
            raise OptionError("there is no judge whose scores could be plotted.", "give judges to evaluate.")
        with drawing("evaluation") as figure:
            panels = figure.subplots(len(judged), 1, squeeze=False, sharex=True)[:, 0]
            for axes, name in zip(panels, judged, strict=True):
                axes.set_ylabel(name)
                for number, guide in enumerate(self.guides):
                    x, y = (_read_estimate(guide.metrics[metric]) for metric in ("corpus_perplexity", name))
                    look = {"color": INK if number == 0 else COLOURS[(number - 1) % len(COLOURS)], "capsize": 3}
                    look |= {"marker": MARKERS[number % len(MARKERS)], "ls": "", "label": guide.name}
                    if isfinite(x.value) and isfinite(y.value):
                        axes.errorbar(x.value, y.value, xerr=error_bars([x]), yerr=error_bars([y]), **look)
            panels[-1].set_xlabel("perplexity under the base model (← more fluent)")
            panels[0].legend()
            figure.set_size_inches(6.4, PANEL_HEIGHT * len(judged))
            return render(figure, "evaluation", f"{', '.join(judged)} against perplexity")


def _show(metric: Mapping[str, float | None]) -> str:
    value, low, high = metric["value"], metric["low"], metric["high"]
    if value is None:
        return "–"
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} ({low:.3g} to {high:.3g})"


def _read_estimate(metric: Mapping[str, float | None]) -> Estimate:
    value, low, high = (NAN if (end := metric[name]) is None else end for name in ENDINGS)
    return Estimate(value, low, high)


@renamed(num_samples="samples")
def evaluate(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    guides: Mapping[str, Guide | str],
    judges: Mapping[str, Judge | str],
    *,
    judge_metrics: Sequence[str] = ("mean_score",),
    reads: Literal["continuation", "text"] = "continuation",
    samples: int = 5,
    max_new_tokens: int = 20,
    top_k: int | None = 20,
    top_p: float | None = None,
    kl_budget: float | Literal["auto"] | None = "auto",
    ends: Ends = "base",
    seed: int = 0,
    batch_size: int | None = None,
    resamples: int = 1000,
    progress: bool = False,
) -> Evaluation:
    """Continue prompts without a guide and under each guide, judge the texts, and compute metrics with intervals.

    The metric kl is the mean of `Generation.kl` over all tokens: the divergence from unguided texts with the same
    candidates, so that of the unguided texts is 0. The metric of `radq eval` counts what top_k and top_p take, too.

    Args:
        guides: guides by name, as objects or as texts such as "embedded:sentiment=strong".
        judges: judges by name, as objects or as texts such as "linear:embedded:sentiment".
        judge_metrics: the metrics of their scores, such as mean_score, positive_rate or avg_max.
        reads: what judges read: continuations, or prompts with continuations.
        kl_budget: the KL budget of each token, None for none; "auto" is that of `radq.generate`, or for calibrated
            strengths the one under which they were measured. Each guide of the result has the budget that was taken.
        ends: what decides when a guided text ends, see `Steering`.
        resamples: the number of resamples of the prompts, for the intervals.
    """
    for name in judge_metrics:
        check_metric(name)
        if name not in ATTRIBUTE_METRICS or name == "win_rate":
            raise OptionError(
                f"{name!r} is no metric of a judge's scores.",
                "choose mean_score, avg_max, positive_rate or toxic_rate.",
            )
    if not prompts or UNGUIDED in guides:
        reason = "there are no prompts" if not prompts else f"a guide cannot be named {UNGUIDED!r}"
        raise OptionError(f"{reason}.", "give one or more prompts, and other names.")
    device = str(lm.device)
    loaded = {name: load_judge(one, device) if isinstance(one, str) else one for name, one in judges.items()}
    instruments = Instruments({name: (to_unit(judge), reads) for name, judge in loaded.items()})
    judged = [f"{metric}[{name}]" for name in judges for metric in judge_metrics]
    asked = ([*judged, *PLAIN_METRICS], range(len(prompts)), Bootstrap(resamples))
    options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
    options |= {"samples": samples, "batch_size": batch_size, "progress": progress}
    found: list[EvaluatedGuide] = []
    unguided: MeasuredCell | None = None
    for name, guide in {UNGUIDED: None, **guides}.items():
        written = [GuideSpec.parse(guide, find_base(lm))] if isinstance(guide, str) else []
        steer: Any = written[0].load(device, lm=lm) if written else guide
        budget = find_budget(written, DEFAULT_KL_BUDGET) if kl_budget == "auto" else kl_budget
        drawn = generate(lm, tokenizer, prompts, steer, **options, kl_budget=budget, ends=ends)
        cell = _measure(SweepCell(name, None, top_k, top_p, None, seed), drawn, prompts, instruments, progress)
        found.append(EvaluatedGuide(name, cell.texts, *cell.estimate(*asked, unguided), drawn[0].kl_budget))
        unguided = unguided or cell
    return Evaluation(list(prompts), found)


def _measure(
    cell: SweepCell, drawn: Sequence[Any], prompts: Sequence[str], instruments: Instruments, progress: bool
) -> MeasuredCell:
    """Judge the texts of a guide; their likelihoods and divergences are those that decoding has noted."""
    each = len(drawn) // len(prompts)
    rows = [drawn[first : first + each] for first in range(0, len(drawn), each)]
    texts = [[one.text for one in row] for row in rows]
    blank = np.array([[not text.strip() for text in row] for row in texts])
    arrays = instruments.measure(prompts, texts, progress)
    for name, field_name in (("nll", "nll"), ("kl", "kl"), ("tokens", "num_text_tokens")):
        values = np.array([[getattr(one, field_name) for one in row] for row in rows])
        arrays[name] = np.where(blank, np.zeros_like(values), values)
    # All texts have the same candidates, so the divergence is that of the guide alone, which is 0 without one.
    arrays["drawn_nll"] = arrays["nll"] - arrays.pop("kl") * arrays["tokens"]
    ends = [measure_ends(row) for row in rows]
    arrays |= {name: np.array([one[name] for one in ends]) for name in ENDS}
    return MeasuredCell(cell, texts, arrays)
