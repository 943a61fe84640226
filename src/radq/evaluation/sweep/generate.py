"""Generate the texts of a sweep with an engine, transformers or vLLM, and go on with a sweep that was killed.

A run folder holds config.yaml (the sweep), generations.jsonl (a line per cell and prompt) and costs.jsonl (a line per
chunk of prompts). Cells and chunks come in a fixed order, and the texts of a chunk do not depend on earlier ones. The
complete chunks at the beginning of generations.jsonl are kept, and all that follows them is cut off and made again.

Prompts may stand with a request for what is wanted, such as "Continue the text so that it is very positive." The base
model then reads a chat: the user's message holds the request, a blank line and the prompt; the assistant's message
begins with the prompt, and the base model goes on with it. A base model without a chat template reads the user's
message alone, as plain text.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.prompts import Prompt
from radq.decoding.best_of_n import best_of_n
from radq.decoding.generate import Generation, generate
from radq.decoding.text import Prompt as EncodedPrompt
from radq.errors import OptionError, require_package
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import UNGUIDED, WHILE_DECODING, Sweep, SweepCell
from radq.evaluation.sweep.folder import EXPERT_COUNTS
from radq.files import append_lines, drop_partial_last_line
from radq.guides.meter import Meter
from radq.models.loading import load
from radq.models.reward import RewardModel
from radq.numerics import empty_cache, peak_memory, require_memory_for_texts, reset_peak_memory, same_kernels

Continuation = Any  # a Generation, or a VllmGeneration, which is imported only where it is used
Usage = Mapping[str, int | None]  # steps, calls and tokens of experts, prompts aside; None where they are not counted
Produced = tuple[Sequence[Continuation], Usage]
NOT_COUNTED: Usage = dict.fromkeys(EXPERT_COUNTS)
NO_EXPERT: Usage = dict.fromkeys(EXPERT_COUNTS, 0)


# --- engines ---


class SweepEngine(ABC):
    """Continues prompts with the settings of any cell of a sweep."""

    def __init__(self, sweep: Sweep, device: str):
        self.sweep, self.device = sweep, device

    def prepare(self, cell: SweepCell) -> None:
        """Load what a cell needs, and measure its peak of memory anew."""
        reset_peak_memory(self.device)

    @abstractmethod
    def produce(self, cell: SweepCell, prompts: Sequence[str], first: int) -> Produced:
        """Continue prompts, the first of which has the number `first` among all, and count what experts read."""

    def options(self, cell: SweepCell, first: int) -> dict[str, Any]:
        """Return the options of `generate` for a cell."""
        return {
            "top_k": cell.top_k,
            "top_p": cell.top_p,
            "temperature": self.sweep.temperature,
            "max_new_tokens": self.sweep.max_new_tokens,
            "samples": self.sweep.samples,
            "seed": cell.seed,
            "first_prompt": first,
        }

    def guided_options(self, cell: SweepCell, weights: Iterable[float]) -> dict[str, Any]:
        """Return the options of `generate` for a guide that was loaded with β = 1; `weights` are its numbers then."""
        return {"beta": [weight * (cell.beta or 0.0) for weight in weights], "kl_budget": cell.kl_budget}


class TransformersEngine(SweepEngine):
    """Decodes with transformers. The base model is loaded once; of the guides, the last one stays loaded.

    Where memory runs out, fewer texts are decoded together from then on. They are the same but for rounding.
    """

    def __init__(self, sweep: Sweep, device: str):
        super().__init__(sweep, device)
        self.lm, self.tokenizer = load(sweep.base, device, sweep.dtype)
        self._loaded: tuple[str, Any] = ("", None)

    def prepare(self, cell: SweepCell) -> None:
        super().prepare(cell)
        guide = self.sweep.guides.get(cell.guide)
        if guide is None or guide.ask or self._loaded[0] == cell.guide:
            return
        self._loaded = ("", None)  # free the memory of the last one first
        empty_cache()  # other processes may use the same GPU
        if guide.best_of:
            model = RewardModel.from_pretrained(guide.folder, self.device, lm=self.lm, dtype=self.sweep.dtype)
            self._loaded = (cell.guide, model)
        else:  # all cells share one guide with β = 1, and on a GPU the steps that were captured with it
            loaded = guide.at(1.0).load(self.device, self.sweep.dtype, guide.clamp, self.lm)
            self._loaded = (cell.guide, Meter(loaded))

    def produce(self, cell: SweepCell, prompts: Sequence[str], first: int) -> Produced:
        options: dict[str, Any] = self.options(cell, first) | {"batch_size": self.sweep.batch_size}
        if cell.guide == UNGUIDED:
            return generate(self.lm, self.tokenizer, prompts, **options), NO_EXPERT
        guide, loaded = self.sweep.guides[cell.guide], self._loaded[1]
        if cell.ask is not None:
            asked = add_request(self.tokenizer, (guide.ask or [])[cell.ask - 1], prompts)
            texts = generate(self.lm, self.tokenizer, asked, **options)
            if self.sweep.perplexity == WHILE_DECODING:
                texts = self._measure_without_request(prompts, texts)
            return texts, NO_EXPERT
        if cell.best_of is not None:
            texts = best_of_n(self.lm, self.tokenizer, prompts, loaded, guide.weights, cell.best_of, **options)
            return texts, NOT_COUNTED
        options |= self.guided_options(cell, loaded.beta) | {"ends": self.sweep.ends}
        with loaded as meter:
            texts = generate(self.lm, self.tokenizer, prompts, meter, **options)
        steps, _, calls, tokens = meter.take_back((0, 0, 0, 0))
        return texts, dict(zip(EXPERT_COUNTS, (steps, calls, tokens), strict=True))

    def _measure_without_request(self, prompts: Sequence[str], texts: list[Generation]) -> list[Generation]:
        """Replace the likelihoods by those that the base model gives the texts after their prompts alone."""
        before = [prompt for prompt in prompts for _ in range(self.sweep.samples)]
        after = [generation.text for generation in texts]
        likelihoods = measure_likelihoods(self.lm, self.tokenizer, before, after, self.sweep.batch_size)
        return [
            replace(generation, nll=float(nll), num_text_tokens=int(tokens))
            for generation, nll, tokens in zip(texts, likelihoods.nll, likelihoods.tokens, strict=True)
        ]


class VllmSweepEngine(SweepEngine):
    """Decodes with vLLM, which holds all guides beside the base model. It does not count what experts read."""

    def __init__(self, sweep: Sweep, device: str):
        super().__init__(sweep, device)
        require_package("vllm", "vllm")
        from radq.hosts.vllm import VllmEngine

        specifications = {name: guide.at(1.0) for name, guide in sweep.guides.items()}
        dtype = {} if sweep.dtype == "auto" else {"dtype": sweep.dtype}
        self.engine = VllmEngine(sweep.base, specifications, ends=sweep.ends, **dtype, **sweep.vllm)

    def produce(self, cell: SweepCell, prompts: Sequence[str], first: int) -> Produced:
        options = self.options(cell, first)
        if cell.guide == UNGUIDED:
            return self.engine.generate(prompts, **options), NO_EXPERT
        options |= self.guided_options(cell, self.sweep.guides[cell.guide].weights.values())
        return self.engine.generate(prompts, guide=cell.guide, **options), NOT_COUNTED


def load_engine(sweep: Sweep, device: str) -> SweepEngine:
    return (VllmSweepEngine if sweep.engine == "vllm" else TransformersEngine)(sweep, device)


# --- requests ---


def add_request(tokenizer: PreTrainedTokenizerBase, request: str, prompts: Sequence[str]) -> list[EncodedPrompt]:
    """Put a request before each prompt: token ids of chats, or texts where the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return [f"{request}\n\n{prompt}" for prompt in prompts]
    encoded: list[EncodedPrompt] = []
    for prompt in prompts:
        begun = bool(prompt.strip())
        chat = [{"role": "user", "content": f"{request}\n\n{prompt}".rstrip()}]
        chat += [{"role": "assistant", "content": prompt}] * begun
        try:
            text: Any = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
            )
        except Exception as error:  # templates raise errors of their own about roles and their order
            raise OptionError(f"the chat template refuses a request: {error}.", "use another base model.") from error
        encoded.append(tokenizer(text, add_special_tokens=False).input_ids)
    return encoded


