"""A check of an operator's file against a base model, in seconds: no weights are read.

    for line in check_guides(ServeConfig.read("guides.yaml"), max_model_len=1000):
        print(line)

Without it, a server would find the same mistakes after it has loaded the base model.
"""

from functools import partial
from pathlib import Path
from typing import Any

from radq.errors import ContextLengthError, RadqError
from radq.guides.folders import EXPERT, holds_experts
from radq.guides.spec import GUIDES, find_kind
from radq.registry.config import GuideEntry, ServeConfig
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import ModelSource, check_language_model


def check_guides(config: ServeConfig, max_model_len: int | None = None) -> list[str]:
    """Raise if a server with these guides could not start; return a line about each of them.

    Args:
        max_model_len: the most tokens of a text; by default as many as base model and guides have positions for.
    """
    check_language_model(config.base)
    for name, entry in config.guides.items():
        _explain(name, entry.check)
    model = _BaseModel(config.base, max_model_len)
    return [_explain(name, partial(model.check, entry, name)) for name, entry in config.guides.items()]


def _explain(name: str, check: Any) -> Any:
    """Name the guide in the error of a check."""
    try:
        return check()
    except RadqError as error:
        raise type(error)(f"the guide {name!r}: {error.message}", error.hint) from error


class _BaseModel:
    """The base model, whose tokens and length of texts guides must agree with."""

    def __init__(self, name: str, max_model_len: int | None):
        from radq.models.loading import load_config, max_positions

        source = ModelSource.find(name)
        config = load_config(source)
        self.name, self.tokenizer = name, source.tokenizer
        self.size: int = config.get_text_config().vocab_size
        self.positions, self.length = max_positions(config), max_model_len

    def check(self, entry: GuideEntry, name: str) -> str:
        """Check a guide's vocabulary and positions; return a line about it."""
        from radq.models.vocabulary import check_vocabulary

        vocabulary, positions, overhead = _describe(entry)
        check_vocabulary(vocabulary, self.size, self.tokenizer, self.name)
        room = [self.positions] if positions is None else [self.positions, positions - overhead]
        longest = min((one for one in room if one is not None), default=None)
        if longest is not None and self.length is not None and self.length > longest:
            raise ContextLengthError(
                f"it reads texts of {longest} tokens, and they may have {self.length}.",
                f"give --max-model-len {longest}.",
            )
        low, high = entry.limits
        length = "" if longest is None else f", texts of up to {longest} tokens"
        return f"{name}: {entry.description}, strengths from {low:g} to {high:g}, by default {entry.default:g}{length}"


def _describe(entry: GuideEntry) -> tuple[Any, int | None, int]:
    """The vocabulary of a guide, its positions, and how many of them it needs before a text."""
    from transformers import AutoConfig

    from radq.models.loading import load_config, max_positions
    from radq.models.vocabulary import Vocabulary, read_vocabulary

    if find_kind(entry.folder) in (GUIDES["embedded"], GUIDES["reward"]):
        stored = ModelSource.find(f"{EMBEDDED}:{entry.strength}" if entry.folder == EMBEDDED else entry.folder).config
        backbone = AutoConfig.for_model(**stored["backbone"])
        vocabulary = Vocabulary(*(stored.get("vocabulary") or [backbone.get_text_config().vocab_size]))
        return vocabulary, max_positions(backbone), int(stored.get("prepend_bos", True))
    source = ModelSource.find(Path(entry.folder) / EXPERT if holds_experts(entry.folder) else entry.folder)
    config = load_config(source)
    vocabulary = read_vocabulary(config.get_text_config().vocab_size, source.find_tokenizer())
    return vocabulary, max_positions(config), 1
