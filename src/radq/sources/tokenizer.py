"""Tokenizers that transformers does not load by itself."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radq.errors import ModelError


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Read a tokenizer.json, or the folder with GPT-2's encoder.json and vocab.bpe; None for any other path."""
    try:
        if path.suffix == ".json" and path.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
            return _read_gpt2_tokenizer(path)
    except Exception as error:  # tokenizers raises nothing more precise
        raise ModelError(f"cannot read a tokenizer from {str(path)!r}: {error}.", "is the file whole?") from error
    return None


def _read_gpt2_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Byte-level BPE from the two files that GPT-2 was published with."""
    backend = Tokenizer(BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)
