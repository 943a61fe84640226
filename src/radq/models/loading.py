"""Find and load transformers models and tokenizers by hub name or folder, with errors that say what to do.

Weights come from safetensors only, and no code from a model repository is ever run.
"""

import logging
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from radq.errors import ModelError, OptionError, fills_memory
from radq.numerics import emulates
from radq.settings import asked_threads
from radq.sources.model_source import ModelName, ModelSource, require_language_model
from radq.sources.peft_adapter import merge_adapter, refuse_soft_prompts

LOGGER = logging.getLogger(__name__)
ACCELERATORS = ("cuda", "mps", "xpu")
FASTEST = "fastest"  # asked for by name, since texts depend on data type and threads in the last digits of sums
ROUNDS = 7
Model = TypeVar("Model", bound=PreTrainedModel)
Wrappable = Any  # a model of transformers, maybe inside a wrapper such as PEFT's or torch.compile's

if (threads := asked_threads()) is not None:  # also where Python has imported torch before radq
    torch.set_num_threads(threads)


def load_config(name: ModelName) -> PreTrainedConfig:
    """Read the configuration of a language model."""
    source = ModelSource.find(name)
    if source.adapter is not None and source.base is not None:
        config = load_config(source.base)
        if source.adapter.num_labels not in (None, config.num_labels):
            config.num_labels = source.adapter.num_labels
        return config
    with source.explained("a model configuration"):
        config = AutoConfig.from_pretrained(source.place, **source.hub)
    require_language_model(source.place, config.model_type)
    return config


def load_causal_lm(
    name: ModelName,
    num_layers: int | None = None,
    dtype: torch.dtype | str = "auto",
    device: str | None = None,
    **loading: Any,
) -> PreTrainedModel:
    """A language model in evaluation mode, optionally only its first layers.

    It comes to the device, by default the CPU or where a `device_map` says. The data type "auto" is the one in which
    the weights are stored, or float32 on a CPU that emulates it. Other arguments are those of transformers.
    """
    source = ModelSource.find(name, **loading)
    config = load_config(source)
    if num_layers is not None:
        truncate(config, num_layers)
    lm = load_weights(AutoModelForCausalLM.from_pretrained, source, config=config, dtype=dtype, **loading)
    return lm.eval() if loading.get("device_map") is not None else to_device(lm, source, device, dtype)


def to_device(
    model: Model, name: ModelName, device: str | torch.device | None, dtype: torch.dtype | str | None
) -> Model:
    """The model in evaluation mode on a device; in float32 where a CPU has no instructions for the stored data type."""
    model = model.to(device or "cpu").eval()  # pyright: ignore[reportArgumentType]
    if dtype not in (None, "auto") or getattr(model, "is_quantized", False):
        return model
    if not emulates(model.dtype, device or find_device("auto")):  # without a device, it may go to a GPU later
        return model
    slowly = "%r is stored in %s, which this CPU emulates slowly, so it computes in float32. Give a dtype to choose."
    LOGGER.warning(slowly, str(name), str(model.dtype).removeprefix("torch."))
    return model.float()


