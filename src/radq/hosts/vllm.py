"""Guided decoding inside vLLM: a logits processor for vLLM's server, and an engine that continues many prompts.

    RADQ_GUIDES=guides.yaml vllm serve gpt2-large --max-model-len 1000 \\
        --logits-processors radq.hosts.vllm:GuidedProcessor

The operator of the server writes guides.yaml, see `radq.registry.config`. A client names guides in
`SamplingParams.extra_args` or, over HTTP, in `vllm_xargs`; `radq.hosts.guidance` reads these arguments.
"""

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
import yaml

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends, check_counts
from radq.decoding.text import decode_texts, encode_prompts
from radq.errors import ContextLengthError, MemoryLimitError, OptionError, require_package
from radq.guides.spec import OPTIONS, GuideSpec
from radq.hosts.base_states import reads_shown, show_layers
from radq.hosts.batching import Steerer
from radq.hosts.drafts import DraftRequest, Drafts, DraftSteerer, check_drafts
from radq.hosts.follower import DeviceRequest, GuidedRequest, HostRequest
from radq.hosts.guidance import LOGGER, SEED, TICKET, find_config, find_config_for_client, read_guidance
from radq.models.loading import load_config, max_positions
from radq.numerics import available_memory
from radq.registry.config import NAME, ServeConfig
from radq.registry.loaded_guides import LoadedGuides
from radq.settings import renamed
from radq.sources.model_source import ModelSource

first_runner: Any = require_package("vllm.v1.sample.logits_processor", "vllm")
second_runner: Any = require_package("vllm.v1.worker.gpu.sample.logits_processor", "vllm")
vllm_errors: Any = require_package("vllm.exceptions", "vllm")
platforms: Any = require_package("vllm.platforms", "vllm")
parallel_state: Any = require_package("vllm.distributed.parallel_state", "vllm")

PROCESSOR = "GuidedProcessor"
LONGEST = 2048  # default context length of the engine: a shorter context leaves memory for more texts
HEADROOM = 8  # room for tokens that guides put before a text: a BOS, maybe a control code
WIDEST = 2**31 - 1  # candidates, for the engine, whose operator is its only client
STRONGEST = 1e30
GIB = 2**30


PROCESSORS: "WeakSet[GuidedProcessor]" = WeakSet()  # of this process


