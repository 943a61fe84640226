"""A meter for guides, which counts the calls of their transformers and the tokens they read.

    with Meter(guide) as meter:
        generate(lm, tokenizer, prompts, meter)
    meter.calls_per_step, meter.tokens_per_token

A call is one forward of one transformer over a batch. Tokens are those it reads, over all rows, padding excluded:
RAD-V's candidates count, and so do both classes of GeDi. Reading the prompts is counted apart. The last token of a text
is never read, so in a short text the numbers per token are a little lower than those of a step.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from radq.guides.base import Advice, Guide, Prompts, State
from radq.models.loading import Wrappable
from radq.models.prefill import InTurns
from radq.models.reading import Reader
from radq.numerics import Candidates, Strengths, Tokens


@dataclass
class TokenCount:
    """Calls of transformers and the tokens that they have read."""

    calls: int = 0
    tokens: int | Tensor = 0  # summed where the masks are, so that counting never waits for a GPU

    def add(self, input_ids: Int[Tensor, "b n"], mask: object) -> None:
        self.calls += 1
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.tokens = mask[:, mask.shape[1] - input_ids.shape[1] :].sum() + self.tokens
        else:  # no mask, or one for siblings: nothing is padded
            self.tokens = input_ids.numel() + self.tokens


class WatchedGuide(Guide[State]):
    """A guide that does what another does, each call of it inside a `watch`, such as one that measures the time."""

    def __init__(self, guide: Guide):
        self.guide, self.beta, self.capturable = guide, guide.beta, guide.capturable

    @abstractmethod
    def watch(self, of_prompts: bool = False) -> AbstractContextManager[None]:
        """A block in which the other guide reads prompts, or scores candidates, or reads a token."""

    @property
    def readers(self) -> Sequence[Reader]:
        return self.guide.readers

    def check_base(self, lm: Wrappable) -> None:
        self.guide.check_base(lm)

    def start_in_turns(self, prompts: Prompts) -> InTurns[State]:
        work = self.guide.start_in_turns(prompts)
        while True:
            with self.watch(of_prompts=True):
                try:
                    next(work)
                except StopIteration as end:
                    return end.value
            yield

    def advise(self, state: State, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        with self.watch():
            return self.guide.advise(state, candidates, beta)

    def advance(self, state: State, tokens: Tokens) -> State:
        with self.watch():
            return self.guide.advance(state, tokens)


class Meter(WatchedGuide):
    """A guide that does what another does, and counts while its `with` block lasts."""

    def __init__(self, guide: Guide):
        super().__init__(guide)
        self.steps = 0  # how often candidates were scored, for a batch of texts
        self.tokens = 0  # for how many texts in all: the number of tokens that were generated
        self.prompts, self.continuations = TokenCount(), TokenCount()
        self._count: TokenCount | None = None  # of the method of the guide that runs at the moment
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Meter":
        # One that serves two guides counts once; a base model whose states a guide reads is not the guide's.
        models = {id(reader.model): reader.model for reader in self.readers if not reader.base_layers}
        self._hooks = [model.register_forward_pre_hook(self._on_call, with_kwargs=True) for model in models.values()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def calls_per_step(self) -> float:
        """The number of forwards per generated token of a batch, without those of prompts."""
        return self.continuations.calls / max(1, self.steps)

    @property
    def tokens_per_token(self) -> float:
        """The number of tokens read per token generated, without those of prompts."""
        return int(self.continuations.tokens) / max(1, self.tokens)

    def _on_call(self, _: nn.Module, __: object, kwargs: dict[str, Tensor]) -> None:
        if self._count is not None:  # else the base model runs for itself, whose weights a guide may share
            self._count.add(kwargs["input_ids"], kwargs.get("attention_mask"))

    @contextmanager
    def watch(self, of_prompts: bool = False) -> Iterator[None]:
        self._count = self.prompts if of_prompts else self.continuations
        try:
            yield
        finally:
            self._count = None

    def advise(self, state: State, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        self.steps += 1
        self.tokens += len(candidates)
        return super().advise(state, candidates, beta)

    # --- steps that are repeated without Python, so that no hook is called ---

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The numbers of steps, of texts in all steps, of calls and of tokens read so far, without those of prompts."""
        return self.steps, self.tokens, self.continuations.calls, int(self.continuations.tokens)

    def take_back(self, before: tuple[int, ...]) -> tuple[int, ...]:
        """Count again from earlier counts; return what was counted since then."""
        since = tuple(new - old for new, old in zip(self.counts, before, strict=True))
        self.steps, self.tokens, self.continuations.calls, self.continuations.tokens = before
        return since

    def add(self, counted: tuple[int, ...], share: float) -> None:
        """Count a repeated step, of whose rows only a share is in use."""
        steps, texts, calls, tokens = counted
        self.steps += steps
        self.tokens += round(texts * share)
        self.continuations.calls += calls
        self.continuations.tokens += round(tokens * share)
