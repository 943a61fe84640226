"""Find and load transformers models and tokenizers by hub name or folder, with errors that say what to do.

Weights come from safetensors only, and no code from a model repository is ever run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from radq.embedded import located
from radq.errors import ModelError, OptionError

ACCELERATORS = ("cuda", "mps", "xpu")


def load_config(name: str | Path) -> PreTrainedConfig:
    name = located(name)
    with explained(name, "a model configuration"):
        return AutoConfig.from_pretrained(name)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    """By hub name or folder; also a tokenizer.json alone, or a folder with GPT-2's encoder.json and vocab.bpe."""
    name = located(name)
    path = Path(name)
    try:
        if path.suffix == ".json" and path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
            return _read_gpt2_tokenizer(path)
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"cannot read a tokenizer from {str(name)!r}: {error}.", "is the file whole?") from error
    with explained(name, "a tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def _read_gpt2_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Byte-level BPE from the two files that GPT-2 was published with."""
    backend = Tokenizer(BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)


def find_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None where the folder has none."""
    name = located(name)
    if Path(name).is_dir() and not list(Path(name).glob("*tokenizer*")) + list(Path(name).glob("vocab.*")):
        return None
    return load_tokenizer(name)


def load_causal_lm(
    name: str | Path, num_layers: int | None = None, dtype: torch.dtype | str = "auto", device: str = "cpu"
) -> PreTrainedModel:
    """A language model in evaluation mode, optionally only its first layers."""
    config = load_config(name)
    if num_layers is not None:
        truncate(config, num_layers)
    return load_weights(AutoModelForCausalLM.from_pretrained, name, config=config, dtype=dtype).to(device).eval()


def load_weights(
    from_pretrained: Callable[..., Any], name: str | Path, unused: tuple[str, ...] = (), **kwargs: Any
) -> Any:
    """Call `from_pretrained`, but refuse the weights it would make up where the folder lacks them.

    Tensors whose names begin with one of `unused` are not needed and may be missing.
    """
    name = located(name)
    with explained(name, "model weights"):
        model, report = from_pretrained(name, use_safetensors=True, output_loading_info=True, **kwargs)
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(unused))
    if missing:
        raise ModelError(
            f"the weights in {str(name)!r} lack {len(missing)} tensors, the first is {missing[0]!r}.",
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


def num_logits(lm: PreTrainedModel) -> int:
    """Tokens that a language model scores: may be more than its tokenizer has."""
    head: Any = lm.get_output_embeddings()
    return head.weight.shape[0]


def find_device(name: str) -> str:
    """The device by that name; "auto" is the accelerator where there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator.type if accelerator is not None and accelerator.type in ACCELERATORS else "cpu"
    try:
        known = torch.empty(0, device=name).device.type in (*ACCELERATORS, "cpu")
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        raise OptionError(f"there is no device {name!r} here.", "use --device auto or cpu.") from error
    if not known:
        raise OptionError(f"radq does not compute on {name!r}.", f"use cpu, {', '.join(ACCELERATORS)} or auto.")
    return name


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' load reports and progress bars: what matters in them, radq raises."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def explained(name: str | Path, what: str) -> Iterator[None]:
    """Turn what transformers raises while loading into one line that names the folder and a way out."""
    hint = "give a folder with config.json and *.safetensors, or a hub name that is cached or reachable."
    if str(name).startswith((".", "/", "~")) and not Path(name).is_dir():
        raise ModelError(f"there is no folder {str(name)!r}.", hint)
    try:
        with quiet():
            yield
    except SafetensorError as error:
        raise ModelError(
            f"a weight file in {str(name)!r} is damaged: {error}.", "it may be truncated; copy or download it again."
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:") if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load {what} from {str(name)!r}: {reason}.", hint) from error
