"""Transformers that read texts token by token: base models, reward models and the experts of baselines alike.

A `Reader` is a transformer and what radq must know about it. A `Reading` is its state after a batch of texts: a value,
so that an old one stays usable for samples, beams, rollback and requests that come and go. Axes: b rows, t time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError
from radq.models import kv_cache
from radq.models.kv_cache import Prefix, Siblings
from radq.models.loading import Wrappable, max_positions, name_positions
from radq.models.prompt_graphs import prompt_graphs
from radq.models.prompt_parts import PartlyRead, prompt_parts, read_texts
from radq.models.vocabulary import Vocabulary, check_vocabulary, find_special_tokens
from radq.numerics import log_probabilities
from radq.sources.peft_adapter import refuse_soft_prompts

TOKENS_PER_FORWARD = 16384  # of prompts, at least
NUMBERS_PER_FORWARD = 2**26  # of hidden states, on an accelerator: small models read more tokens at once, and wait less


@dataclass(frozen=True)
class Reader:
    """A transformer that reads along with a text.

    Args:
        model: a language model, or the backbone of a reward model.
        output: the field of its output that is kept of the last token of a text; "states" keeps outputs of `layers`.
        role: what the model is called in error messages, such as "reward model".
        vocabulary: the tokens it was trained with. Tokens beyond them, which a base model may have, are not read.
        tokenizer: the model's own.
        overhead: the number of tokens that the reader puts before every text, such as a BOS.
        reads_candidates: whether it reads candidates for the next token, as RAD-V does, beside each other.
        layers: layers whose outputs are kept of the last token, side by side; 0 are the input embeddings. With another
            `output` they are kept in the notes of a reading, for guides that read a base model's states.
    """

    model: Wrappable
    output: Literal["logits", "last_hidden_state", "states"]
    role: str
    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase | None = None
    overhead: int = 0
    reads_candidates: bool = False
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        refuse_soft_prompts(self.model)

    @property
    def base_layers(self) -> tuple[int, ...]:
        """The layers whose outputs a host that runs the same model may give, so that this reader need not run it.

        The states after a text are not enough for a reader that reads candidates, too.
        """
        return self.layers if self.output == "states" and not self.reads_candidates else ()

    @property
    def num_known(self) -> int:
        return self.vocabulary.num_known

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def special_tokens(self) -> set[int]:
        return find_special_tokens(self.model.config, self.tokenizer)

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        """Raise if the base model's token ids mean something else than the reader's."""
        check_vocabulary(self.vocabulary, base_size, tokenizer, base_name, self.role)

    def fits(self, columns: int) -> bool:
        """Whether the model has positions for so many tokens, with those that the reader puts before a text."""
        return self.max_positions is None or columns <= self.max_positions

    @cached_property
    def max_positions(self) -> int | None:
        return max_positions(self.model.config)  # too slow to be asked for at every token

    @property
    def tokens_per_forward(self) -> int:
        """The most tokens of prompts that are read at once."""
        if self.device.type == "cpu":
            return TOKENS_PER_FORWARD
        return max(TOKENS_PER_FORWARD, NUMBERS_PER_FORWARD // self.model.config.get_text_config().hidden_size)

    @property
    def context(self) -> int | None:
        """The most tokens of a text that the model has positions for; None if there is no limit."""
        return None if self.max_positions is None else self.max_positions - self.overhead

    def check_length(self, num_tokens: int, hint: str = "shorten the prompt or lower max_new_tokens.") -> None:
        """Raise if the model has not enough positions for a text of so many tokens."""
        if not self.fits(num_tokens + self.overhead):
            before = f" and the {self.overhead} before them" if self.overhead else ""
            raise ContextLengthError(
                f"{num_tokens} tokens{before} do not fit the {self.role}'s {name_positions(self.model.config)}.", hint
            )

    @torch.no_grad()
    def read(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]) -> "Reading":
        """Read a left-padded batch of texts, in which nothing is missing that stands before a text.

        Long texts are read in several forwards, so that memory holds the activations of few tokens at once.
        """
        self.check_columns(input_ids.shape[1])
        if (graphs := prompt_graphs()) and not prompt_parts():
            found = graphs.read(self, input_ids, attention_mask)
            if found is not None:
                (last, notes), prefix = found
                return Reading(self, prefix, last, notes)
        texts = read_texts(PartlyRead(self, input_ids, attention_mask, "last"))
        assert texts.prefix is not None
        return Reading(self, texts.prefix, *self.take_last(texts.outputs[-1]))

    def take_last(
        self, output: Any, notes: Float[Tensor, "b m"] | None = None
    ) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b m"] | None]:
        """Take from the output of a forward what a reading keeps of the last token: the output, and notes.

        The notes are written into `notes` where a tensor is given.
        """
        states = [output.hidden_states[layer][:, -1] for layer in self.layers]
        if self.output == "states":
            return torch.cat(states, dim=-1), None
        return output[self.output][:, -1], torch.cat(states, dim=-1, out=notes) if states else None

    def take_each(self, output: Any) -> Float[Tensor, "b t n"]:
        """Take from the output of a forward what is kept of a token, for every token."""
        return kv_cache.take_states(output, self.layers) if self.output == "states" else output[self.output]

    @torch.no_grad()
    def read_everywhere(
        self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]
    ) -> tuple["Reading", Float[Tensor, "b t n"]]:
        """Read a batch of texts and also return the output at each of their tokens."""
        self.check_columns(input_ids.shape[1])
        texts = read_texts(PartlyRead(self, input_ids, attention_mask, "each"))
        assert texts.prefix is not None
        outputs = torch.cat(texts.outputs, dim=1)
        return Reading(self, texts.prefix, outputs[:, -1].clone()), outputs  # a view would keep those of all tokens

    def take_scores(
        self, output: Any, following: Int[Tensor, "b f"]
    ) -> tuple[Float[Tensor, "b f"], Float[Tensor, "b t n"] | None]:
        """Take from a language model's output the log-probabilities of the tokens that follow, and states of layers."""
        scores = log_probabilities(output[self.output][:, : following.shape[1]], following)
        return scores, kv_cache.take_states(output, self.layers) if self.layers else None

    @torch.no_grad()
    def read_scored(self, input_ids: Int[Tensor, "b t"]) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b t m"] | None]:
        """Read texts by a language model; return the log-probability of each token but the first, and states of layers.

        The states are those of each token, and None if the reader has no layers.
        """
        self.check_columns(input_ids.shape[1])
        texts = read_texts(PartlyRead(self, input_ids, torch.ones_like(input_ids), "scores"))
        scores, states = zip(*texts.outputs, strict=True)
        return torch.cat(scores, dim=1), torch.cat(states, dim=1) if self.layers else None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of forwards of which only the last token counts: they spare the logits of all others."""
        keeps_last = self.output == "logits" and kv_cache.accepts(self.model, "logits_to_keep")
        return {**self.state_arguments, **({"logits_to_keep": 1} if keeps_last else {})}

    @property
    def state_arguments(self) -> dict[str, Any]:
        """The argument that asks for the outputs of all layers, where some are needed."""
        return {"output_hidden_states": True} if self.layers else {}

    def check_columns(self, n: int) -> None:
        """Raise if the model has fewer than n positions."""
        self.check_length(n - self.overhead, "shorten the text.")


@dataclass(frozen=True)
class Reading:
    """A transformer's state after a batch of texts."""

    reader: Reader
    prefix: Prefix
    last: Float[Tensor, "b n"]  # the output at the last token of each text
    notes: Float[Tensor, "b m"] | None = None  # numbers that a guide keeps beside each row
    copies: int = 1  # rows of one text, side by side: GeDi reads each text once for each class

    @property
    def length(self) -> int:
        """The number of tokens of the longest text, with those that the reader has put before it."""
        return self.prefix.input_ids.shape[1]

    def select(self, rows: Int[Tensor, " r"]) -> "Reading":
        """The given rows, in that order and maybe several times."""
        rows = rows.to(self.last.device)
        notes = None if self.notes is None else self.notes[rows]
        return replace(self, prefix=self.prefix.select(rows), last=self.last[rows], notes=notes)

    @staticmethod
    def join(readings: "Sequence[Reading]") -> "Reading":
        """The rows of all readings as one batch, in that order."""
        kv_cache.check_padding(readings[0].reader.model)
        prefix = kv_cache.join([reading.prefix for reading in readings])
        notes = [reading.notes for reading in readings if reading.notes is not None]
        return replace(
            readings[0],
            prefix=prefix,
            last=torch.cat([reading.last for reading in readings]),
            notes=torch.cat(notes) if notes else None,
        )

    def map_readings(self, change: Callable[["Reading"], Any]) -> Any:
        """Change this reading: where a guide has one transformer, its reading is the state of the guide."""
        return change(self)

    def note(self, notes: Float[Tensor, "b m"]) -> "Reading":
        """Return the same reading with other numbers beside each row."""
        return replace(self, notes=notes)

    def read_siblings(self, candidates: Int[Tensor, "b k"]) -> "ReadSiblings":
        """Read candidates for the next token, none of which sees another."""
        self.reader.check_columns(self.length + 1)
        found = kv_cache.read_siblings(self.reader.model, self.prefix, candidates, self.reader.layers)
        return ReadSiblings(self, found)

    @torch.no_grad()
    def read_places(self, places: Int[Tensor, "b p"], candidates: Int[Tensor, "b p k"]) -> Float[Tensor, "b p k n"]:
        """Read candidates at several places of the texts, if the model `takes_siblings`; see `kv_cache.read_places`."""
        self.reader.check_columns(self.length + 1)
        return kv_cache.read_places(self.reader.model, self.prefix, places, candidates, self.reader.layers)

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, " b"]) -> "Reading":
        """The state after one more token per row, all of which the model knows."""
        reader, prefix = self.reader, self.prefix
        if not reader.fits(self.length + 1):
            prefix = prefix.trim()  # the longest text may have left the batch
            reader.check_columns(prefix.input_ids.shape[1] + 1)
        output, prefix = kv_cache.extend(reader.model, prefix, tokens[:, None], **reader.arguments)
        last, notes = reader.take_last(output)
        return replace(self, prefix=prefix, last=last, notes=self.notes if notes is None else notes)

    def advance(self, tokens: Int[Tensor, " b"]) -> "Reading":
        """The state after one more token per row; rows whose token the model does not know stay as they are."""
        tokens = tokens.to(self.last.device)
        unknown = tokens >= self.reader.num_known
        if bool(unknown.all()):
            return self
        return self.hold(unknown, self.read(tokens.masked_fill(unknown, 0)))

    def hold(self, held: Bool[Tensor, " b"], longer: "Reading") -> "Reading":
        """Join the held rows of this reading with the other rows of one that is a token longer."""
        if not bool(held.any()):
            return longer
        if bool(held.all()):
            return self
        prefix = kv_cache.hold_rows(held, self.prefix, longer.prefix)
        return replace(self, prefix=prefix, last=torch.where(held[:, None], self.last, longer.last))

    def rewind(self, n: int) -> "Reading":
        """The state before the last n tokens of every row, all of which the model knows."""
        return replace(self, prefix=self.prefix.crop(n + 1)).read(self.prefix.input_ids[:, -n - 1])

    @torch.no_grad()
    def rewind_scored(self, n: int) -> tuple["Reading", Float[Tensor, " b"]]:
        """Rewind the reading of a language model; return also the log-probability of the n tokens of each row."""
        tokens = self.prefix.input_ids[:, -n - 1 :]
        output, _ = kv_cache.extend(self.reader.model, self.prefix.crop(n + 1), tokens)
        logits = output[self.reader.output]  # (b, n + 1, v)
        scores = log_probabilities(logits[:, :-1], tokens[:, 1:]).sum(1)
        return replace(self, prefix=self.prefix.crop(n), last=logits[:, 0].clone()), scores


