"""Candidates of the tokens of requests with details, kept until the server asks for them.

A logits processor knows the candidates of a token before one of them is drawn. So a row of candidates is recorded under
the number of tokens before it, and cut down to those that clients are told of when the text has grown.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from radq.registry.details import CandidateRow, Drawn

MOST_ROWS = 65536  # tokens whose candidates are kept; requests that nobody asks about are forgotten first
NUMBERS = ("ids", "base", "guided", "shift")
PackedRow = dict[str, Any]  # a row as the engine's processes exchange it


@dataclass(frozen=True)
class RecordedRow:
    """The candidates of one token, with what an answer says about the one that is drawn."""

    candidates: CandidateRow
    base_logprobs: np.ndarray  # (k,): over the whole vocabulary, at temperature 1
    kl: float
    token: int | None = None  # that was drawn, once it is known

    def settle(self, token: int) -> "RecordedRow":
        """Note which token was drawn, and keep only the candidates that clients are told of."""
        chosen = self.candidates.find(token)
        if chosen is None:  # another processor has forced it
            return replace(self, token=token)
        places = self.candidates.select(chosen)
        return RecordedRow(self.candidates.take(places), self.base_logprobs[places], self.kl, token)

    def draw(self, token: int, piece: str) -> Drawn | None:
        """Return the numbers about a token that was drawn; None if it was not drawn from these candidates."""
        chosen = self.candidates.find(token)
        if chosen is None or self.token not in (None, token):
            return None
        rewards, told = self.candidates.tell(chosen)
        with np.errstate(divide="ignore"):
            logprob = float(np.log(self.candidates.guided[chosen]))
        shift, base = float(self.candidates.shift[chosen]), float(self.base_logprobs[chosen])
        return Drawn(token, piece, shift, self.kl, base, logprob, rewards, told)

    def pack(self) -> PackedRow:
        rewards = {name: values.tolist() for name, values in self.candidates.rewards.items()}
        numbers = {name: getattr(self.candidates, name).tolist() for name in NUMBERS}
        logprobs = self.base_logprobs.tolist()
        return {**numbers, "rewards": rewards, "base_logprobs": logprobs, "kl": self.kl, "token": self.token}

    @classmethod
    def unpack(cls, row: Mapping[str, Any]) -> "RecordedRow":
        rewards = {name: np.array(values) for name, values in row["rewards"].items()}
        numbers = {name: np.array(row[name]) for name in NUMBERS}
        candidates = CandidateRow(**numbers, rewards=rewards)
        return cls(candidates, np.array(row["base_logprobs"]), row["kl"], row["token"])


class Records:
    """Rows of candidates by tickets, by the choices of a request, and by the number of tokens before them."""

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.most, self.count = most, 0
        self._tickets: OrderedDict[str, dict[tuple[int, int], RecordedRow]] = OrderedDict()

    def add(self, ticket: str, choice: int, position: int, row: RecordedRow, last: int) -> None:
        """Record the candidates of the next token of a text of `position` tokens, the last of which is `last`."""
        rows = self._tickets.setdefault(ticket, {})
        self._tickets.move_to_end(ticket)
        before = rows.get((choice, position - 1))
        if before is not None and before.token is None and last >= 0:
            rows[choice, position - 1] = before.settle(last)
        self.count += (choice, position) not in rows
        rows[choice, position] = row
        while self.count > self.most:
            _, forgotten = self._tickets.popitem(last=False)
            self.count -= len(forgotten)

    def take(self, ticket: str) -> list[PackedRow]:
        """Return the rows of a request, and forget them."""
        rows = self._tickets.pop(ticket, {})
        self.count -= len(rows)
        return [{**row.pack(), "choice": choice, "position": position} for (choice, position), row in rows.items()]
