"""Settings of guided decoding, checked when they are made. Importing this module imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from radq.errors import OptionError

Ends = Literal["base", "taught"]


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
    kl_budget: float | None = None
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
        if self.kl_budget is not None and not self.kl_budget >= 0:
            raise OptionError(
                f"kl_budget must be 0 or more nats per token, got {self.kl_budget}.", "None sets no such limit."
            )
        if self.ends not in get_args(Ends):
            raise OptionError(f"ends must be base or taught, got {self.ends!r}.", "base suits nearly all guides.")


DEFAULT_STEERING = Steering()


def check_counts(**counts: int) -> None:
    """Refuse numbers below 1 of tokens, samples or rows; the error names them as they are named here."""
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}.", f"give a larger {name}.")


def check_stop(stop: Sequence[str]) -> Sequence[str]:
    """Refuse stop texts that are no list of texts, or empty."""
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise OptionError(f"stop must be a list of texts that are not empty, got {stop!r}.", "give a list of texts.")
    return stop