@dataclass(frozen=True)
class Glance:
    """The outputs at the last tokens of some rows of a reading.

    Models that do not read candidates need nothing else to score those for the next token.
    """

    reader: Reader
    last: Float[Tensor, "b n"]
    notes: Float[Tensor, "b m"] | None

    @classmethod
    def at(cls, reading: Any, texts: Int[Tensor, " r"]) -> "Glance":
        """Glance at the rows of the given texts, in that order."""
        copies = torch.arange(reading.copies, device=texts.device)
        rows = (reading.copies * texts[:, None] + copies).flatten()
        return cls(reading.reader, reading.last[rows], None if reading.notes is None else reading.notes[rows])


@dataclass(frozen=True)
class ReadSiblings:
    """Candidates that were read after a batch of texts, with which a reading can go on without another forward."""

    reading: Reading
    siblings: Siblings

    @property
    def hidden(self) -> Float[Tensor, "b k d"]:
        return self.siblings.hidden

    def select(self, rows: Int[Tensor, " r"]) -> "ReadSiblings":
        return ReadSiblings(self.reading.select(rows), self.siblings.select(rows))

    def advance(self, tokens: Int[Tensor, " b"], candidates: Int[Tensor, "b k"]) -> Reading:
        """The reading after one more token per row, with a forward where one of them was no candidate."""
        match = candidates == tokens[:, None]
        if not bool(match.any(1).all()):
            return self.reading.advance(tokens)
        index = match.int().argmax(1)
        rows = torch.arange(len(index), device=index.device)
        longer = replace(self.reading, prefix=self.siblings.choose(index), last=self.hidden[rows, index])
        return self.reading.hold(tokens >= self.reading.reader.num_known, longer)
