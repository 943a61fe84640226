"""Transformers that read texts token by token: base models, reward models and the experts of baselines alike.

A `Reader` is a transformer and what radq must know about it. A `Reading` is its state after a batch of texts.
Axes: b rows, t time, k candidates.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.generic import ModelOutput

from radq.errors import ContextLengthError
from radq.models import kv_cache
from radq.models.kv_cache import Prefix, Siblings
from radq.models.loading import Wrappable, max_positions, name_positions
from radq.models.prefill import InTurns, Turn, finish
from radq.models.vocabulary import Vocabulary, check_vocabulary
from radq.numerics import Candidates, PlacedCandidates, Positions, Texts, Tokens, log_probabilities, texts_per_forward
from radq.sources.peft_adapter import refuse_soft_prompts

T = TypeVar("T")
Taken = tuple[Float[Tensor, "b n"], Float[Tensor, "b m"] | None]  # what a reading keeps of the last token of each text
TOKENS_PER_FORWARD = 16384  # of prompts, at least
NUMBERS_PER_FORWARD = 2**26  # of hidden states, on an accelerator: small models read more tokens at once, and wait less


@dataclass(frozen=True)
class Reader:
    """A transformer that reads along with a text."""

    model: Wrappable  # a language model, or the backbone of a reward model
    # The field of its output that is kept of the last token of a text; "states" keeps outputs of `layers`.
    output: Literal["logits", "last_hidden_state", "states"]
    role: str  # what the model is called in error messages, such as "reward model"
    vocabulary: Vocabulary  # the tokens it was trained with; a base model may have more, which are not read
    tokenizer: PreTrainedTokenizerBase | None = None  # the model's own
    overhead: int = 0  # the number of tokens that the reader puts before every text, such as a BOS
    reads_candidates: bool = False  # whether it reads candidates for the next token beside each other, as RAD-V does
    # Layers whose outputs are kept of the last token, side by side; 0 are the input embeddings. With another `output`
    # they are kept in the notes of a reading, for guides that read a base model's states.
    layers: tuple[int, ...] = ()
    keeps_scores: bool = False  # whether the notes of readings are log P of the tokens of each text, and their number

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

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        """Raise if the base model's token ids mean something else than the reader's."""
        check_vocabulary(self.vocabulary, base_size, tokenizer, base_name, self.role)

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
        if self.context is not None and num_tokens > self.context:
            before = f" and the {self.overhead} before them" if self.overhead else ""
            raise ContextLengthError(
                f"{num_tokens} tokens{before} do not fit the {self.role}'s {name_positions(self.model.config)}.", hint
            )

    def read(self, input_ids: Texts, attention_mask: Texts) -> "ValueReading":
        """Read a left-padded batch of texts, in which nothing is missing that stands before a text."""
        return finish(self.read_in_turns(input_ids, attention_mask, Turn()))

    def read_in_turns(self, input_ids: Texts, attention_mask: Texts, turn: Turn) -> InTurns["ValueReading"]:
        """Read as `read` does, as much at once as the turn has room for."""
        self.check_columns(input_ids.shape[1])
        if turn.graphs is not None:
            key = (self.model, self.layers)
            if (found := turn.graphs.read(key, self._read_with_masks, input_ids, attention_mask)) is not None:
                (last, notes), prefix = found
                return ValueReading(self, prefix, last, notes)
        outputs: deque[ModelOutput] = deque(maxlen=1)
        prefix = yield from self._forwards(input_ids, attention_mask, turn, self.arguments, outputs.append)
        return ValueReading(self, prefix, *self.take_last(outputs[0]))

    def _read_with_masks(self, input_ids: Texts, attention_mask: Texts) -> tuple[Taken, Prefix]:
        output, prefix = kv_cache.read_with_masks(self.model, input_ids, attention_mask, **self.arguments)
        return self.take_last(output), prefix

    def _forwards(
        self,
        input_ids: Texts,
        attention_mask: Texts,
        turn: Turn,
        arguments: Mapping[str, bool | int],
        keep: Callable[[ModelOutput], None],
        tokens_per_forward: int | None = None,
    ) -> InTurns[Prefix]:
        """Read texts by several forwards, so that memory holds the activations of few tokens at once."""
        self.check_columns(input_ids.shape[1])
        most = max(1, (tokens_per_forward or self.tokens_per_forward) // len(input_ids))
        prefix, begin, room = Prefix.empty(input_ids), 0, 0
        while begin < input_ids.shape[1]:
            room = room or turn.take(len(input_ids), input_ids.shape[1] - begin)
            if not room:
                yield
                continue
            part = slice(begin, begin + min(room, most))
            output, prefix = kv_cache.extend(
                self.model, prefix, input_ids[:, part], attention_mask[:, part], **arguments
            )
            keep(output)
            begin, room = part.stop, room - (part.stop - begin)
        return prefix

    def take_last(self, output: ModelOutput, notes: Float[Tensor, "b m"] | None = None) -> Taken:
        """Take what a reading keeps of the last token: the output, and notes, which are written into `notes`."""
        states = [output["hidden_states"][layer][:, -1] for layer in self.layers]
        if self.output == "states":
            return torch.cat(states, dim=-1), None
        return output[self.output][:, -1], torch.cat(states, dim=-1, out=notes) if states else None

    def take_each(self, output: ModelOutput) -> Float[Tensor, "b t n"]:
        """Take from the output of a forward what is kept of a token, for every token."""
        return kv_cache.take_states(output, self.layers) if self.output == "states" else output[self.output]

    def read_everywhere(self, input_ids: Texts, attention_mask: Texts, turn: Turn) -> InTurns[Float[Tensor, "b t n"]]:
        """Read a batch of texts in turns; return the output at each of their tokens."""
        parts: list[Tensor] = []
        yield from self._forwards(
            input_ids, attention_mask, turn, self.state_arguments, lambda output: parts.append(self.take_each(output))
        )
        return torch.cat(parts, dim=1)

    def read_scored(
        self, input_ids: Texts, attention_mask: Texts, turn: Turn
    ) -> InTurns[tuple["ValueReading", Float[Tensor, "b n"], Float[Tensor, "b t m"] | None]]:
        """Read in turns; return also the log-probability of each token but the first, and the states of the layers."""
        scores: list[Tensor] = []
        states: list[Tensor] = []
        last: deque[Tensor] = deque(maxlen=1)

        def keep(output: ModelOutput) -> None:
            begin = sum(part.shape[1] for part in scores) + 1
            logits = output[self.output]  # of all tokens they would fill memory
            following = input_ids[:, begin : begin + logits.shape[1]]
            scores.append(log_probabilities(logits[:, : following.shape[1]], following))
            last.append(logits[:, -1].clone())
            if self.layers:
                states.append(kv_cache.take_states(output, self.layers))

        most = texts_per_forward(self.vocabulary.size, self.device)
        prefix = yield from self._forwards(input_ids, attention_mask, turn, self.state_arguments, keep, most)
        found = torch.cat(scores, dim=1), torch.cat(states, dim=1) if states else None
        return ValueReading(self, prefix, last[0]), *found

    @cached_property
    def arguments(self) -> dict[str, bool | int]:
        """The arguments of forwards of which only the last token counts: they spare the logits of all others."""
        keeps_last = self.output == "logits" and kv_cache.accepts(self.model, "logits_to_keep")
        return {**self.state_arguments, **({"logits_to_keep": 1} if keeps_last else {})}

    @property
    def state_arguments(self) -> dict[str, bool | int]:
        """The argument that asks for the outputs of all layers, where some are needed."""
        return {"output_hidden_states": True} if self.layers else {}

    def check_columns(self, n: int) -> None:
        """Raise if the model has fewer than n positions."""
        self.check_length(n - self.overhead, "shorten the text.")


@runtime_checkable
class State(Protocol):
    """The state of a guide after a batch of texts: a `Reading`, several of them, or whatever else a guide keeps.

    All methods return the state to go on from. Readings in slots are changed in place.
    """

    @abstractmethod
    def select(self: T, texts: Int[Tensor, " r"]) -> T:
        """The given texts, in that order and maybe several times: samples, beams and finished rows need it."""

    @staticmethod
    @abstractmethod
    def join(states: Sequence[Any]) -> Any:
        """The rows of several states as one batch, in that order, as requests need that come while others run."""

    @abstractmethod
    def rewind(self: T, n: int) -> T:
        """The state before the last n tokens of every row, all of which the guide knows."""

    @abstractmethod
    def map_readings(self, change: "Callable[[Reading], Reading]") -> "State":
        """The state with other readings: `change` is called for the reading of each transformer."""


class Reading(State):
    """The state of a transformer after a batch of texts, and so the state of a guide that has one transformer.

    The methods of a `ValueReading` return new ones. Those of a `SlotReading` (`radq.models.slots`) change it in place
    and return it, so that nobody uses a reading again after having gone on from it. An `OutputReading` has no rows.
    None keeps its siblings when it is joined.
    """

    reader: Reader
    last: Float[Tensor, "b n"]  # the output at the last token of each row
    notes: Float[Tensor, "b m"] | None  # beside each row: states of the reader's layers, or what a guide keeps there
    copies: int  # rows of one text, side by side: GeDi reads each text once for each class
    siblings: Siblings | None  # candidates read after the texts; `advance` goes on with one of them without a forward
    all_known = False  # whether the model knows every token that may be a candidate

    @abstractmethod
    def advance(self, tokens: Tokens) -> "Reading":
        """The state after one more token per row; rows whose token the model does not know stay as they are."""

    @abstractmethod
    def drop_siblings(self) -> "Reading":
        """The reading without candidates, so that any token can follow."""

    def note(self, notes: Float[Tensor, "b m"]) -> "Reading":
        """The same reading with other numbers beside each row."""
        raise NotImplementedError

    def read(self, tokens: Tokens) -> "Reading":
        """The state after one more token per row, all of which the model knows."""
        raise NotImplementedError

    def read_siblings(self, candidates: Candidates) -> "Reading":
        """The reading with candidates for the next token, none of which sees another; unknown ones are not read."""
        raise NotImplementedError

    def map_readings(self, change: "Callable[[Reading], Reading]") -> "Reading":
        return change(self)

    def show(self, texts: Int[Tensor, " r"]) -> "OutputReading":
        """The outputs at the last tokens of the given texts, in that order, without keys and values."""
        rows = self.rows_of(texts)
        last, notes = self.last[rows], None if self.notes is None else self.notes[rows]
        return OutputReading(self.reader, lambda: last, notes)

    def rows_of(self, texts: Int[Tensor, " r"]) -> Int[Tensor, " rc"]:
        """The rows of texts, each of which has several side by side."""
        if self.copies == 1:
            return texts
        return (self.copies * texts[:, None] + torch.arange(self.copies, device=texts.device)).flatten()


@dataclass(frozen=True)
class ValueReading(Reading):
    """A reading that stays as it is: an old one can be used for samples, beams and rollback."""

    reader: Reader
    prefix: Prefix
    last: Float[Tensor, "b n"]
    notes: Float[Tensor, "b m"] | None = None
    copies: int = 1
    siblings: Siblings | None = None

    @property
    def length(self) -> int:
        """The number of tokens of the longest text, with those that the reader has put before it."""
        return self.prefix.input_ids.shape[1]

    def select(self, texts: Int[Tensor, " r"]) -> "ValueReading":
        rows = self.rows_of(texts.to(self.last.device))
        return replace(
            self,
            prefix=self.prefix.select(rows),
            last=self.last[rows],
            notes=None if self.notes is None else self.notes[rows],
            siblings=None if self.siblings is None else self.siblings.select(rows),
        )

    @staticmethod
    def join(states: "Sequence[ValueReading]") -> "ValueReading":
        kv_cache.check_padding(states[0].reader.model)
        notes = [state.notes for state in states if state.notes is not None]
        return replace(
            states[0],
            prefix=kv_cache.join([state.prefix for state in states]),
            last=torch.cat([state.last for state in states]),
            notes=torch.cat(notes) if notes else None,
            siblings=None,
        )

    def note(self, notes: Float[Tensor, "b m"]) -> "ValueReading":
        return replace(self, notes=notes)

    def read_siblings(self, candidates: Candidates) -> "ValueReading":
        self.reader.check_columns(self.length + 1)
        known = candidates * (candidates < self.reader.num_known)
        found = kv_cache.read_siblings(self.reader.model, self.prefix, known, self.reader.layers)
        return replace(self, siblings=replace(found, candidates=candidates))

    def drop_siblings(self) -> "ValueReading":
        return replace(self, siblings=None)

    @torch.no_grad()
    def read_places(self, places: Positions, candidates: PlacedCandidates) -> Float[Tensor, "b p k n"]:
        """Read candidates at several places of the texts in one forward, if the model `takes_siblings`.

        A place is the number of the text's tokens, those put before it included, that its candidates follow.
        """
        self.reader.check_columns(self.length + 1)
        model, positions = self.reader.model, places.repeat_interleave(candidates.shape[2], dim=1)
        states, _ = kv_cache.read_branches(model, self.prefix, positions, candidates.flatten(1), self.reader.layers)
        return states.unflatten(1, candidates.shape[1:])

    @torch.no_grad()
    def read(self, tokens: Tokens) -> "ValueReading":
        reader, prefix = self.reader, self.prefix
        if reader.max_positions is not None and self.length >= reader.max_positions:
            prefix = kv_cache.join([prefix])  # the longest text may have left the batch
            reader.check_columns(prefix.input_ids.shape[1] + 1)
        output, prefix = kv_cache.extend(reader.model, prefix, tokens[:, None], None, **reader.arguments)
        last, notes = reader.take_last(output)
        return replace(self, prefix=prefix, last=last, notes=self.notes if notes is None else notes, siblings=None)

    @torch.no_grad()
    def advance(self, tokens: Tokens) -> "ValueReading":
        """The state after one more token per row, with a forward unless all of them were read as candidates."""
        tokens = tokens.to(self.last.device)
        held, before = tokens >= self.reader.num_known, self.drop_siblings()
        if bool(held.all()):
            return before
        if self.siblings is not None and bool((match := self.siblings.match(tokens)).any(1).all()):
            prefix, last = self.siblings.choose(self.prefix, match.int().argmax(1))
            longer = replace(before, prefix=prefix, last=last)
        else:
            longer = before.read(tokens.masked_fill(held, 0))
        if not bool(held.any()):
            return longer
        prefix = kv_cache.hold_rows(held, self.prefix, longer.prefix)
        return replace(before, prefix=prefix, last=torch.where(held[:, None], self.last, longer.last))

    @torch.no_grad()
    def rewind(self, n: int) -> "ValueReading":
        reader, tokens = self.reader, self.prefix.input_ids[:, -n - 1 :]
        before = replace(self, prefix=self.prefix.crop(n + 1), siblings=None)
        if not reader.keeps_scores or self.notes is None:
            return before.read(tokens[:, 0])
        output, _ = kv_cache.extend(reader.model, before.prefix, tokens)
        logits = output[reader.output]  # (b, n + 1, v)
        scores = log_probabilities(logits[:, :-1], tokens[:, 1:]).sum(1)
        gone = torch.stack([scores, torch.full_like(scores, n)], dim=1)
        return replace(before, prefix=self.prefix.crop(n), last=logits[:, 0].clone(), notes=self.notes - gone)


@dataclass(frozen=True)
class OutputReading(Reading):
    """The outputs at the last tokens of texts that somebody else reads, so that no method has to change anything.

    Models that do not read candidates need nothing else to score those for the next token.
    """

    reader: Reader
    outputs: Callable[[], Float[Tensor, "b n"]]  # takes those of the texts, whatever the texts are by now
    notes: Float[Tensor, "b m"] | None = None
    all_known: bool = False
    copies = 1
    siblings = None

    @property
    def last(self) -> Float[Tensor, "b n"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.outputs()

    def _stay(self: T, *_: object, **__: object) -> T:
        return self

    select = advance = rewind = drop_siblings = map_readings = _stay

    @staticmethod
    def join(states: "Sequence[OutputReading]") -> "OutputReading":
        return states[0]
