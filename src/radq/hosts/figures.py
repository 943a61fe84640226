"""Figures about guided tokens, for the answers and the metrics of the server that radq runs in."""

from collections import OrderedDict
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

STEPS = 32  # between two readings of the sums on the device
MOST_TICKETS = 4096  # requests whose figures are kept until somebody asks for them
NAMES = {
    "tokens": "tokens that were drawn under guidance",
    "kl": "sum over these tokens of KL(guided, unguided), in nats",
    "clipped": "sum over these tokens of the share of candidates with a clamped reward",
    "failed": "steps of requests that could not be guided and end",
}
Sums = dict[str, float]


class Figures:
    """Sums since the server has started, and those of single requests, by tickets that the server gives out."""

    def __init__(self) -> None:
        self.totals: Sums = dict.fromkeys(NAMES, 0.0)
        self._tickets: OrderedDict[str, Sums] = OrderedDict()

    def count(self, tickets: Sequence[str | None], sums: Float[Tensor, "b n"]) -> None:
        """Add the sums of some requests, in the order of `NAMES`. This waits for the device."""
        for ticket, row in zip(tickets, sums.tolist(), strict=True):
            self._add(self.totals, row)
            if ticket is not None:
                self._add(self._tickets.setdefault(ticket, dict.fromkeys(NAMES, 0.0)), row)
        while len(self._tickets) > MOST_TICKETS:
            self._tickets.popitem(last=False)

    def _add(self, sums: Sums, row: Sequence[float]) -> None:
        for name, number in zip(NAMES, row, strict=True):
            sums[name] += number

    def take(self, ticket: str) -> Sums | None:
        """The sums of a request, which are then forgotten."""
        return self._tickets.pop(ticket, None)
