"""Guided decoding inside vLLM: a logits processor for vLLM's server, and an engine that continues many prompts.

    RADQ_GUIDES=guides.yaml vllm serve gpt2-large --max-model-len 1000 \\
        --logits-processors radq.hosts.vllm:GuidedProcessor

The operator of the server writes guides.yaml, with lines such as `toxicity: models/toxicity:toxicity=-50`. A client
names one of these guides in `SamplingParams.extra_args` or, over HTTP, in `vllm_xargs`; `radq.hosts.batching` reads
these arguments.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from radq.decoding.prompts import decode_texts, encode_prompts
from radq.errors import ContextLengthError, OptionError, require_package
from radq.hosts.batching import Guidance, Registry, Request, Slots, Steerer
from radq.models.loading import load_config, load_tokenizer, max_positions, resolve

first_runner: Any = require_package("vllm.v1.sample.logits_processor", "vllm")
second_runner: Any = require_package("vllm.v1.worker.gpu.sample.logits_processor", "vllm")
vllm_errors: Any = require_package("vllm.exceptions", "vllm")
platforms: Any = require_package("vllm.platforms", "vllm")

GUIDES = "RADQ_GUIDES"  # an environment variable, since vLLM's processes share nothing else before they start
LONGEST = 2048  # default context length of the engine: a shorter context leaves memory for more texts
HEADROOM = 8  # room for tokens that guides put before a text: a BOS, maybe a control code


@lru_cache
def _read_registry(path: str) -> Registry:
    return Registry.read(path)


def find_registry() -> Registry:
    """Read the guides in the file that the environment variable names."""
    path = os.environ.get(GUIDES)
    if not path:
        raise OptionError(
            f"the environment variable {GUIDES} is not set.",
            "set it to a YAML file with lines name: DIR:attribute=beta.",
        )
    return _read_registry(path)


def read_guidance(params: Any) -> Guidance | None:
    """Read the guidance that a request's SamplingParams ask for; None if it is not guided."""
    return find_registry().guidance(params.extra_args, params.temperature)


