"""The protocol of guides. A guide says, token by token, what to add to the base model's logits.

A guide holds no state of a generation. The host keeps the states that `start`, `advise` and `advance` return, one per
batch of texts, and takes rows of them, joins them and rewinds them: nothing is reset, nothing is left over from an
earlier prompt. Guides add up: `guide_a + guide_b`.

A base model may have tokens that a guide does not know, such as those of a chat format. They stay candidates. A guide
leaves them out of what it reads, and its shift of such a token is that of a token which changes nothing.

Axes: b batch, t time, k candidates, s strengths.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.models.loading import Wrappable
from radq.models.prefill import InTurns, Turn, finish
from radq.models.reading import Reader, Reading, State
from radq.models.vocabulary import find_special_tokens
from radq.numerics import Candidates, PlacedCandidates, Positions, Strengths, Texts, Tokens

S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class BaseStates:
    """The states of a base model that a host runs, and the number of its tokens."""

    # From numbers of layers to their outputs at the last token of each text, side by side, (b, n).
    take: Callable[[tuple[int, ...]], Tensor]
    num_tokens: int  # candidates have smaller ids


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts that a guide is to read."""

    input_ids: Texts
    attention_mask: Texts | None = None
    turn: Turn = field(default_factory=Turn)  # how many tokens may be read now
    # Given by a host that runs the base model. It keeps the outputs of the layers that the readers of the guide name by
    # their `layers`, so that a guide need not run the base model a second time.
    base: BaseStates | None = None


@dataclass(frozen=True)
class Advice:
    """A guide's answer about the candidates for the next token."""

    shift: Float[Tensor, "b k"]  # to be added to the candidates' base logits
    state: State | None  # the state to go on from: it may hold what was read of the candidates
    clipped: Bool[Tensor, "b k"] | None = None  # which candidates had a reward clamped; None if the guide never clamps
    # What each strength multiplies, in parts of (b, k, s) numbers, in the order of the strengths: rewards,
    # or differences of experts. None if a guide does not tell.
    rewards: tuple[Tensor, ...] | None = None
    # Given the candidates' logits with all shifts, which may be chosen; None if the guide forbids nothing. Stop tokens
    # that keep their probability have −∞ among these logits, and cannot be forbidden.
    allowed: Callable[[Float[Tensor, "b k"]], Bool[Tensor, "b k"]] | None = None


