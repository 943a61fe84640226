"""Measure the texts of a sweep: scores, likelihoods and features first, then metrics and comparisons of guides.

Scores and likelihoods of a cell are kept in measures/, one npz each, so that a killed run measures no cell twice.
metrics.jsonl has a line per cell and class of prompts, with the change of each metric from the unguided base model;
differences.jsonl has a line per pair of guides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.data.prompts import Prompt
from radq.errors import DataError, OptionError
from radq.evaluation.comparison import AXES, compare_at_equal
from radq.evaluation.estimates import Bootstrap, Estimate, estimate_change
from radq.evaluation.metrics import METRICS, ScoredTexts, measure
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import UNGUIDED, WHILE_DECODING, JudgeUse, Sweep, SweepCell
from radq.evaluation.sweep.folder import array_file, read_arrays, write_arrays
from radq.files import append_lines, atomic_file, read_lines
from radq.judges.base import CachedJudge, Judge
from radq.judges.llm import load_pair_judge, score_pairs
from radq.judges.models import load_judge, to_unit
from radq.judges.readers import Encoder, load_encoder
from radq.models.loading import load, load_config
from radq.sources.model_source import ModelSource

LIKELIHOODS = ("nll", "tokens", "drawn_nll")
ENDS = ("ended", "length")  # of every text; no model is needed to measure them
Reads = Literal["continuation", "text", "pair"]


@dataclass(frozen=True)
class MeasuredCell:
    """The continuations of a cell, and the numbers that are known about each of them."""

    cell: SweepCell
    texts: list[list[str]]
    arrays: dict[str, np.ndarray]  # scores[judge], nll, tokens, drawn_nll, ended, length: (p, n)

    def scored_by(self, judge: str | None) -> ScoredTexts:
        """The texts with the scores of one judge, or with none."""
        scores = None if judge is None else self.arrays[f"scores[{judge}]"]
        return ScoredTexts(self.texts, scores, **{name: self.arrays.get(name) for name in (*LIKELIHOODS, *ENDS)})

    @property
    def known_ends(self) -> list[str]:
        """The metrics of ends, unless the texts are older than these."""
        return [name for name in ENDS if name in self.arrays]

    def estimate(
        self,
        judges: Mapping[str, JudgeUse],
        names: Sequence[str],
        chosen: Sequence[int],
        bootstrap: Bootstrap,
        features: np.ndarray | None = None,
        reference: np.ndarray | None = None,
    ) -> dict[str, dict[str, float | None]]:
        """Compute the metrics of the chosen prompts: metric[judge] of each judge, and the metrics without a judge."""
        plain = replace(self.scored_by(None), features=features, reference=reference).take(chosen)
        found = {
            f"{metric}[{name}]": estimate
            for name, use in judges.items()
            for metric, estimate in measure(use.metrics, self.scored_by(name).take(chosen), bootstrap).items()
        } | measure(names, plain, bootstrap)
        return _describe_estimates(found)

    def estimate_changes(
        self,
        unguided: "MeasuredCell",
        judges: Mapping[str, JudgeUse],
        names: Sequence[str],
        chosen: Sequence[int],
        bootstrap: Bootstrap,
    ) -> dict[str, dict[str, float | None]]:
        """Compute the change of each metric from the unguided cell. MAUVE has none: it is a comparison already."""
        judged = [(f"{metric}[{name}]", metric, name) for name, use in judges.items() for metric in use.metrics]
        changes = {}
        for key, metric, judge in (*judged, *((name, name, None) for name in names)):
            sums = METRICS[metric].sums
            if sums is not None:
                after, before = (sums(cell.scored_by(judge).take(chosen)) for cell in (self, unguided))
                changes[key] = estimate_change(after, before, bootstrap)
        return _describe_estimates(changes)


def measure_all(
    folder: Path, sweep: Sweep, prompts: list[Prompt], device: str, cache: Path | None = None, progress: bool = False
) -> None:
    """Write measures/, metrics.jsonl and differences.jsonl for all cells whose texts are complete."""
    generated = _read_complete_cells(folder, sweep, prompts)
    _measure_cells(folder, sweep, prompts, generated, device, cache, progress)
    measured = _add_arrays(folder, generated)
    _write_metrics(folder, sweep, prompts, measured, device, progress)
    _write_lines(folder / "differences.jsonl", compare_guides(sweep, prompts, measured))


def read_measured_cells(folder: Path, sweep: Sweep, prompts: list[Prompt]) -> list[MeasuredCell]:
    """Read the texts, scores and likelihoods of a sweep that was measured."""
    return _add_arrays(folder, _read_complete_cells(folder, sweep, prompts))


def _add_arrays(folder: Path, generated: list[MeasuredCell]) -> list[MeasuredCell]:
    return [replace(one, arrays=read_arrays(folder, one.cell.name)) for one in generated]


def check_instruments(sweep: Sweep, device: str) -> dict[str, str]:
    """Load judges and encoder, and find the model of perplexity, so that mistakes show before the generation.

    The result are their fingerprints.
    """
    found = {f"the judge {name!r}": _load_judge(use, device).name for name, use in sweep.judges.items()}
    if sweep.perplexity not in (None, WHILE_DECODING):
        source = ModelSource.find(sweep.perplexity)
        load_config(source)
        found["the model that measures perplexity"] = source.fingerprint
    if sweep.mauve is not None:
        found["the encoder of MAUVE"] = load_encoder(sweep.mauve, device).name
    return found


def _read_complete_cells(folder: Path, sweep: Sweep, prompts: list[Prompt]) -> list[MeasuredCell]:
    """Read the cells that have all their texts, in the sweep's order, with the likelihoods that decoding has noted."""
    file = folder / "generations.jsonl"
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [{} for _ in prompts] for cell in sweep.cells()}
    for row in read_lines(file) if file.exists() else ():
        rows[row["cell"]][row["prompt"]] = row
    complete = [cell for cell in sweep.cells() if all(rows[cell.name])]
    if not complete:
        raise DataError(
            f"{str(file)!r} holds no complete cell yet.", "generate first: use the same command without --only-measure."
        )
    return [_read_cell(cell, rows[cell.name]) for cell in complete]