class GuidedProcessor(first_runner.LogitsProcessor, second_runner.LogitsProcessor):
    """A logits processor that steers guided requests. It has the interfaces of both of vLLM's model runners.

    vLLM divides logits by the temperature after this, the shift included, so the shift is multiplied by it here.
    """

    guides_file: ClassVar[str | None] = None  # by default the one that the environment variable names

    def __init__(self, vllm_config: Any, place: Any, is_pin_memory: bool | None = None):
        """The first runner passes a device as `place`, the second one an object with the tokens of all requests."""
        self._requests: dict[int, Any] = {}  # the guided ones by their slots in the batch
        self._states = place
        device = torch.device(getattr(place, "device", place))
        loaded = LoadedGuides.load(find_config(self.guides_file).guides, str(device))
        model = vllm_config.model_config
        shown = show_layers(loaded.guides, vllm_config)
        self._end = _check_engine(vllm_config, loaded.guides, shown)
        # Whether no other process draws the same tokens and tells about them. Under tensor parallelism all ranks draw
        # the tokens of all requests, unless vLLM shares the requests out among them.
        parallel = vllm_config.parallel_config
        draws_own = parallel.tensor_parallel_size == 1 or parallel.enable_batch_sharded_sampling
        self.answers = draws_own or parallel_state.get_tensor_model_parallel_rank() == 0
        size = (vllm_config.scheduler_config.max_num_seqs, model.max_model_len)
        self.tells_details = vllm_config.speculative_config is None  # drafts are not recorded
        if self.tells_details:
            self.steerer = Steerer(loaded, *size, device, shown)
        else:
            self.steerer = DraftSteerer(loaded, *size, device, shown, most=1 + vllm_config.num_speculative_tokens)
        _check_memory(self.steerer, vllm_config)
        if "raw" in str(model.logprobs_mode):
            LOGGER.info(
                "radq: log-probabilities in responses are the base model's; "
                "--logprobs-mode processed_logprobs gives those of the guided distribution."
            )
        PROCESSORS.add(self)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse the mistakes of a client, in words that name no file of the server."""
        read_guidance(find_config_for_client(cls.guides_file), sampling_params.extra_args, sampling_params.temperature)

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        requests = self._requests if ctx is None else self._read_context(ctx)
        tokens: Any = None if ctx is None else ctx.input_ids
        if ctx is not None and not self.tells_details:
            requests = {request.slot: request for request in requests.values()}
            tokens = Drafts(ctx.expanded_idx_mapping, ctx.expanded_local_pos, tokens, ctx.pos)
        if requests:
            self.steerer.steer(logits, requests, tokens)
        return logits

    # --- the first runner: requests stand at the rows of the batch, and move between them ---

    def update_state(self, batch_update: Any) -> None:
        if batch_update is not None:
            first_runner.process_dict_updates(self._requests, batch_update, partial(self._make_request, HostRequest))
            self.steerer.retain(self._requests.values())

    # --- the second runner: a request keeps its slot, and a mapping from rows to slots comes with every step ---

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        make = DeviceRequest if self.tells_details else partial(DraftRequest, lengths=self._states.total_len)
        request = self._make_request(make, sampling_params, self._states.all_token_ids, req_idx)
        self._requests.pop(req_idx, None)
        if request is not None:
            self._requests[req_idx] = request
        return request is not None

    def _read_context(self, ctx: Any) -> dict[int, Any]:
        """Find the guided requests of this step by their rows. A prompt that is read in part draws no token yet."""
        rows: dict[int, Any] = {}
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            request = self._requests.get(slot)
            length = int(ctx.seq_lens_upper_bound_np[row])  # the exact length, if no tokens are speculated
            if request is not None and length >= self._states.prefill_len.np[slot]:
                request.size = length
                rows[row] = request
        return rows

    # --- both ---

    def _make_request(self, make: Callable[..., GuidedRequest], params: Any, *text: Any) -> GuidedRequest | None:
        """Make a request of its SamplingParams, which were checked when it came, and its text; None if not guided.

        The number of a text among those of its ticket is known by its seed, since vLLM gives each of them its own.
        """
        guidance = read_guidance(find_config(self.guides_file), params.extra_args, params.temperature)
        if guidance is None:
            return None
        stops = tuple(token for token in (params.eos_token_id, *(params.stop_token_ids or ())) if token is not None)
        ticket, first = ((params.extra_args or {}).get(name) for name in (TICKET, SEED))
        return make(
            guidance,
            *text,
            end=(stops or (self._end,))[0],
            stops=stops,
            ticket=None if ticket is None else str(ticket),
            choice=params.seed - first if isinstance(first, int) and isinstance(params.seed, int) else 0,
        )


def __getattr__(name: str) -> Any:
    """Make a processor for the guides of one file, so that several engines in a process have their own guides.

    Its name holds the path, so that any process can make it.
    """
    prefix, _, path = name.partition("_")
    if prefix != PROCESSOR or not path:
        raise AttributeError(name)
    return _make_processor(bytes.fromhex(path).decode())


@lru_cache
def _make_processor(path: str) -> type[GuidedProcessor]:
    return type(processor_name(path), (GuidedProcessor,), {"guides_file": path, "__module__": __name__})


def processor_name(path: str) -> str:
    return f"{PROCESSOR}_{path.encode().hex()}"


def _check_engine(vllm_config: Any, guides: Sequence[Any], shown: tuple[int, ...]) -> int:
    """Raise at the start if guides would fail in the middle of a batch; return a token that ends texts."""
    model = vllm_config.model_config
    if vllm_config.speculative_config is not None:
        check_drafts([guide for guide in guides if not reads_shown(guide, shown)], model.get_vocab_size())
    if model.enable_prompt_embeds:
        raise OptionError("guides cannot read prompts that are embeddings.", "turn enable_prompt_embeds off in vLLM.")
    tokenizer = ModelSource.find(model.tokenizer).tokenizer
    for guide in guides:
        guide.check_vocabulary(model.get_vocab_size(), tokenizer, model.model)
        try:
            guide.check_length(model.max_model_len)
        except ContextLengthError as error:
            raise ContextLengthError(error.message, "give vLLM a smaller max_model_len.") from error
    end: Any = tokenizer.eos_token_id
    return end or 0


def _check_memory(steerer: Steerer, vllm_config: Any) -> None:
    """Log how much memory the guides' states may take up, and refuse to start if less is free."""
    rows, length = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    planned, free = steerer.plan_bytes(), available_memory(str(steerer.device))
    LOGGER.info(
        "radq: %s guide models; their states of %d texts of %d tokens take up to %.2f GiB.",
        len(steerer.followers),
        rows,
        length,
        planned / GIB,
    )
    if free is not None and steerer.device.type == "cpu":
        free -= getattr(vllm_config.cache_config, "cpu_kvcache_space_bytes", None) or 0
    if free is not None and planned > free:
        fitting = max(1, int(rows * free / planned)) if free > 0 else 1
        raise MemoryLimitError(
            f"the guides' states of {rows} texts of {length} tokens take {planned / GIB:.1f} GiB, and "
            f"{max(free, 0) / GIB:.1f} GiB are free.",
            f"give vLLM --max-num-seqs {fitting}, or a smaller --max-model-len.",
        )


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
        ends: what decides when a guided text ends, see `radq.Steering`.
        options: arguments of `vllm.LLM`. Lower its `gpu_memory_utilization`, since guides need memory too.
    """

    def __init__(
        self,
        base: str | Path,
        guides: Mapping[str, str | GuideSpec | Sequence[str]] | None = None,
        max_model_len: int | None = None,
        ends: Ends = "base",
        **options: Any,
    ):
        self.guides = split_guides(guides or {})
        source = ModelSource.find(base)
        self.tokenizer, self._config = source.tokenizer, load_config(source)
        positions = max_positions(self._config) or LONGEST
        self.max_model_len = max_model_len or min(LONGEST, positions - (HEADROOM if guides else 0))
        self.tokens_per_second = 0.0  # in the last call of `generate`
        self._folder = tempfile.TemporaryDirectory(prefix="radq-")
        if guides:
            path = Path(self._folder.name) / "guides.yaml"
            entries = {name: entry for parts in self.guides.values() for name, entry in parts.items()}
            config = {"guides": entries, "limits": {"top_k": WIDEST}, "defaults": {"ends": ends}}
            path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            self._guides_config = ServeConfig.read(path)
            options = {"logits_processors": [f"radq.hosts.vllm:{processor_name(str(path))}"], **options}
        if platforms.current_platform.is_cpu():  # vLLM 0.32 fails there on a seeded request that is read in chunks
            options = {"enable_chunked_prefill": False, **options}
        self._vllm = require_package("vllm", "vllm")
        self.llm: Any = self._vllm.LLM(source.place, max_model_len=self.max_model_len, **options)

    @renamed(num_samples="samples")
    def generate(
        self,
        prompts: Sequence[str],
        guide: str | None = None,
        beta: float | Sequence[float] | None = None,
        top_k: int | None = 20,
        top_p: float | None = None,
        temperature: float = 1.0,
        max_new_tokens: int = 20,
        samples: int = 1,
        seed: int = 0,
        *,
        kl_budget: float | None = DEFAULT_KL_BUDGET,
        stop_token_ids: Sequence[int] | None = None,
        first_prompt: int = 0,
        progress: bool = False,
    ) -> list[VllmGeneration]:
        """Continue prompts as `radq.generate` does.

        `guide` is one of the names in `guides`, and `beta` replaces its strengths, in the order of the specification.
        The random numbers of sample s of prompt p depend on (seed, p, s) alone. They differ from `radq.generate`'s.
        """
        check_counts(samples=samples)
        options: dict[str, Any] = {"temperature": temperature, "max_tokens": max_new_tokens, "detokenize": False}
        if stop_token_ids is not None:
            options |= {"stop_token_ids": list(stop_token_ids), "ignore_eos": True}
        if guide is None:
            options |= {"top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
        else:
            width = self._config.get_text_config().vocab_size if top_k is None else top_k
            asked = {**self._strengths(guide, beta), "top_k": width, "kl_budget": kl_budget}
            options["extra_args"] = {"radq": asked, "radq_top_p": top_p}
            read_guidance(self._guides_config, options["extra_args"], temperature)

        def make_params(prompt: int, sample: int) -> Any:
            own_seed = _derive_seed(seed, first_prompt + prompt, sample) if temperature else None
            try:
                return self._vllm.SamplingParams(seed=own_seed, **copy.deepcopy(options))
            except vllm_errors.VLLMValidationError as error:
                raise OptionError(str(error), "vLLM refuses this value; choose another one.") from error

        encoded = encode_prompts(self._config, self.tokenizer, prompts, max_new_tokens, self.max_model_len)
        pairs = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)]
        begin = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": encoded[prompt]} for prompt, _ in pairs],
            [make_params(*pair) for pair in pairs],
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

    def _strengths(self, guide: str, beta: float | Sequence[float] | None) -> dict[str, float]:
        if guide not in self.guides:
            raise OptionError(f"there is no guide {guide!r}.", f"the guides are {', '.join(self.guides) or 'none'}.")
        parts = {name: entry["suggested"] for name, entry in self.guides[guide].items()}
        if beta is None:
            return parts
        numbers = list(beta) if isinstance(beta, Sequence) else [beta]
        if len(numbers) != len(parts):
            raise OptionError(
                f"beta must be one number for each strength of the guide {guide!r}, got {beta!r}.",
                f"it has {len(parts)}.",
            )
        return dict(zip(parts, numbers, strict=True))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> "VllmEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split_guides(guides: Mapping[str, str | GuideSpec | Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Split each guide into entries of the operator's file, one for each of its strengths."""
    entries: dict[str, dict[str, Any]] = {}
    for number, (name, specifications) in enumerate(guides.items()):
        own: list[dict[str, Any]] = []
        for specification in [specifications] if isinstance(specifications, str | GuideSpec) else specifications:
            guide = specification if isinstance(specification, GuideSpec) else GuideSpec.parse(specification)
            options = "".join(f",{key}={value!r}" for key, value in guide.numbers.items() if key in OPTIONS)
            own += [
                {"guide": f"{guide.folder}:{key}{options}", "range": [-STRONGEST, STRONGEST], "suggested": value}
                for key, value in guide.numbers.items()
                if key not in OPTIONS
            ]
        short = name if NAME.fullmatch(name) else f"guide{number}"
        names = [short] if len(own) == 1 else [f"{short}.{place}" for place in range(len(own))]
        entries[name] = dict(zip(names, own, strict=True))
    return entries


def _derive_seed(seed: int, prompt: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, prompt, sample]).generate_state(1, np.uint64)[0] >> np.uint64(1))
