"""The measures of a sweep: judges, perplexity and features of its generations, then metrics and comparisons.

Scores and likelihoods of a cell are kept in measures/, one npz each, so that a killed run measures no cell twice.
metrics.jsonl has a line per cell and class of prompts, differences.jsonl one per pair of guides.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.data.prompts import Prompt
from radq.errors import DataError, OptionError
from radq.evaluation import metrics
from radq.evaluation.judges.base import CachedJudge, Judge
from radq.evaluation.judges.encoders import Encoder, load_encoder
from radq.evaluation.judges.models import load_judge
from radq.evaluation.metrics import Bootstrap, compare_at_equal_perplexity
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import UNGUIDED, WHILE_DECODING, Cell, JudgeUse, Sweep
from radq.files import read_lines, whole_file
from radq.models.loading import load_causal_lm, load_config, load_tokenizer


@dataclass(frozen=True)
class Measured:
    """A cell with what was measured of it."""

    cell: Cell
    texts: list[list[str]]
    arrays: dict[str, np.ndarray]  # scores[judge], nll, tokens: (p, n)

    def of_judge(self, judge: str | None) -> metrics.Cell:
        scores = None if judge is None else self.arrays[f"scores[{judge}]"]
        return metrics.Cell(self.texts, scores, self.arrays.get("nll"), self.arrays.get("tokens"))

    def estimate(
        self,
        judges: Mapping[str, JudgeUse],
        names: Sequence[str],
        chosen: Sequence[int],
        bootstrap: Bootstrap,
        features: np.ndarray | None = None,
        reference: np.ndarray | None = None,
    ) -> dict[str, dict[str, float | None]]:
        """Metrics of some of the prompts: metric[judge] of each judge, and those that need none."""
        plain = replace(self.of_judge(None), features=features, reference=reference).take(chosen)
        found = {
            f"{metric}[{name}]": estimate
            for name, use in judges.items()
            for metric, estimate in metrics.measure(use.metrics, self.of_judge(name).take(chosen), bootstrap).items()
        } | metrics.measure(names, plain, bootstrap)
        return {name: {key: _plain(value) for key, value in asdict(e).items()} for name, e in found.items()}


def measure_all(
    folder: Path, sweep: Sweep, prompts: list[Prompt], device: str, cache: Path | None = None, progress: bool = False
) -> None:
    """Write measures, metrics.jsonl and differences.jsonl of the cells that are whole: all, unless it was stopped."""
    generated = _read_generations(folder, sweep, prompts)
    _measure(folder, sweep, prompts, generated, device, cache, progress)
    measured = [
        Measured(cell, one.texts, dict(np.load(_file(folder, cell), allow_pickle=False)))
        for cell, one in generated.items()
    ]
    _write_metrics(folder, sweep, prompts, measured, device, progress)
    _write(folder / "differences.jsonl", compare_guides(sweep, prompts, measured))


@dataclass(frozen=True)
class Generated:
    """The continuations of a cell, and what decoding has measured of them."""

    texts: list[list[str]]
    arrays: dict[str, np.ndarray]  # nll, tokens: (p, n); empty where another model measures perplexity

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> "Generated":
        known = [name for name in ("nll", "tokens") if name in rows[0]]
        arrays = {name: np.array([row[name] for row in rows]) for name in known}
        return cls([row["continuations"] for row in rows], arrays)


def _read_generations(folder: Path, sweep: Sweep, prompts: list[Prompt]) -> dict[Cell, Generated]:
    """Of whole cells, in the sweep's order, in which they were generated too."""
    file = folder / "generations.jsonl"
    rows: dict[str, list[dict[str, Any]]] = {cell.name: [{} for _ in prompts] for cell in sweep.cells()}
    for row in read_lines(file) if file.exists() else ():
        rows[row["cell"]][row["prompt"]] = row
    whole = [cell for cell in sweep.cells() if all(rows[cell.name])]
    if not whole:
        raise DataError(
            f"{str(file)!r} holds no whole cell yet.", "generate first: the same command without --only-measure."
        )
    return {cell: Generated.of(rows[cell.name]) for cell in whole}


def _file(folder: Path, cell: Cell) -> Path:
    return folder / "measures" / f"{cell.name}.npz"


# --- scores and likelihoods ---


@dataclass(frozen=True)
class Instruments:
    """What measures texts: judges by name, each reading continuations or whole texts, and a language model."""

    judges: dict[str, tuple[Judge, bool]]  # and whether it reads the prompt as well
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
        loaded: dict[str, tuple[Judge, bool]] = {
            name: (CachedJudge(load_judge(use.judge, device), cache), use.reads == "text")
            for name, use in judges.items()
        }
        if perplexity is None:
            return cls(loaded)
        lm = load_causal_lm(perplexity, dtype=dtype, device=device)
        return cls(loaded, lm, load_tokenizer(perplexity), batch_size)

    def measure(self, prompts: Sequence[str], texts: list[list[str]]) -> dict[str, np.ndarray]:
        """scores[judge], nll and tokens of each prompt's continuations, (p, n)."""
        shape = (len(texts), len(texts[0]))
        before = [prompt for prompt, samples in zip(prompts, texts, strict=True) for _ in samples]
        after = [text for samples in texts for text in samples]
        arrays = {}
        for name, (judge, whole) in self.judges.items():
            read = [b + a if whole and a.strip() else a for b, a in zip(before, after, strict=True)]
            arrays[f"scores[{name}]"] = judge.score(read).reshape(shape)
        if self.lm is not None and self.tokenizer is not None:
            found = measure_likelihoods(self.lm, self.tokenizer, before, after, self.batch_size)
            arrays |= {"nll": found.nll.reshape(shape), "tokens": found.tokens.reshape(shape)}
        return arrays


