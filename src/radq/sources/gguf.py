"""Language models that lie on disk as quantised GGUF files.

    convert_gguf("tinyllama.gguf", "tinyllama", torch.bfloat16)
    lm, tokenizer = radq.load("tinyllama")

The folder holds what the quantised weights stand for, as safetensors, with the tokenizer that lies in the file.
"""

import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radq.errors import ModelError, first_line, require_package
from radq.files import MODEL_FILES, atomic_folder
from radq.sources.hub import quiet


def convert_gguf(source: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder, maybe in place of the model that it holds."""
    source = Path(source)
    if not source.is_file():
        raise ModelError(f"there is no file {str(source)!r}.", "give a GGUF file.")
    require_package("gguf", "demo")
    options: dict[str, Any] = {"gguf_file": source.name}
    try:
        with quiet(), _each_call_once():
            loaded: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, IndexError, struct.error) as error:
        raise ModelError(
            f"cannot read the GGUF file {str(source)!r}: {first_line(error).rstrip('.:')}.",
            "it may be truncated, or of an architecture that transformers cannot read from GGUF; copy it again, or "
            "give another.",
        ) from error
    config = loaded.config
    del config.quantization_config  # what is saved is no longer quantised
    config._name_or_path = ""
    with atomic_folder(folder, replaces=MODEL_FILES) as temporary, quiet():
        with torch.device("meta"):  # random weights would take as long as the stored ones
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = {name: values.to(dtype) for name, values in loaded.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@contextmanager
def _each_call_once() -> Iterator[None]:
    """Let transformers read the file once while the block runs, where it reads it three times.

    It also makes the table of the names of all tensors anew for each module. Both take longer than the weights.
    """
    import gguf

    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in originals.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in originals.items():
            setattr(gguf, name, function)
