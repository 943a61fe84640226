"""Measure the texts of a sweep: scores, likelihoods and features first, then metrics and comparisons of guides.

Scores and likelihoods of a cell are kept in measures/, one npz each, so that a killed run measures no cell twice.
metrics.jsonl has a line per cell and class of prompts, with the change of each metric from the unguided base model;
differences.jsonl has a line per pair of guides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.data.prompts import Prompt
from radq.errors import DataError, OptionError
from radq.evaluation.comparison import AXES, compare_at_equal
from radq.evaluation.estimates import Bootstrap, estimate_change
from radq.evaluation.metrics import METRICS, ScoredTexts, measure, metric_and_judge
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import UNGUIDED, WHILE_DECODING, JudgeUse, Sweep, SweepCell, list_judged
from radq.evaluation.sweep.folder import array_file, read_arrays, write_arrays
from radq.files import append_lines, atomic_file, read_lines
from radq.judges.base import CachedJudge, Judge
from radq.judges.llm import load_pair_judge, score_pairs
from radq.judges.models import load_judge, to_unit
from radq.judges.readers import Encoder, load_encoder
from radq.models.loading import load, load_config
from radq.sources.model_source import ModelSource

Estimates = dict[str, dict[str, float | None]]  # the fields of `Estimate` by metric; None for an unknown number
Samples = list[list[str]]  # the continuations of each prompt
LIKELIHOODS = ("nll", "tokens", "drawn_nll")
ENDS = ("ended", "length")  # of every text; no model is needed to measure them
SETTING = ("top_k", "top_p", "kl_budget", "seed")  # that guides share which are compared


@dataclass(frozen=True)
class MeasuredCell:
    """The continuations of a cell, and the numbers that are known about each of them."""

    cell: SweepCell
    texts: Samples
    arrays: dict[str, np.ndarray]  # scores[judge], nll, tokens, drawn_nll, ended, length: (p, n); features: (p, n, d)

    def scored_by(self, judge: str | None) -> ScoredTexts:
        """The texts with the scores of a judge, or without any."""
        scores = self.arrays[f"scores[{judge}]"] if judge else None
        return ScoredTexts(self.texts, scores, **{name: self.arrays.get(name) for name in (*LIKELIHOODS, *ENDS)})

    @property
    def known_ends(self) -> list[str]:
        """The metrics of ends, unless the texts are older than these."""
        return [name for name in ENDS if name in self.arrays]

    def estimate(
        self, keys: Sequence[str], chosen: Sequence[int], bootstrap: Bootstrap, unguided: "MeasuredCell | None" = None
    ) -> tuple[Estimates, Estimates]:
        """Compute metrics of the chosen prompts, each by its name, or as metric[judge] of a judge's scores.

        The second result are their changes from the unguided cell. MAUVE has none: it is a comparison already.
        """
        metrics, changes = {}, {}
        for key in keys:
            name, judge = metric_and_judge(key)
            metric, texts = METRICS[name], self.scored_by(judge)
            if "features" in metric.needs:
                texts = replace(texts, **{needed: self.arrays.get(needed) for needed in metric.needs})
            metrics[key] = _for_json(vars(measure([name], texts.take(chosen), bootstrap)[name]))
            if unguided is not None and metric.compute is not None:
                after, before = (metric.sums(one.take(chosen)) for one in (texts, unguided.scored_by(judge)))
                changes[key] = _for_json(vars(estimate_change(after, before, bootstrap)))
        return metrics, changes


def _for_json(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def measure_all(
    folder: Path, sweep: Sweep, prompts: list[Prompt], device: str, cache: Path | None = None, progress: bool = False
) -> list[MeasuredCell]:
    """Write measures/, metrics.jsonl and differences.jsonl for all cells whose texts are complete; return these."""
    cells = _read_complete_cells(folder, sweep, prompts)
    todo = [each for each in cells if not array_file(folder, each.cell.name).exists()]
    if todo:
        lm = None if sweep.perplexity == WHILE_DECODING else sweep.perplexity
        instruments = Instruments.load(sweep.judges, lm, device, cache, sweep.dtype, sweep.batch_size)
        texts = {each.cell: each.texts for each in cells}
        for each in tqdm(todo, desc="measuring", unit="cell", disable=not progress):
            unguided = None if each.cell.guide == UNGUIDED else texts[each.cell.reference]
            arrays = instruments.measure([prompt.text for prompt in prompts], each.texts, unguided=unguided)
            write_arrays(folder, each.cell.name, arrays | each.arrays)
    measured = _add_measures(folder, cells)
    _write_metrics(folder, sweep, prompts, measured, device, progress)
    _write_lines(folder / "differences.jsonl", compare_guides(sweep, prompts, measured))
    return measured


def read_measured_cells(folder: Path, sweep: Sweep, prompts: list[Prompt]) -> list[MeasuredCell]:
    """Read the texts, scores and likelihoods of a sweep that was measured."""
    return _add_measures(folder, _read_complete_cells(folder, sweep, prompts))


def _add_measures(folder: Path, cells: list[MeasuredCell]) -> list[MeasuredCell]:
    return [replace(each, arrays=read_arrays(folder, each.cell.name)) for each in cells]


def check_instruments(sweep: Sweep, device: str) -> dict[str, str]:
    """Load judges and encoder, and find the model of perplexity, so that mistakes show early; return fingerprints."""
    instruments = {f"the judge {name!r}": _load_judge(use, device).name for name, use in sweep.judges.items()}
    if sweep.perplexity not in (None, WHILE_DECODING):
        source = ModelSource.find(sweep.perplexity)
        load_config(source)
        instruments["the model that measures perplexity"] = source.fingerprint
    if sweep.mauve is not None:
        instruments["the encoder of MAUVE"] = load_encoder(sweep.mauve, device).name
    return instruments


def _read_complete_cells(folder: Path, sweep: Sweep, prompts: list[Prompt]) -> list[MeasuredCell]:
    """Read the cells that have all their texts, in the sweep's order, with the likelihoods that decoding has noted."""
    file = folder / "generations.jsonl"
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [{} for _ in prompts] for cell in sweep.cells()}
    for row in read_lines(file) if file.exists() else ():
        rows[row["cell"]][row["prompt"]] = row
    complete = []
    for cell in sweep.cells():
        own = rows[cell.name]
        if all(own):
            noted = [name for name in (*LIKELIHOODS, *ENDS) if all(name in row for row in own)]  # older runs lack some
            arrays = {name: np.array([row[name] for row in own]) for name in noted}
            complete.append(MeasuredCell(cell, [row["continuations"] for row in own], arrays))
    if not complete:
        raise DataError(
            f"{str(file)!r} holds no complete cell yet.", "generate first: use the same command without --only-measure."
        )
    return complete