@runtime_checkable
class Adviser(Protocol):
    """The part of a guide that a step of decoding asks."""

    def advise(self, state: Any, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        """Give an opinion on k candidates for the next token of each row, as `Guide.advise` does."""
        ...


@runtime_checkable
class ReadsOnce(Protocol):
    """A guide that tells the rewards at all places of a text by reading the text once."""

    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k s"]:
        """Compute what the strengths multiply, of candidates at some positions of texts or at their ends."""
        ...


class Guide(ABC, Generic[S]):
    """Steers a base model. A guide implements `readers`, `start`, `advise` and `advance`."""

    beta: tuple[float, ...]  # the strengths that `advise` takes where it is given none
    # Whether `advise` and `advance` only compute with tensors, and the same in every step, so that a GPU can repeat
    # them as a CUDA graph, without Python. Guides that count, print or change by themselves leave this False.
    capturable: bool = False

    @property
    @abstractmethod
    def readers(self) -> Sequence[Reader]:
        """The transformers that the guide runs."""

    def start(self, input_ids: Texts, attention_mask: Texts | None = None) -> S:
        """Read a batch of prompts, and return the state after them."""
        return finish(self.start_in_turns(Prompts(input_ids, attention_mask)))

    def start_in_turns(self, prompts: Prompts) -> InTurns[S]:
        """Read prompts as `start` does, and stop where the turn is over. A guide implements one of both."""
        yield from ()
        return self.start(prompts.input_ids, prompts.attention_mask)

    @abstractmethod
    def advise(self, state: S, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        """Give an opinion on k candidates for the next token of each row, with the guide's own strengths or others."""

    @abstractmethod
    def advance(self, state: S, tokens: Tokens) -> S:
        """Read one more token per row, and return the state after it."""

    def __add__(self, other: "Guide") -> "Guide":
        return SumGuide(self, other)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the guide knows: those with smaller ids."""
        return min(reader.num_known for reader in self.readers)

    @property
    def special_tokens(self) -> set[int]:
        """The ids that mark beginnings, ends and padding. By these, a host without a mask finds padding in texts."""
        found = (find_special_tokens(reader.model.config, reader.tokenizer) for reader in self.readers)
        return set().union(*found)

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        """Raise if the base model's token ids mean something else than the guide's."""
        for reader in self.readers:
            reader.check_vocabulary(base_size, tokenizer, base_name)

    @property
    def context(self) -> int | None:
        """The most tokens of a text that the guide can follow; None if there is no limit."""
        return min((room for reader in self.readers if (room := reader.context) is not None), default=None)

    def check_base(self, lm: Wrappable) -> None:
        """Raise if the guide cannot steer this language model, since it was made for the states of another."""

    def check_length(self, num_tokens: int) -> None:
        """Raise if the guide cannot follow a text of so many tokens."""
        for reader in self.readers:
            reader.check_length(num_tokens)

    def beta_rows(self, beta: Strengths | None, like: Float[Tensor, "b ..."]) -> Strengths:
        """Return the given strengths, or the guide's own for every row, with the precision and device of `like`."""
        if beta is None:
            return like.new_tensor(self.beta).expand(len(like), -1)
        return beta.to(like)


@dataclass(frozen=True)
class States(Generic[S]):
    """Several states of the same texts."""

    parts: tuple[S, ...]

    def select(self, texts: Int[Tensor, " r"]) -> "States[S]":
        return States(tuple(part.select(texts) for part in self.parts))

    @staticmethod
    def join(states: "Sequence[States[S]]") -> "States[S]":
        columns = zip(*(state.parts for state in states), strict=True)
        return States(tuple(parts[0].join(parts) for parts in columns))

    def rewind(self, n: int) -> "States[S]":
        return States(tuple(part.rewind(n) for part in self.parts))

    def map_readings(self, change: Callable[[Reading], Reading]) -> "States":
        return States(tuple(part.map_readings(change) for part in self.parts))


def list_readings(state: State) -> list[Reading]:
    """The readings of a state; those that somebody else keeps are none of them."""
    found: list[Reading] = []
    state.map_readings(lambda reading: found.append(reading) or reading)
    return found


def leave_out(shift: Float[Tensor, "b k"], beta: Strengths | None) -> Float[Tensor, "b k"]:
    """Set the shift to 0 in rows whose strengths are 0: there, what a guide without numbers says does not count."""
    if beta is None or not beta.shape[1]:
        return shift
    return torch.where((beta == 0).all(1, keepdim=True), 0.0, shift)


def add_advices(advices: Sequence[Advice], state: State | None = None) -> Advice:
    """The advice of several guides together."""
    clipped = [advice.clipped for advice in advices if advice.clipped is not None]
    rewards = [advice.rewards for advice in advices if advice.rewards is not None]
    filters = [advice.allowed for advice in advices if advice.allowed is not None]
    return Advice(
        shift=reduce(operator.add, [advice.shift for advice in advices]),
        state=state,
        clipped=reduce(operator.or_, clipped) if clipped else None,
        rewards=tuple(chain.from_iterable(rewards)) if len(rewards) == len(advices) else None,
        allowed=(lambda logits: reduce(operator.and_, [allow(logits) for allow in filters])) if filters else None,
    )


@final
class SumGuide(Guide[States]):
    """The sum of several guides, which `+` makes. Its strengths are those of its parts, one after the other."""

    def __init__(self, *guides: Guide):
        self.guides = [part for guide in guides for part in (guide.guides if isinstance(guide, SumGuide) else [guide])]
        self.beta = tuple(beta for guide in self.guides for beta in guide.beta)
        self.capturable = all(guide.capturable for guide in self.guides)

    @property
    def readers(self) -> list[Reader]:
        return [reader for guide in self.guides for reader in guide.readers]

    def check_base(self, lm: Wrappable) -> None:
        for guide in self.guides:
            guide.check_base(lm)

    def start_in_turns(self, prompts: Prompts) -> InTurns[States]:
        states: list[State] = []
        for guide in self.guides:
            states.append((yield from guide.start_in_turns(prompts)))
        return States(tuple(states))

    def advise(self, state: States, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        sizes = [len(guide.beta) for guide in self.guides]
        betas = [None] * len(sizes) if beta is None else beta.split(sizes, dim=1)
        advices: list[Advice] = []
        for guide, part, own in zip(self.guides, state.parts, betas, strict=True):
            advice = guide.advise(part, candidates, own)
            advices.append(replace(advice, shift=leave_out(advice.shift, own)))
        return add_advices(advices, States(tuple(advice.state for advice in advices if advice.state is not None)))

    def advance(self, state: States, tokens: Tokens) -> States:
        parts = zip(self.guides, state.parts, strict=True)
        return States(tuple(guide.advance(part, tokens) for guide, part in parts))
