"""Generate the texts of a sweep, and go on with a sweep that was killed.

A run folder holds config.yaml (the sweep), generations.jsonl (a line per cell and prompt) and costs.jsonl (a line per
chunk of prompts). Cells and chunks come in a fixed order, and the texts of a chunk do not depend on earlier ones. The
complete chunks at the beginning of generations.jsonl are kept, and all that follows them is cut off and made again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from radq.data.prompts import Prompt
from radq.evaluation.sweep.config import WHILE_DECODING, Sweep, SweepCell
from radq.evaluation.sweep.engines import Continuation, load_engine, measure_ends
from radq.evaluation.sweep.folder import describe_cost
from radq.files import append_lines, drop_partial_last_line
from radq.numerics import require_memory_for_texts, same_kernels


@dataclass(frozen=True)
class Chunk:
    """Prompts of a cell that are continued together. A chunk is written as a whole, or made again."""

    cell: SweepCell
    first: int
    prompts: list[Prompt]

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [(self.cell.name, self.first + number) for number in range(len(self.prompts))]


def generate_all(folder: Path, sweep: Sweep, prompts: list[Prompt], device: str, progress: bool = False) -> None:
    """Generate and write all texts that generations.jsonl does not hold yet."""
    size = sweep.prompts_per_chunk
    chunks = [
        Chunk(cell, first, prompts[first : first + size])
        for cell in sweep.cells()
        for first in range(0, len(prompts), size)
    ]
    drop_partial_last_line(folder / "costs.jsonl")
    with (folder / "generations.jsonl").open("a+b") as stream:
        done = _keep_complete_chunks(stream, chunks)
        _generate_chunks(stream, folder / "costs.jsonl", sweep, chunks, done, device, progress)


def _keep_complete_chunks(stream: BinaryIO, chunks: list[Chunk]) -> int:
    """Count the complete chunks at the beginning of the file, and cut off all that follows them."""
    stream.seek(0)
    done = end = 0
    for chunk in chunks:
        lines = [stream.readline() for _ in chunk.prompts]
        if [_read_key(line) for line in lines] != chunk.keys:
            break
        done, end = done + 1, stream.tell()
    stream.truncate(end)
    return done


def _read_key(line: bytes) -> tuple[str, int] | None:
    """Read the cell and the number of the prompt of a line; None for a partial line."""
    try:
        row = json.loads(line)
        return (row["cell"], row["prompt"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _generate_chunks(
    stream: BinaryIO, costs: Path, sweep: Sweep, chunks: list[Chunk], done: int, device: str, progress: bool
) -> None:
    """Generate the chunks after the first `done`, and append their texts and costs as they come."""
    todo = chunks[done:]
    if not todo:
        return
    drawn = max(len(chunk.prompts) for chunk in todo) * sweep.samples
    require_memory_for_texts(drawn, sweep.max_new_tokens, "give fewer samples, or a smaller batch_size.")
    engine = load_engine(sweep, device)
    longest = max((prompt.text for chunk in todo for prompt in chunk.prompts), key=len)
    for cell in {chunk.cell.guide: chunk.cell for chunk in todo}.values():
        engine.prepare(cell)([longest], 0)  # a guide that does not work fails now, and not after hours
    total = sum(len(chunk.prompts) for chunk in chunks) * sweep.samples
    finished = sum(len(chunk.prompts) for chunk in chunks[:done]) * sweep.samples
    with tqdm(total=total, initial=finished, unit="text", desc="generating", disable=not progress) as bar:
        for chunk in todo:
            bar.set_postfix_str(chunk.cell.name, refresh=False)
            produce = engine.prepare(chunk.cell)
            began = time.perf_counter()
            with same_kernels():
                generations, usage = produce([prompt.text for prompt in chunk.prompts], chunk.first)
            cost = describe_cost(chunk.cell.name, generations, usage, time.perf_counter() - began, device)
            append_lines(stream, _make_lines(chunk, generations, sweep))
            with costs.open("ab") as file:
                append_lines(file, [cost])
            bar.update(len(chunk.prompts) * sweep.samples)


def _make_lines(chunk: Chunk, generations: Sequence[Continuation], sweep: Sweep) -> list[dict[str, Any]]:
    """Make the lines of generations.jsonl for a chunk."""
    lines = []
    for number, prompt in enumerate(chunk.prompts):
        samples = generations[number * sweep.samples : (number + 1) * sweep.samples]
        line: dict[str, Any] = {"cell": chunk.cell.name, "prompt": chunk.first + number, "group": prompt.group}
        line |= {"text": prompt.text, "continuations": [sample.text for sample in samples]}
        if sweep.perplexity == WHILE_DECODING:  # a blank text has no tokens, as in `measure_likelihoods`
            line["nll"] = [round(sample.nll, 4) if sample.text.strip() else 0.0 for sample in samples]
            line["drawn_nll"] = [round(sample.drawn_nll, 4) if sample.text.strip() else 0.0 for sample in samples]
            line["tokens"] = [sample.num_text_tokens if sample.text.strip() else 0 for sample in samples]
        line |= {name: values.tolist() for name, values in measure_ends(samples).items()}
        lines.append(line)
    return lines
