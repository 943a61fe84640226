"""Engines, which continue the prompts of a sweep as a cell says: transformers, or vLLM for throughput.

Prompts may stand with a request for what is wanted, such as "Continue the text so that it is very positive." The base
model then reads a chat: the user's message holds the request, a blank line and the prompt; the assistant's message
begins with the prompt, and the base model goes on with it. A base model without a chat template reads the user's
message alone, as plain text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.decoding.best_of_n import best_of_n
from radq.decoding.generate import Generation, generate
from radq.decoding.text import Prompt
from radq.errors import OptionError, require_package
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import UNGUIDED, WHILE_DECODING, GuideSweep, Sweep, SweepCell
from radq.evaluation.sweep.folder import Usage
from radq.guides import RewardGuide
from radq.guides.meter import Meter
from radq.models.loading import load
from radq.models.reward import RewardModel
from radq.numerics import empty_cache, reset_peak_memory

if TYPE_CHECKING:
    from radq.hosts.vllm import VllmGeneration


Continuation = Any  # a Generation, or a VllmGeneration, which is imported only where it is used
Produced = tuple[Sequence[Continuation], Usage | None]  # the usage is None where it is not counted
Produce = Callable[[Sequence[str], int], Produced]  # takes prompts, and the number of the first among all prompts


class Engine(ABC):
    """Continues prompts with the settings of any cell of a sweep."""

    def __init__(self, sweep: Sweep, device: str):
        self.sweep, self.device = sweep, device

    @abstractmethod
    def prepare(self, cell: SweepCell) -> Produce:
        """Return a function that continues prompts with the cell's settings, and says how much its experts read."""

    def options(self, cell: SweepCell) -> dict[str, Any]:
        """Return the options of `generate` for a cell."""
        return {
            "top_k": cell.top_k,
            "top_p": cell.top_p,
            "temperature": self.sweep.temperature,
            "max_new_tokens": self.sweep.max_new_tokens,
            "samples": self.sweep.samples,
            "seed": cell.seed,
        }


def measure_ends(samples: Sequence[Continuation]) -> dict[str, np.ndarray]:
    """Measure whether each text ended by itself, at a stop token, and the number of its other tokens: (n,)."""
    ended = np.array([sample.finish_reason == "stop" for sample in samples])
    return {"ended": ended, "length": np.array([len(sample.token_ids) for sample in samples]) - ended}


class TransformersEngine(Engine):
    """Decodes with transformers. The base model is loaded once; of the guides, the last one stays loaded.

    Where memory runs out, fewer texts are decoded together from then on. They are the same but for rounding.
    """

    def __init__(self, sweep: Sweep, device: str):
        super().__init__(sweep, device)
        self.lm, self.tokenizer = load(sweep.base, device, sweep.dtype)
        self._loaded: tuple[str, Any] = ("", None)
        self._counting = ExitStack()  # with the meter of the guide that is loaded

    def options(self, cell: SweepCell) -> dict[str, Any]:
        return super().options(cell) | {"batch_size": self.sweep.batch_size}

    def prepare(self, cell: SweepCell) -> Produce:
        reset_peak_memory(self.device)
        if cell.guide == UNGUIDED:
            return self._unguided(cell)
        if cell.ask is not None:
            return self._asked(cell, cell.ask)
        if cell.best_of is not None:
            return self._best_of(cell, cell.best_of)
        return self._guided(cell)

    def _unguided(self, cell: SweepCell) -> Produce:
        def produce(prompts: Sequence[str], first: int) -> tuple[list[Generation], Usage]:
            return generate(self.lm, self.tokenizer, prompts, first_prompt=first, **self.options(cell)), Usage()

        return produce

    def _asked(self, cell: SweepCell, number: int) -> Produce:
        request = (self.sweep.guides[cell.guide].ask or [])[number - 1]

        def produce(prompts: Sequence[str], first: int) -> tuple[list[Generation], Usage]:
            asked = add_request(self.tokenizer, request, prompts)
            texts = generate(self.lm, self.tokenizer, asked, first_prompt=first, **self.options(cell))
            return self._measure_without_request(prompts, texts), Usage()

        return produce

    def _measure_without_request(self, prompts: Sequence[str], texts: list[Generation]) -> list[Generation]:
        """Replace the likelihoods by those that the base model gives the texts after their prompts alone."""
        if self.sweep.perplexity != WHILE_DECODING:
            return texts
        before = [prompt for prompt in prompts for _ in range(self.sweep.samples)]
        after = [generation.text for generation in texts]
        found = measure_likelihoods(self.lm, self.tokenizer, before, after, self.sweep.batch_size)
        return [
            replace(generation, nll=float(nll), num_text_tokens=int(tokens))
            for generation, nll, tokens in zip(texts, found.nll, found.tokens, strict=True)
        ]

    def _guided(self, cell: SweepCell) -> Produce:
        guide = self.sweep.guides[cell.guide]
        meter = self._load(cell.guide, lambda: self._load_guide(guide))
        options: dict[str, Any] = self.options(cell) | {"kl_budget": cell.kl_budget, "ends": self.sweep.ends}
        options["beta"] = [weight * (cell.beta or 0.0) for weight in meter.beta]

        def produce(prompts: Sequence[str], first: int) -> tuple[list[Generation], Usage]:
            before = Usage.of(meter)
            texts = generate(self.lm, self.tokenizer, prompts, meter, first_prompt=first, **options)
            return texts, Usage.of(meter).since(before)

        return produce

    def _load_guide(self, guide: GuideSweep) -> Meter:
        """Load a guide with β = 1. All its cells share it, and on a GPU the steps that were captured with it."""
        loaded = guide.at(1.0).load(self.device, self.sweep.dtype, guide.clamp, self.lm)
        return self._counting.enter_context(Meter(loaded))

    def _best_of(self, cell: SweepCell, n: int) -> Produce:
        guide = self.sweep.guides[cell.guide]
        model = self._load(
            cell.guide,
            lambda: RewardModel.from_pretrained(guide.folder, self.device, lm=self.lm, dtype=self.sweep.dtype),
        )

        def produce(prompts: Sequence[str], first: int) -> tuple[list[Generation], Usage]:
            options = self.options(cell)
            with Meter(RewardGuide(model, guide.weights)) as meter:
                texts = best_of_n(
                    self.lm, self.tokenizer, prompts, model, guide.weights, n, first_prompt=first, **options
                )
            return texts, Usage.of(meter)

        return produce

    def _load(self, name: str, load: Callable[[], Any]) -> Any:
        """Load the guide `name`, unless it is the one that is loaded already."""
        if self._loaded[0] != name:
            self._counting.close()
            self._loaded = ("", None)  # free the memory of the last one first
            empty_cache()  # other processes may use the same GPU
            self._loaded = (name, load())
        return self._loaded[1]