# --- chunks ---


@dataclass(frozen=True)
class Chunk:
    """Prompts of a cell that are continued together. A chunk is written as a whole, or made again."""

    cell: SweepCell
    first: int
    prompts: list[Prompt]


def generate_all(folder: Path, sweep: Sweep, prompts: list[Prompt], device: str, progress: bool = False) -> None:
    """Generate and write all texts that generations.jsonl does not hold yet."""
    size = max(1, 4 * sweep.batch_size // sweep.samples)  # four batches, sorted by length for little padding
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
        keys = [(chunk.cell.name, number) for number, _ in enumerate(chunk.prompts, chunk.first)]
        if [_read_key(stream.readline()) for _ in chunk.prompts] != keys:
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
        engine.prepare(cell)
        engine.produce(cell, [longest], 0)  # a guide that does not work fails now, and not after hours
    total = sum(len(chunk.prompts) for chunk in chunks) * sweep.samples
    finished = sum(len(chunk.prompts) for chunk in chunks[:done]) * sweep.samples
    with tqdm(total=total, initial=finished, unit="text", desc="generating", disable=not progress) as bar:
        for chunk in todo:
            bar.set_postfix_str(chunk.cell.name, refresh=False)
            engine.prepare(chunk.cell)
            began = time.perf_counter()
            with same_kernels():
                texts, usage = engine.produce(chunk.cell, [prompt.text for prompt in chunk.prompts], chunk.first)
            cost = {"cell": chunk.cell.name, "seconds": time.perf_counter() - began}
            cost |= {"tokens": sum(len(text.token_ids) for text in texts), **usage, "peak_memory": peak_memory(device)}
            append_lines(stream, _make_lines(chunk, texts, sweep))
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
            for name in ("nll", "drawn_nll"):
                line[name] = [round(getattr(sample, name), 4) if sample.text.strip() else 0.0 for sample in samples]
            line["tokens"] = [sample.num_text_tokens if sample.text.strip() else 0 for sample in samples]
        line |= {name: values.tolist() for name, values in measure_ends(samples).items()}
        lines.append(line)
    return lines


def measure_ends(samples: Sequence[Continuation]) -> dict[str, np.ndarray]:
    """Measure whether each text ended by itself, at a stop token, and the number of its other tokens: (n,)."""
    ended = np.array([sample.finish_reason == "stop" for sample in samples])
    return {"ended": ended, "length": np.array([len(sample.token_ids) for sample in samples]) - ended}
