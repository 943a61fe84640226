"""Settings of guided decoding, checked when they are made. Importing this module imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal, get_args

from radq.errors import OptionError

Ends = Literal["base", "taught"]

# Nats per token. It is the default everywhere but in the paper's recipes. docs/defaults.md has what was measured: at
# equal perplexity, texts under it are as good as without a budget, and it bounds what too large a β can break.
DEFAULT_KL_BUDGET = 1.0


@dataclass(frozen=True)
class Steering:
    """The settings by which the base model's logits and a guide's shift become the logits of the next token.

    Args:
        top_k: the candidates are the k most likely tokens of the base model; None takes the whole vocabulary.
        top_p: of these, only the smallest set that holds this probability are candidates; None keeps all.
        temperature: divides the base logits; 0 takes the best candidate of z_LM + shift instead of sampling.
        kl_budget: the shift of each token is scaled down until KL(guided ‖ base model), over the candidates, is at most
            this number of nats; None leaves it as it is.
        ends: what decides when a text ends. "base": stop tokens keep the probability that the base model gives them, so
            that a guide decides what is said, and not when it ends. "taught": stop tokens are rewarded like words, for
            guides whose training had ends among the candidates.
    """

    top_k: int | None = 20
    top_p: float | None = None
    temperature: float = 1.0
    kl_budget: float | None = DEFAULT_KL_BUDGET
    ends: Ends = "base"

    def __post_init__(self) -> None:
        if isinstance(self.top_k, Steering):  # the fifth argument of stream is the fourth one's neighbour in generate
            raise OptionError(
                "top_k must be a whole number, got a Steering.",
                "generate takes top_k, top_p, temperature, kl_budget and ends one by one; stream takes a Steering.",
            )
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"top_k must be at least 1, got {self.top_k}.", "None takes the whole vocabulary.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1, got {self.top_p}.", "None sets no such limit.")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(
                f"temperature must be 0 or a positive number, got {self.temperature}.", "0 is greedy decoding."
            )
        if isinstance(self.kl_budget, str) or (self.kl_budget is not None and not self.kl_budget >= 0):
            raise OptionError(
                f"kl_budget must be 0 or more nats per token, got {self.kl_budget!r}.", "None sets no such limit."
            )
        if self.ends not in get_args(Ends):
            raise OptionError(f"ends must be base or taught, got {self.ends!r}.", "base suits nearly all guides.")


DEFAULT_STEERING = Steering()


def read_budget(given: float | Literal["none"]) -> float | None:
    """Read a KL budget as commands take it, in which `none` turns it off."""
    return None if given == "none" else given


@dataclass(frozen=True)
class LogitChanges:
    """Changes of the base model's logits before candidates are chosen, at temperature 1.

    Args:
        min_new_tokens: until a text has so many tokens, no stop token may come, and stop texts end nothing.
        logit_bias: numbers that are added to the logits of tokens.
        repetition_penalty: divides the positive logits of tokens of prompt and text, and multiplies the negative ones.
        presence_penalty: lowers the logits of tokens that the text without its prompt holds.
        frequency_penalty: the same, for each time that the text holds the token.
        min_p: only tokens with at least this share of the probability of the likeliest one may be candidates.
        json_schema: the text is JSON of this schema, unless it reaches its largest number of tokens before.
    """

    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    json_schema: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.min_new_tokens < 0:
            raise OptionError(f"min_new_tokens must be at least 0, got {self.min_new_tokens}.", "0 changes nothing.")
        if not all(map(isfinite, self.logit_bias.values())):
            raise OptionError("logit_bias must have finite numbers.", "-100 all but forbids a token.")
        if not 0 < self.repetition_penalty < inf:
            raise OptionError(
                f"repetition_penalty must be above 0, got {self.repetition_penalty}.", "1 changes nothing."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not isfinite(getattr(self, name)):
                raise OptionError(f"{name} must be a finite number, got {getattr(self, name)}.", "0 changes nothing.")
        if not 0 <= self.min_p <= 1:
            raise OptionError(f"min_p must be from 0 to 1, got {self.min_p}.", "0 changes nothing.")

    def check_tokens(self, vocab_size: int) -> None:
        if wrong := [token for token in self.logit_bias if not 0 <= token < vocab_size]:
            raise OptionError(
                f"logit_bias names the token {wrong[0]}, and tokens are numbers from 0 to {vocab_size - 1}.",
                "give numbers of tokens.",
            )


NO_CHANGES = LogitChanges()


def check_counts(**counts: int) -> None:
    """Refuse numbers below 1 of tokens, samples or rows; the error names them as they are named here."""
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}.", f"give a larger {name}.")


def check_stop(stop: Sequence[str]) -> Sequence[str]:
    """Refuse stop texts that are no list of texts, or empty."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise OptionError(f"stop must be a list of texts that are not empty, got {stop!r}.", "give a list of texts.")
    return stop