def _measure(
    folder: Path,
    sweep: Sweep,
    prompts: list[Prompt],
    generated: Mapping[Cell, Generated],
    device: str,
    cache: Path | None,
    progress: bool,
) -> None:
    todo = [cell for cell in generated if not _file(folder, cell).exists()]
    if not todo:
        return
    other_lm = None if sweep.perplexity == WHILE_DECODING else sweep.perplexity
    instruments = Instruments.load(sweep.judges, other_lm, device, cache, sweep.dtype, sweep.batch_size)
    for cell in tqdm(todo, desc="measuring", unit="cell", disable=not progress):
        of_cell = generated[cell]
        arrays = instruments.measure([prompt.text for prompt in prompts], of_cell.texts) | of_cell.arrays
        with whole_file(_file(folder, cell)) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]


# --- metrics ---


def _write_metrics(
    folder: Path, sweep: Sweep, prompts: list[Prompt], measured: list[Measured], device: str, progress: bool
) -> None:
    """One cell after the other; whole cells at the beginning of the file are kept."""
    groups = _groups(prompts)
    file = folder / "metrics.jsonl"
    known = [*read_lines(file)] if file.exists() else []
    known = known[: len(known) // len(groups) * len(groups)]
    _write(file, known)
    todo = measured[len(known) // len(groups) :]
    features = _Features(sweep, measured, device) if "mauve" in sweep.metrics and todo else None
    for one in tqdm(todo, desc="metrics", unit="cell", disable=not progress):
        rows = [_metrics_row(sweep, one, group, chosen, features) for group, chosen in groups.items()]
        with file.open("a", encoding="utf-8") as stream:
            stream.write("".join(_dump(row) for row in rows))


def _metrics_row(
    sweep: Sweep, one: Measured, group: str, chosen: list[int], features: "_Features | None"
) -> dict[str, Any]:
    pair = (None, None) if features is None else features.of(one.cell)
    found = one.estimate(sweep.judges, sweep.metrics, chosen, Bootstrap(sweep.resamples), *pair)
    return {"cell": one.cell.name, **asdict(one.cell), "group": group, "metrics": found}


class _Features:
    """Sentence embeddings of a cell's texts and of its unguided reference, which many cells share."""

    def __init__(self, sweep: Sweep, measured: list[Measured], device: str):
        assert sweep.mauve is not None
        self.encoder: Encoder = load_encoder(sweep.mauve, device)
        self.texts = {one.cell: one.texts for one in measured}
        self._kept: dict[Cell, np.ndarray] = {}

    def of(self, cell: Cell) -> tuple[np.ndarray, np.ndarray]:
        kept = {cell, cell.reference}
        self._kept = {one: self._kept[one] if one in self._kept else self._encode(one) for one in kept}
        return self._kept[cell], self._kept[cell.reference]

    def _encode(self, cell: Cell) -> np.ndarray:
        texts = self.texts[cell]
        vectors = self.encoder.encode([text for samples in texts for text in samples])
        return vectors.reshape(len(texts), -1, vectors.shape[-1])


def _groups(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Prompts of each class, by number."""
    groups: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(number)
    return groups


# --- pairs of guides ---


def compare_guides(sweep: Sweep, prompts: list[Prompt], measured: list[Measured]) -> list[dict[str, Any]]:
    """Attribute differences at equal perplexity, for every pair of guides at the same candidates and seed."""
    if sweep.perplexity is None:
        return []
    settings: dict[tuple[Any, ...], dict[str, list[Measured]]] = {}
    for one in measured:
        if one.cell.guide != UNGUIDED:
            key = (one.cell.top_k, one.cell.top_p, one.cell.kl_budget, one.cell.seed)
            settings.setdefault(key, {}).setdefault(one.cell.guide, []).append(one)
    return [
        _compare(sweep, curves[first], curves[second], judge, metric, group, chosen)
        for curves in settings.values()
        for first, second in combinations(curves, 2)
        for judge, use in sweep.judges.items()
        for metric in use.metrics
        for group, chosen in _groups(prompts).items()
    ]


def _compare(
    sweep: Sweep,
    first: list[Measured],
    second: list[Measured],
    judge: str,
    metric: str,
    group: str,
    chosen: list[int],
) -> dict[str, Any]:
    cell = first[0].cell
    row: dict[str, Any] = {
        "first": cell.guide,
        "second": second[0].cell.guide,
        "metric": f"{metric}[{judge}]",
        "group": group,
        **{name: getattr(cell, name) for name in ("top_k", "top_p", "kl_budget", "seed")},
    }
    ours, theirs = ([one.of_judge(judge).take(chosen) for one in guide] for guide in (first, second))
    try:
        found = compare_at_equal_perplexity(ours, theirs, metric, Bootstrap(sweep.resamples))
    except OptionError as error:  # too few values of β, or none of the same perplexity
        return row | {"value": None, "low": None, "high": None, "perplexity": None, "reason": error.message}
    numbers = {name: _plain(getattr(found, name)) for name in ("value", "low", "high")}
    return row | numbers | {"perplexity": list(found.perplexity_range), "reason": None}


# --- files ---


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    with whole_file(file) as temporary:
        temporary.write_text("".join(map(_dump, rows)), encoding="utf-8")


def _dump(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def check_models(sweep: Sweep, device: str) -> None:
    """What can be wrong with judges, encoder and the model of perplexity shows before hours of generation."""
    for use in sweep.judges.values():
        load_judge(use.judge, device)
    if sweep.perplexity not in (None, WHILE_DECODING):
        load_config(sweep.perplexity)
    if sweep.mauve is not None:
        load_encoder(sweep.mauve, device)