# --- scores and likelihoods ---


@dataclass(frozen=True)
class Instruments:
    """The models that measure texts: judges by name, and a language model for perplexity."""

    judges: dict[str, tuple[Judge, str]]  # with what the judge reads, as in `JudgeUse`
    lm: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None
    batch_size: int = 100

    @classmethod
    def load(
        cls,
        judges: Mapping[str, JudgeUse],
        perplexity: str | None,
        device: str,
        cache: Path | None = None,
        dtype: str = "auto",
        batch_size: int = 100,
    ) -> "Instruments":
        """Load judges, which keep their scores in `cache`, and the language model named `perplexity`."""
        lm = None if perplexity is None else load(perplexity, device, dtype)
        loaded = {n: (to_unit(CachedJudge(_load_judge(use, device), cache)), use.reads) for n, use in judges.items()}
        return cls(loaded, lm, batch_size)

    def measure(
        self, prompts: Sequence[str], texts: Samples, progress: bool = False, unguided: Samples | None = None
    ) -> dict[str, np.ndarray]:
        """Measure scores[judge], nll and tokens of each prompt's continuations, (p, n).

        Judges of pairs compare them with the `unguided` ones; without these, all pairs are ties.
        """
        shape = (len(texts), len(texts[0]))
        before = [prompt for prompt, samples in zip(prompts, texts, strict=True) for _ in samples]
        after = [text for samples in texts for text in samples]
        arrays = {}
        for name, (judge, reads) in self.judges.items():
            read = [b + a if reads != "continuation" and a.strip() else a for b, a in zip(before, after, strict=True)]
            if reads != "pair":
                scores = judge.score(read, progress)
            elif unguided is None:
                scores = np.array([0.5 if text.strip() else np.nan for text in read])
            else:
                others = [text for samples in unguided for text in samples]
                whole = [b + a if a.strip() else a for b, a in zip(before, others, strict=True)]
                scores = score_pairs(judge, read, whole, progress)
            arrays[f"scores[{name}]"] = scores.reshape(shape)
        if self.lm is not None:
            likelihoods = measure_likelihoods(*self.lm, before, after, self.batch_size, progress)
            arrays |= {name: getattr(likelihoods, name).reshape(shape) for name in ("nll", "tokens")}
        return arrays


def _load_judge(use: JudgeUse, device: str) -> Judge:
    """Load the judge of texts, or of pairs; one without a lowest and highest score is refused."""
    judge = load_pair_judge(use.judge) if use.reads == "pair" else load_judge(use.judge, device)
    to_unit(judge)
    return judge


# --- metrics ---