def load(
    name: ModelName, device: str = "auto", dtype: torch.dtype | str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model in evaluation mode, and its tokenizer.

    >>> lm, tokenizer = radq.load("embedded")
    >>> print(radq.generate(lm, tokenizer, ["The film was"])[0].text)

    Args:
        name: `embedded`, which is SmolLM2-135M-Instruct from a pip package, a name on the hub, or a folder.
        device: "cpu", "cuda", "cuda:1", …; "auto" takes a GPU if there is one.
        dtype: data type of the weights; "auto" takes the one in which they are stored, or float32 on a CPU that has no
            instructions for it.
    """
    source = ModelSource.find(name)
    return load_causal_lm(source, dtype=dtype, device=find_device(device)), source.tokenizer


def load_output_embedding(name: ModelName) -> Float[Tensor, "v d"]:
    """Load the output embedding, whose row e(v) stands for token v in a linear head, and only one layer with it."""
    lm = load_causal_lm(name, num_layers=1)
    head: Any = lm.get_output_embeddings()
    hidden_size = getattr(lm.config.get_text_config(), "hidden_size", None)
    if head is None or head.weight.shape[1] != hidden_size:
        raise ModelError(
            f"{str(name)!r} has no output embedding with the {hidden_size} numbers per token of its hidden states.",
            "choose another backbone; RAD-Q cannot be made from this one.",
        )
    return head.weight.detach()


def load_weights(
    from_pretrained: Callable[..., Any], name: ModelName, unused: tuple[str, ...] = (), **kwargs: Any
) -> Any:
    """Call `from_pretrained`, but raise an error where it would draw random weights because the folder lacks them.

    Tensors whose names begin with one of `unused` are not needed and may be missing. The folder of an adapter of PEFT
    becomes its base model with the adapter merged into the weights.
    """
    source = ModelSource.find(name, **kwargs)
    if source.adapter is not None and source.base is not None:
        replaced = tuple(f"{module}." for module in source.adapter.replaced)
        model = load_weights(from_pretrained, source.base, (*unused, *replaced), **kwargs)
        depths = (config.get_text_config().num_hidden_layers for config in (model.config, load_config(source.base)))
        return merge_adapter(model, source.adapter, whole=len({*depths}) == 1)
    for option, needed in {"use_safetensors": True, "output_loading_info": False}.items():
        if kwargs.pop(option, needed) != needed:
            raise OptionError(
                f"{option} is {not needed}.",
                f"leave it at {needed}: radq reads safetensors and refuses missing weights.",
            )
    if "subfolder" not in kwargs:
        source.require_weights()
    with source.explained("model weights"):
        model, report = from_pretrained(
            source.place, use_safetensors=True, output_loading_info=True, **{**source.hub, **kwargs}
        )
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(unused))
    if missing:
        raise ModelError(
            f"the weights in {source.place!r} lack {len(missing)} tensors, the first is {missing[0]!r}.",
            "is the folder complete, and does its config.json belong to these weights?",
        )
    return model


def truncate(config: PreTrainedConfig, num_layers: int) -> None:
    """Keep the first layers; per-layer lists of the configuration (such as `layer_types`) shrink with them."""
    depth = config.num_hidden_layers
    if not 1 <= num_layers <= depth:
        raise OptionError(f"num_layers is {num_layers}.", f"the backbone has {depth} layers; choose 1 to {depth}.")
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers


def max_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions in which a text's results do not depend on other texts; None without a limit.

    Longrope takes other frequencies for the whole batch as soon as one text is longer than the original context, also
    for keys that lie in a cache already. So it is read up to there.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # one, or one per layer type
        if parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


def name_positions(config: PreTrainedConfig) -> str:
    """The number of positions in words, for messages, with the reason where config.json names a larger number."""
    positions = max_positions(config)
    more = getattr(config.get_text_config(), "max_position_embeddings", None) != positions
    return f"{positions} positions" + (" (beyond them, longrope would depend on the other texts)" if more else "")


def hidden_size(config: PreTrainedConfig) -> int:
    """The size of the last hidden states. It is that of the output embeddings, to which OPT-350m projects them."""
    return getattr(config, "word_embed_proj_dim", None) or config.hidden_size


def find_backbone(lm: Wrappable, name: ModelName) -> PreTrainedModel:
    """The transformer below a language model's head: the class that `AutoModel` would make."""
    refuse_soft_prompts(lm)
    wanted = MODEL_MAPPING.get(type(lm.config), None)
    found: Any = next((module for module in lm.modules() if type(module) is wanted), None)
    width = lm.get_output_embeddings().weight.shape[1]
    if found is None or not hasattr(lm.config, "hidden_size") or width != hidden_size(lm.config):
        raise ModelError(
            f"{str(name)!r} is a {type(lm).__name__}, which has no plain decoder below its head.",
            "radq takes decoder-only language models of text (GPT-2, LLaMA, Qwen3, GPT-NeoX, Gemma-3, Mistral, …).",
        )
    return found


def num_logits(lm: Wrappable) -> int:
    """The number of tokens that a language model scores, which may be more than its tokenizer has."""
    return lm.get_output_embeddings().weight.shape[0]


def find_device(name: str) -> str:
    """Check the name of a device. "auto" becomes the accelerator if there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None and accelerator.type in ACCELERATORS else "cpu"
    try:
        known = torch.empty(0, device=name).device.type in (*ACCELERATORS, "cpu")
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        if fills_memory(error):  # the device is there
            raise
        raise OptionError(f"there is no device {name!r} here.", "use --device auto or cpu.") from error
    if not known:
        raise OptionError(f"radq does not compute on {name!r}.", f"use cpu, {', '.join(ACCELERATORS)} or auto.")
    return name


def check_one_device(model: PreTrainedModel) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"device_map spreads the reward model over {', '.join(devices)}.",
            "a reward model stands on one device: give device='cuda', say, or device_map={'': 0}.",
        )


@contextmanager
def evaluating(model: Wrappable) -> Iterator[None]:
    """Turn dropout off inside the block, and put the model back into its former mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# --- a short trial of data types and threads, which decides --dtype fastest ---


def choose_dtype(dtype: str, base: ModelName, device: str) -> str:
    """The data type that is asked for; where it is `fastest`, the one that wins a trial. A trial also sets the threads.

    On a GPU it is bfloat16, or float16 on one without bfloat16: no trial is needed for that.
    """
    if dtype != FASTEST:
        return dtype
    if not device.startswith("cpu"):
        return "bfloat16" if not device.startswith("cuda") or torch.cuda.is_bf16_supported(False) else "float16"
    times = _try_all(base)
    (threads, best), seconds = min(times.items(), key=lambda trial: trial[1])
    torch.set_num_threads(threads)
    slowest = max(times.values()) / seconds
    LOGGER.warning("%s with %d threads is fastest here, by a factor of up to %.1f.", best, threads, slowest)
    return best


def _try_all(base: ModelName) -> dict[tuple[int, str], float]:
    """The seconds of a step of the base model's first layers, with random weights, by threads and data type."""
    config = load_config(base)
    truncate(config, min(2, config.num_hidden_layers))
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    usual = torch.get_num_threads()
    times: dict[tuple[int, str], float] = {}
    for dtype, threads in product(("float32", "bfloat16"), sorted({1, (usual + 1) // 2, usual})):
        torch.set_num_threads(threads)
        times[threads, dtype] = _time_step(lm.to(getattr(torch, dtype)))
    torch.set_num_threads(usual)
    return times


@torch.no_grad()
def _time_step(lm: PreTrainedModel) -> float:
    """The shortest of some steps of one token; the first one prepares things."""
    tokens = torch.zeros(1, 1, dtype=torch.long)
    return min(timeit.repeat(lambda: lm(input_ids=tokens, use_cache=False), repeat=ROUNDS, number=1))
