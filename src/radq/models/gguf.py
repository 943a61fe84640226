"""Language models that lie on disk as quantised GGUF files.

    convert_gguf("tinyllama.gguf", "tinyllama", torch.bfloat16)
    lm, tokenizer = radq.load("tinyllama")

The folder holds what the quantised weights stand for, as safetensors, with the tokenizer that lies in the file.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radq.errors import ModelError, require_package
from radq.models.hub import explained


def convert_gguf(source: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder that transformers can load."""
    source = Path(source)
    if not source.is_file():
        raise ModelError(f"there is no file {str(source)!r}.", "give a GGUF file.")
    require_package("gguf", "demo")
    with explained(source.parent, f"the GGUF file {source.name!r}"):
        options: dict[str, Any] = {"gguf_file": source.name}
        loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
        config: Any = loaded.config
        del config.quantization_config  # what is saved is no longer quantised
        config._name_or_path = ""
        with torch.device("meta"):  # random weights would take as long as the stored ones
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = {name: values.to(dtype) for name, values in loaded.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