def _write_metrics(
    folder: Path, sweep: Sweep, prompts: list[Prompt], measured: list[MeasuredCell], device: str, progress: bool
) -> None:
    """Write metrics.jsonl cell by cell; complete cells at the beginning of the file are kept."""
    groups = _find_groups(prompts)
    file = folder / "metrics.jsonl"
    known = [*read_lines(file)] if file.exists() else []
    known = known[: len(known) // len(groups) * len(groups)]
    _write_lines(file, known)
    todo = measured[len(known) // len(groups) :]
    texts = {each.cell: each.texts for each in measured}
    unguided = {each.cell: each for each in measured if each.cell.guide == UNGUIDED}
    encoder = None
    if todo and sweep.mauve is not None and any("features" in METRICS[name].needs for name in sweep.metrics):
        encoder = load_encoder(sweep.mauve, device)

    @lru_cache(maxsize=2)  # of the last cell and of its reference, which it shares with many others
    def encode(cell: SweepCell) -> np.ndarray:
        assert encoder is not None
        return encode_samples(encoder, texts[cell])

    for each in tqdm(todo, desc="metrics", unit="cell", disable=not progress):
        other = sweep.mauve_reference(each.cell)
        if encoder is not None and other is not None:
            features = {"features": encode(each.cell), "reference": encode(other)}
            each = replace(each, arrays=each.arrays | features)
        reference = None if each.cell in unguided else unguided.get(each.cell.reference)
        rows = [_metrics_row(sweep, each, reference, group, chosen) for group, chosen in groups.items()]
        with file.open("ab") as stream:
            append_lines(stream, rows)


def _metrics_row(
    sweep: Sweep, measured: MeasuredCell, unguided: MeasuredCell | None, group: str, chosen: list[int]
) -> dict[str, Any]:
    """Make the line of metrics.jsonl for a class of prompts."""
    has_features = "features" in measured.arrays
    names = [name for name in sweep.metrics if has_features or "features" not in METRICS[name].needs]
    keys = [*list_judged(sweep.judges), *dict.fromkeys([*names, *measured.known_ends])]
    metrics, changes = measured.estimate(keys, chosen, Bootstrap(sweep.resamples), unguided)
    return {
        "cell": measured.cell.name,
        **asdict(measured.cell),
        "group": group,
        "prompts": len(chosen),
        "samples": sweep.samples,
        "metrics": metrics,
        "changes": changes,
    }


def encode_samples(encoder: Encoder, texts: Samples, progress: bool = False) -> np.ndarray:
    """Encode the samples of each prompt, (p, n, d)."""
    vectors = encoder.encode([text for samples in texts for text in samples], progress)
    return vectors.reshape(len(texts), -1, vectors.shape[-1])


def _find_groups(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The positions of the prompts of each class."""
    groups: dict[str, list[int]] = {}
    for position, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(position)
    return groups


# --- pairs of guides ---


def compare_guides(sweep: Sweep, prompts: list[Prompt], measured: list[MeasuredCell]) -> list[dict[str, Any]]:
    """Compare every pair of guides with the same candidates and seed, for the metrics of judges.

    They are compared at equal perplexity where there is a model that measures it, and at equal KL where that is among
    the sweep's metrics.
    """
    axes = [name for name in AXES if name in sweep.metrics or (name == "perplexity" and sweep.perplexity is not None)]
    settings: dict[tuple[Any, ...], dict[str, list[MeasuredCell]]] = {}
    for each in measured:
        if each.cell.guide != UNGUIDED:
            setting = tuple(getattr(each.cell, name) for name in SETTING)
            settings.setdefault(setting, {}).setdefault(each.cell.guide, []).append(each)
    pairs = [pair for curves in settings.values() for pair in combinations(curves.values(), 2)]
    lines = product(axes, pairs, list_judged(sweep.judges), _find_groups(prompts).items())
    return [_compare(sweep, axis, pair, key, group, chosen) for axis, pair, key, (group, chosen) in lines]


def _compare(
    sweep: Sweep, axis: str, pair: Sequence[list[MeasuredCell]], key: str, group: str, chosen: list[int]
) -> dict[str, Any]:
    """Make the line of differences.jsonl for two guides; `reason` says why they cannot be compared."""
    cell, other = (cells[0].cell for cells in pair)
    row: dict[str, Any] = {
        "first": cell.guide,
        "second": other.guide,
        "axis": axis,
        "metric": key,
        "group": group,
        "prompts": len(chosen),
        **{name: getattr(cell, name) for name in SETTING},
    }
    metric, judge = metric_and_judge(key)
    ours, theirs = ([each.scored_by(judge).take(chosen) for each in cells] for cells in pair)
    try:
        difference = compare_at_equal(axis, ours, theirs, metric, Bootstrap(sweep.resamples))
    except OptionError as error:  # too few values of β, or no common range
        return row | {"value": None, "low": None, "high": None, "range": None, "reason": error.message}
    numbers = _for_json({name: getattr(difference, name) for name in ("value", "low", "high")})
    return row | numbers | {"range": list(difference.range), "reason": None}


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        append_lines(stream, rows)
