"""Long prompts that are read in parts, so that other texts need not wait until all of a prompt is read.

    parts = PromptParts()
    while not parts.read(512, lambda: guide.start(input_ids, attention_mask)):
        ...               # other work, after every 512 tokens, whichever models of the guide have read them
    state = parts.result

The same function is called again and again. Its readers go on where they stopped: the texts of a call of `Reader.read`
are known again by the model and by the tokens. Axes: b rows, t time.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from radq.models import kv_cache
from radq.models.kv_cache import Prefix


@dataclass(eq=False)
class PartlyRead:
    """A left-padded batch of texts, of which a model has read the first columns."""

    reader: Any  # a Reader
    input_ids: Int[Tensor, "b t"]
    attention_mask: Int[Tensor, "b t"]
    keeps: Literal["last", "each", "scores"]  # the output of the last part, or what is taken from that of each part
    outputs: list[Any] = field(default_factory=list)
    prefix: Prefix | None = None
    columns: int = 0

    @property
    def left(self) -> int:
        return self.input_ids.shape[1] - self.columns

    def is_of(self, other: "PartlyRead") -> bool:
        """Whether both are the same texts, which the same model reads for the same outputs."""
        mine, others = ((one.reader.model, one.reader.output, one.reader.layers) for one in (self, other))
        return (
            mine == others
            and self.keeps == other.keeps
            and torch.equal(self.input_ids, other.input_ids)
            and torch.equal(self.attention_mask, other.attention_mask)
        )

    def read(self, columns: int) -> None:
        """Read so many more columns. Several forwards read many, so that memory holds the activations of few tokens."""
        most = max(1, self.reader.tokens_per_forward // len(self.input_ids))
        for first in range(0, columns, most):
            self._forward(min(most, columns - first))

    def _forward(self, columns: int) -> None:
        part = slice(self.columns, self.columns + columns)
        tokens, mask = self.input_ids[:, part], self.attention_mask[:, part]
        reader = self.reader
        arguments = reader.arguments if self.keeps == "last" else reader.state_arguments
        if self.prefix is None:
            output, self.prefix = kv_cache.start(reader.model, tokens, mask, **arguments)
        else:
            output, self.prefix = kv_cache.extend(reader.model, self.prefix, tokens, mask, **arguments)
        self.columns += columns
        if self.keeps == "last":
            self.outputs = [output]
        elif self.keeps == "each":
            self.outputs.append(reader.take_each(output))
        else:  # logits of all tokens would fill memory
            self.outputs.append(reader.take_scores(output, self.input_ids[:, part.start + 1 : self.columns + 1]))


class _Stopped(BaseException):
    """The tokens of a turn are used up. This is no error, so a guide that catches errors does not catch it."""


class PromptParts:
    """How far models have read some prompts."""

    def __init__(self) -> None:
        self.result: Any = None  # of the function, when everything is read
        self._begun: list[PartlyRead] = []
        self._turn = self._room = 0  # tokens that may be read in this turn, and those of them that are left

    def read(self, tokens: int, work: Callable[[], Any]) -> bool:
        """Let the readers of a function read so many tokens together; return whether nothing is left to read."""
        self._turn = self._room = tokens
        token = _USED.set(self)
        try:
            self.result = work()
        except _Stopped:
            return False
        finally:
            _USED.reset(token)
        return True

    def finish(self, texts: PartlyRead) -> PartlyRead:
        """Read texts to their end, or as far as the turn has room."""
        begun = next((one for one in self._begun if one.is_of(texts)), None)
        if begun is None:
            begun = texts
            self._begun.append(texts)
        if begun.left:
            rows = len(begun.input_ids)
            least = int(self._room == self._turn)  # a turn reads something, however many rows there are
            columns = min(begun.left, max(least, self._room // rows))
            begun.read(columns)
            self._room -= columns * rows
        if begun.left:
            raise _Stopped
        return begun


_USED: ContextVar[PromptParts | None] = ContextVar("prompt_parts", default=None)


def prompt_parts() -> PromptParts | None:
    """Return the parts that are read at the moment; None outside of `PromptParts.read`."""
    return _USED.get()


def read_texts(texts: PartlyRead) -> PartlyRead:
    """Read texts to their end; those that are read in turns as far as the turn has room."""
    if parts := prompt_parts():
        return parts.finish(texts)
    texts.read(texts.left)
    return texts