class VllmSweepEngine(Engine):
    """Decodes with vLLM, which holds all guides beside the base model. It does not count what experts read."""

    def __init__(self, sweep: Sweep, device: str):
        super().__init__(sweep, device)
        for name, guide in sweep.guides.items():
            if guide.best_of or not guide.clamp:
                raise OptionError(
                    f"guide {name!r} is the best of n or unclamped, which the engine vllm cannot do.",
                    "use the engine transformers.",
                )
        require_package("vllm", "vllm")
        from radq.hosts.vllm import VllmEngine

        specifications = {name: guide.at(1.0) for name, guide in sweep.guides.items()}
        dtype = {} if sweep.dtype == "auto" else {"dtype": sweep.dtype}
        self.engine = VllmEngine(sweep.base, specifications, ends=sweep.ends, **dtype, **sweep.vllm)

    def prepare(self, cell: SweepCell) -> Produce:
        options = self.options(cell)
        if cell.guide != UNGUIDED:
            weights = self.sweep.guides[cell.guide].weights.values()
            beta = [weight * (cell.beta or 0.0) for weight in weights]
            options |= {"guide": cell.guide, "beta": beta, "kl_budget": cell.kl_budget}

        def produce(prompts: Sequence[str], first: int) -> "tuple[list[VllmGeneration], Usage | None]":
            texts = self.engine.generate(prompts, first_prompt=first, **options)
            return texts, Usage() if cell.guide == UNGUIDED else None

        return produce


def load_engine(sweep: Sweep, device: str) -> Engine:
    """Load the engine that the sweep names."""
    return ENGINES[sweep.engine](sweep, device)


ENGINES: dict[str, type[Engine]] = {"transformers": TransformersEngine, "vllm": VllmSweepEngine}


def add_request(tokenizer: PreTrainedTokenizerBase, request: str, prompts: Sequence[str]) -> list[Prompt]:
    """Put a request before each prompt: token ids of chats, or texts where the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return [_join(request, prompt) for prompt in prompts]
    return [_encode_chat(tokenizer, request, prompt) for prompt in prompts]


def _join(request: str, prompt: str) -> str:
    return f"{request}\n\n{prompt}"


def _encode_chat(tokenizer: PreTrainedTokenizerBase, request: str, prompt: str) -> list[int]:
    chat = [{"role": "user", "content": _join(request, prompt).rstrip()}]
    begun = bool(prompt.strip())
    if begun:
        chat.append({"role": "assistant", "content": prompt})
    try:
        text: Any = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=not begun, continue_final_message=begun
        )
    except Exception as error:  # templates raise errors of their own about roles and their order
        raise OptionError(f"the chat template refuses a request: {error}.", "use another base model.") from error
    return tokenizer(text, add_special_tokens=False).input_ids