def _read_cell(cell: SweepCell, rows: list[dict[str, Any]]) -> MeasuredCell:
    noted = [name for name in (*LIKELIHOODS, *ENDS) if all(name in row for row in rows)]  # older runs lack some
    arrays = {name: np.array([row[name] for row in rows]) for name in noted}
    return MeasuredCell(cell, [row["continuations"] for row in rows], arrays)


# --- scores and likelihoods ---


@dataclass(frozen=True)
class Instruments:
    """The models that measure texts: judges by name, and a language model for perplexity."""

    judges: dict[str, tuple[Judge, Reads]]  # with what the judge reads
    lm: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
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
        loaded: dict[str, tuple[Judge, Reads]] = {
            name: (to_unit(CachedJudge(_load_judge(use, device), cache)), use.reads) for name, use in judges.items()
        }
        if perplexity is None:
            return cls(loaded)
        return cls(loaded, *load(perplexity, device, dtype), batch_size)

    def measure(
        self,
        prompts: Sequence[str],
        texts: list[list[str]],
        progress: bool = False,
        unguided: list[list[str]] | None = None,
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
            if reads == "pair":
                others = after if unguided is None else [text for samples in unguided for text in samples]
                whole = [b + a if a.strip() else a for b, a in zip(before, others, strict=True)]
                scores = _tie(read) if unguided is None else score_pairs(judge, read, whole, progress)
            else:
                scores = judge.score(read, progress)
            arrays[f"scores[{name}]"] = scores.reshape(shape)
        if self.lm is not None and self.tokenizer is not None:
            found = measure_likelihoods(self.lm, self.tokenizer, before, after, self.batch_size, progress)
            arrays |= {"nll": found.nll.reshape(shape), "tokens": found.tokens.reshape(shape)}
        return arrays


def _load_judge(use: JudgeUse, device: str) -> Judge:
    """Load the judge of texts, or of pairs; one without a lowest and highest score is refused."""
    judge = load_pair_judge(use.judge) if use.reads == "pair" else load_judge(use.judge, device)
    to_unit(judge)
    return judge


def _tie(texts: Sequence[str]) -> np.ndarray:
    return np.array([0.5 if text.strip() else np.nan for text in texts])


def _measure_cells(
    folder: Path,
    sweep: Sweep,
    prompts: list[Prompt],
    generated: list[MeasuredCell],
    device: str,
    cache: Path | None,
    progress: bool,
) -> None:
    """Write the scores and likelihoods of cells that have none in measures/ yet."""
    todo = [one for one in generated if not array_file(folder, one.cell.name).exists()]
    if not todo:
        return
    lm = None if sweep.perplexity == WHILE_DECODING else sweep.perplexity
    instruments = Instruments.load(sweep.judges, lm, device, cache, sweep.dtype, sweep.batch_size)
    texts = {one.cell: one.texts for one in generated}
    for one in tqdm(todo, desc="measuring", unit="cell", disable=not progress):
        unguided = None if one.cell.guide == UNGUIDED else texts[one.cell.reference]
        arrays = instruments.measure([prompt.text for prompt in prompts], one.texts, unguided=unguided) | one.arrays
        write_arrays(folder, one.cell.name, arrays)


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
    needs_encoder = any(METRICS[name].needs_encoder for name in sweep.metrics)
    features = _Features(sweep, measured, device) if needs_encoder and todo else None
    unguided = {one.cell: one for one in measured if one.cell.guide == UNGUIDED}
    for one in tqdm(todo, desc="metrics", unit="cell", disable=not progress):
        reference = None if one.cell in unguided else unguided.get(one.cell.reference)
        rows = [_metrics_row(sweep, one, reference, group, chosen, features) for group, chosen in groups.items()]
        with file.open("ab") as stream:
            append_lines(stream, rows)


def _metrics_row(
    sweep: Sweep,
    one: MeasuredCell,
    reference: MeasuredCell | None,
    group: str,
    chosen: list[int],
    features: "_Features | None",
) -> dict[str, Any]:
    other = sweep.mauve_reference(one.cell)
    pair = (None, None) if features is None or other is None else features.encode_pair(one.cell, other)
    metrics = [name for name in sweep.metrics if other is not None or not METRICS[name].needs_encoder]
    metrics += [name for name in one.known_ends if name not in metrics]
    asked = (sweep.judges, metrics, chosen, Bootstrap(sweep.resamples))
    return {
        "cell": one.cell.name,
        **asdict(one.cell),
        "group": group,
        "prompts": len(chosen),
        "samples": sweep.samples,
        "metrics": one.estimate(*asked, *pair),
        "changes": {} if reference is None else one.estimate_changes(reference, *asked),
    }


class _Features:
    """Sentence embeddings of the texts of cells. Those of the last cell and its reference are kept."""

    def __init__(self, sweep: Sweep, measured: list[MeasuredCell], device: str):
        assert sweep.mauve is not None
        self.encoder: Encoder = load_encoder(sweep.mauve, device)
        self.texts = {one.cell: one.texts for one in measured}
        self._kept: dict[SweepCell, np.ndarray] = {}

    def encode_pair(self, cell: SweepCell, reference: SweepCell) -> tuple[np.ndarray, np.ndarray]:
        """Encode the texts of a cell, and those of the unguided cell it is compared with; many cells share that one."""
        wanted = {cell, reference}
        self._kept = {one: self._kept[one] if one in self._kept else self._encode(one) for one in wanted}
        return self._kept[cell], self._kept[reference]

    def _encode(self, cell: SweepCell) -> np.ndarray:
        return encode_samples(self.encoder, self.texts[cell])


def encode_samples(encoder: Encoder, texts: list[list[str]], progress: bool = False) -> np.ndarray:
    """Encode the samples of each prompt, (p, n, d)."""
    vectors = encoder.encode([text for samples in texts for text in samples], progress)
    return vectors.reshape(len(texts), -1, vectors.shape[-1])


def _find_groups(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The positions of the prompts of each class."""
    groups: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(number)
    return groups


# --- pairs of guides ---


def compare_guides(sweep: Sweep, prompts: list[Prompt], measured: list[MeasuredCell]) -> list[dict[str, Any]]:
    """Compare every pair of guides with the same candidates and seed, for the metrics of judges.

    They are compared at equal perplexity where there is a model that measures it, and at equal KL where that is among
    the sweep's metrics.
    """
    axes = [name for name in AXES if name in sweep.metrics or (name == "perplexity" and sweep.perplexity is not None)]
    settings: dict[tuple[Any, ...], dict[str, list[MeasuredCell]]] = {}
    for one in measured:
        if one.cell.guide != UNGUIDED:
            key = (one.cell.top_k, one.cell.top_p, one.cell.kl_budget, one.cell.seed)
            settings.setdefault(key, {}).setdefault(one.cell.guide, []).append(one)
    return [
        _compare(sweep, axis, curves[first], curves[second], judge, metric, group, chosen)
        for axis in axes
        for curves in settings.values()
        for first, second in combinations(curves, 2)
        for judge, use in sweep.judges.items()
        for metric in use.metrics
        for group, chosen in _find_groups(prompts).items()
    ]


def _compare(
    sweep: Sweep,
    axis: str,
    first: list[MeasuredCell],
    second: list[MeasuredCell],
    judge: str,
    metric: str,
    group: str,
    chosen: list[int],
) -> dict[str, Any]:
    """Make the line of differences.jsonl for two guides; `reason` says why they cannot be compared."""
    cell = first[0].cell
    row: dict[str, Any] = {
        "first": cell.guide,
        "second": second[0].cell.guide,
        "axis": axis,
        "metric": f"{metric}[{judge}]",
        "group": group,
        "prompts": len(chosen),
        **{name: getattr(cell, name) for name in ("top_k", "top_p", "kl_budget", "seed")},
    }
    ours, theirs = ([one.scored_by(judge).take(chosen) for one in guide] for guide in (first, second))
    try:
        found = compare_at_equal(axis, ours, theirs, metric, Bootstrap(sweep.resamples))
    except OptionError as error:  # too few values of β, or no common range
        return row | {"value": None, "low": None, "high": None, "range": None, "reason": error.message}
    numbers = {name: _for_json(getattr(found, name)) for name in ("value", "low", "high")}
    return row | numbers | {"range": list(found.range), "reason": None}


# --- files ---


def _write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        append_lines(stream, rows)


def _describe_estimates(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float | None]]:
    return {name: {key: _for_json(value) for key, value in asdict(one).items()} for name, one in estimates.items()}


def _for_json(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return value if math.isfinite(value) else None