class GuidedProcessor(first_runner.LogitsProcessor, second_runner.LogitsProcessor):
    """A logits processor that steers guided requests. It has the interfaces of both of vLLM's model runners.

    vLLM divides logits by the temperature after this, the shift included, so the shift is multiplied by it here.
    """

    def __init__(self, vllm_config: Any, place: Any, is_pin_memory: bool | None = None):
        """The first runner passes a device as `place`, the second one an object with the tokens of all requests."""
        self._slots, self._states = Slots(), place
        registry = find_registry()
        guides = registry.load(str(getattr(place, "device", place)))
        _check_engine(vllm_config, list(guides.values()))
        self._steerer = Steerer(guides)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        read_guidance(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        requests = self._slots.requests if ctx is None else self._read_context(ctx)
        if requests:
            self._steerer.steer(logits, requests)
        return logits

    # --- the first runner: requests stand at the rows of the batch, and move between them ---

    def update_state(self, batch_update: Any) -> None:
        if batch_update is not None:
            swap = first_runner.MoveDirectionality.SWAP
            self._slots.update(
                batch_update.removed,
                [(slot, _read_request(params, prompt, output)) for slot, params, prompt, output in batch_update.added],
                [(source, target, direction is swap) for source, target, direction in batch_update.moved],
            )

    # --- the second runner: a request keeps its slot, and a mapping from rows to slots comes with every step ---

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        request = _read_request(sampling_params, [], [])
        self._slots.update([], [(req_idx, request)], [])
        return request is not None

    def _read_context(self, ctx: Any) -> dict[int, Request]:
        """The guided requests of this step by their rows, with their texts brought up to date."""
        slots = [int(slot) for slot in ctx.idx_mapping_np]
        rows = {row: self._slots.requests[slot] for row, slot in enumerate(slots) if slot in self._slots.requests}
        last = ctx.input_ids.tolist() if rows else []
        for row, request in rows.items():
            length = int(ctx.seq_lens_upper_bound_np[row])  # the exact length, since no tokens are speculated
            if length == len(request.output) + 1:
                request.output.append(last[row])
            elif length != len(request.output):
                request.output[:] = self._states.all_token_ids.gpu[slots[row], :length].tolist()
        return rows


def _read_request(params: Any, prompt: list[int] | None, output: list[int]) -> Request | None:
    guidance = read_guidance(params)
    return None if guidance is None else Request(guidance, prompt or [], output)


def _check_engine(vllm_config: Any, guides: Sequence[Any]) -> None:
    """Raise at the start if guides would fail in the middle of a batch, which would stop the whole engine."""
    model = vllm_config.model_config
    if vllm_config.speculative_config is not None:
        raise OptionError("guides cannot be used with speculative decoding.", "turn it off in vLLM.")
    if model.enable_prompt_embeds:
        raise OptionError("guides cannot read prompts that are embeddings.", "turn enable_prompt_embeds off in vLLM.")
    tokenizer = load_tokenizer(model.tokenizer)
    for guide in guides:
        guide.check_vocabulary(model.get_vocab_size(), tokenizer, model.model)
        try:
            guide.check_length(model.max_model_len)
        except ContextLengthError as error:
            raise ContextLengthError(error.message, "give vLLM a smaller max_model_len.") from error


@dataclass
class VllmGeneration:
    """A continuation of a prompt by vLLM."""

    prompt: str
    text: str  # the continuation, without special tokens
    token_ids: list[int]  # the continuation, a final stop token included
    finish_reason: str  # "stop" or "length"


class VllmEngine:
    """A base model and guides inside vLLM, for more texts per second than `radq.generate`.

    Args:
        base: the hub name or folder of the base model.
        guides: for each name, the specification of a guide or a list of them: {"toxicity": "DIR:toxicity=-50"}.
        max_model_len: the most tokens of a text, prompt included; by default as many as base model and guides have
            room for, but at most 2048.
        options: arguments of `vllm.LLM`. Lower its `gpu_memory_utilization`, since guides need memory too.
    """

    def __init__(
        self,
        base: str | Path,
        guides: Mapping[str, str | Sequence[str]] | None = None,
        max_model_len: int | None = None,
        **options: Any,
    ):
        self.registry = Registry(guides or {})
        self.tokenizer = load_tokenizer(base)
        self._config = load_config(base)
        positions = max_positions(self._config) or LONGEST
        self.max_model_len = max_model_len or min(LONGEST, positions - (HEADROOM if guides else 0))
        self.tokens_per_second = 0.0  # in the last call of `generate`
        self._folder = tempfile.TemporaryDirectory(prefix="radq-")
        processors: dict[str, Any] = {}
        if guides:
            path = Path(self._folder.name) / "guides.yaml"
            path.write_text(yaml.safe_dump(self.registry.specifications, sort_keys=False), encoding="utf-8")
            os.environ[GUIDES] = str(path)
            processors = {"logits_processors": ["radq.hosts.vllm:GuidedProcessor"]}
        if platforms.current_platform.is_cpu():  # vLLM 0.32 fails there on a seeded request that is read in chunks
            options = {"enable_chunked_prefill": False, **options}
        self._vllm = require_package("vllm", "vllm")
        self.llm: Any = self._vllm.LLM(str(resolve(base)), max_model_len=self.max_model_len, **processors, **options)

    def generate(
        self,
        prompts: Sequence[str],
        guide: str | None = None,
        beta: float | Sequence[float] | None = None,
        top_k: int | None = 20,
        top_p: float | None = None,
        temperature: float = 1.0,
        max_new_tokens: int = 20,
        num_samples: int = 1,
        seed: int = 0,
        *,
        kl_budget: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        first_prompt: int = 0,
        progress: bool = False,
    ) -> list[VllmGeneration]:
        """Continue prompts as `radq.generate` does.

        `guide` is one of the names in `guides`, and `beta` replaces its strengths, in the order of the specification.
        The random numbers of sample s of prompt p depend on (seed, p, s) alone. They differ from `radq.generate`'s.
        """
        extra_args: dict[str, Any] = {}
        own_candidates: dict[str, Any] = {}
        if guide is None:
            own_candidates = {"top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
        else:
            given = list(beta) if isinstance(beta, Sequence) else beta
            settings = {"guide": guide, "beta": given, "top_k": top_k or 0, "top_p": top_p, "kl_budget": kl_budget}
            extra_args = {f"radq_{name}": value for name, value in settings.items() if value is not None}
        self.registry.guidance(extra_args, temperature)
        stops = {} if stop_token_ids is None else {"stop_token_ids": list(stop_token_ids), "ignore_eos": True}

        def params(prompt: int, sample: int) -> Any:
            try:
                return self._vllm.SamplingParams(
                    temperature=temperature,
                    max_tokens=max_new_tokens,
                    seed=_derive_seed(seed, first_prompt + prompt, sample) if temperature else None,
                    detokenize=False,
                    extra_args=dict(extra_args),
                    **own_candidates,
                    **stops,
                )
            except vllm_errors.VLLMValidationError as error:
                raise OptionError(str(error), "vLLM refuses this value; choose another one.") from error

        if num_samples < 1:
            raise OptionError(f"num_samples must be at least 1, got {num_samples}.", "give a larger num_samples.")
        encoded = encode_prompts(self._config, self.tokenizer, prompts, max_new_tokens, self.max_model_len)
        pairs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(num_samples)]
        begin = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": encoded[prompt]} for prompt, _ in pairs],
            [params(*pair) for pair in pairs],
            use_tqdm=progress,
        )
        seconds = time.perf_counter() - begin
        results = [output.outputs[0] for output in outputs]
        tokens = [list(result.token_ids) for result in results]
        self.tokens_per_second = sum(map(len, tokens)) / seconds
        texts = decode_texts(self.tokenizer, encoded, tokens)
        return [
            VllmGeneration(prompts[prompt], text, ids, result.finish_reason)
            for (prompt, _), text, ids, result in zip(pairs, texts, tokens, results, strict=True)
        ]

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _derive_seed(seed: int, prompt: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, prompt, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))
