"""Details of tokens in vLLM's answers: the same numbers about each as those of `radq serve`, in the same places.

vLLM's answer says which tokens were drawn, and its workers have recorded what they were drawn from. A logits processor
knows the candidates of a token before one of them is drawn. So a row of candidates is recorded under the number of
tokens before it, and cut down to those that clients are told of when the text has grown.
"""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from radq.decoding.text import GrowingText
from radq.errors import OptionError
from radq.hosts.guidance import SEED, describe_guidance
from radq.registry.details import CandidateRow, DrawnToken, TokenTexts, summarise
from radq.registry.strengths import Guidance, shorten, to_number

MOST_ROWS = 65536  # tokens whose candidates are kept; requests that nobody asks about are forgotten first
NUMBERS = ("ids", "base", "guided", "shift")
PackedRow = dict[str, Any]  # a row as the engine's processes exchange it
MOST_SEED = 2**31  # of seeds that are given out; vLLM adds the number of a choice
IDS = ("token_ids", "prompt_token_ids")
LOST = "the details of some tokens are missing."


# --- records of workers ---


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
        indices = self.candidates.select(chosen)
        return RecordedRow(self.candidates.take(indices), self.base_logprobs[indices], self.kl, token)

    def draw(self, token: int, piece: str) -> DrawnToken | None:
        """Return the numbers about a token that was drawn; None if it was not drawn from these candidates."""
        told = self.settle(token)
        candidates, index = told.candidates, told.candidates.find(token)
        if index is None or self.token not in (None, token):
            return None
        with np.errstate(divide="ignore"):
            logprob = float(np.log(candidates.guided[index]))
        shift, base = float(candidates.shift[index]), float(told.base_logprobs[index])
        return DrawnToken(token, piece, shift, self.kl, base, logprob, candidates.rewards_of(index), candidates)

    def pack(self) -> PackedRow:
        rewards = {name: values.tolist() for name, values in self.candidates.rewards.items()}
        numbers = {name: getattr(self.candidates, name).tolist() for name in NUMBERS}
        logprobs = self.base_logprobs.tolist()
        return {**numbers, "rewards": rewards, "base_logprobs": logprobs, "kl": self.kl, "token": self.token}

    @classmethod
    def unpack(cls, row: PackedRow) -> "RecordedRow":
        rewards = {name: np.array(values) for name, values in row["rewards"].items()}
        candidates = CandidateRow(*(np.array(row[name]) for name in NUMBERS), rewards=rewards)
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
        rows = self._tickets.pop(ticket, {})
        self.count -= len(rows)
        return [{**row.pack(), "choice": choice, "position": position} for (choice, position), row in rows.items()]


# --- requests ---


def prepare_details(body: dict[str, Any], path: str) -> bool:
    """Check a request with details, and ask vLLM for what they need; return whether the client asks for token ids."""
    if not path.endswith("/completions"):
        raise OptionError("there are no details in this kind of answer.", "ask for completions or chat completions.")
    asked = body.get("logprobs")
    if asked is None or asked is False:
        raise OptionError("radq tells details together with logprobs alone.", "ask for logprobs too.")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise OptionError("details are told about one prompt at a time.", "send several requests.")
    for name in ("echo", "tools"):
        if body.get(name):
            raise OptionError(f"there are no details together with {name}.", f"leave {name} or the details out.")
    if (_read_whole(body, "n") or 1) > 1:  # workers tell the texts of a request apart by their seeds
        seed = _read_whole(body, "seed")
        body["seed"] = secrets.randbelow(MOST_SEED) if seed in (None, -1) else seed  # -1 stands for none in vLLM
        body["vllm_xargs"][SEED] = body["seed"]
    wants_ids = bool(body.get("return_token_ids"))
    body["return_token_ids"] = True
    return wants_ids


def _read_whole(body: Mapping[str, Any], name: str) -> int | None:
    """Read a whole number, which vLLM also takes as a text."""
    value = body.get(name)
    if value is None or isinstance(value, int):
        return value
    number = to_number(value)
    if not number.is_integer():
        raise OptionError(f"{name} must be a whole number, got {shorten(value)}.", "give such a number.")
    return int(number)


# --- answers ---


class AnswerDetails:
    """Adds details to an answer, whole or chunk by chunk."""

    def __init__(
        self,
        guidance: Guidance,
        texts: TokenTexts,
        fetch: Callable[[], Awaitable[Sequence[PackedRow]]],
        wants_ids: bool,
    ):
        """`fetch` gives the rows that workers have recorded since it was called before."""
        self.guidance, self.texts, self.wants_ids = guidance, texts, wants_ids
        self.fetch = fetch
        self._rows: dict[tuple[int, int], PackedRow] = {}  # by choice and position
        self._choices: dict[int, _Choice] = {}

    async def add(self, document: dict[str, Any]) -> None:
        """Add details to the choices of an answer, or of a chunk of a stream."""
        choices = document.get("choices") or []
        for choice in choices:
            text = self._choices.setdefault(choice["index"], _Choice(self.texts))
            prompt = choice.get("prompt_token_ids") or document.get("prompt_token_ids")
            if prompt is not None:
                text.begin(prompt)
            await self._add_tokens(choice, text)
        if not self.wants_ids:
            for part in (document, *choices):
                part.update({name: None for name in IDS if name in part})

    async def _add_tokens(self, choice: dict[str, Any], text: "_Choice") -> None:
        tokens = choice.get("token_ids") or []
        positions = [(choice["index"], text.length + place) for place in range(len(tokens))]
        if any(position not in self._rows for position in positions):
            self._rows |= {(row["choice"], row["position"]): row for row in await self.fetch()}
        rows = [self._rows.pop(position, None) for position in positions]
        message = choice.get("delta") or choice.get("message") or {}
        written = choice.get("text") or message.get("content") or ""
        # Else it ends by its length or by a text.
        ends_by_token = choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str)
        told = text.add(tokens, rows, written, ends_by_token)
        details = [None if token is None else token.describe(self.texts.show) for token in told]
        logprobs = choice.get("logprobs") or {}
        if "content" in logprobs:  # of a chat, entry by entry
            for entry, detail in zip(logprobs["content"] or [], details, strict=False):
                entry["radq"] = detail
        elif logprobs:
            logprobs["radq"] = details
        if choice.get("finish_reason") is not None:
            summary = summarise(text.drawn, list(self.guidance.strengths))
            choice["radq"] = summary | describe_guidance(self.guidance) | ({"error": LOST} if text.lost else {})


class _Choice:
    """A text of an answer, as far as it has come."""

    def __init__(self, texts: TokenTexts):
        self.texts = texts
        self.length = 0  # tokens, with those of the prompt
        self.drawn: list[DrawnToken] = []
        self.lost = True  # whether something is missing, as long as nothing has come
        self._growing: GrowingText | None = None
        self._written = 0  # characters that have come
        self._final = 0  # characters that are final by the tokens that have come

    def begin(self, prompt: Sequence[int]) -> None:
        if self._growing is None:
            self._growing, self.length, self.lost = GrowingText(self.texts.tokenizer, prompt), len(prompt), False

    def add(
        self, tokens: Sequence[int], rows: Sequence[PackedRow | None], text: str, ends_by_token: bool
    ) -> list[DrawnToken | None]:
        """Add tokens and the text that came with them; return their numbers, but for a token that ends the text."""
        told = [
            None if row is None else RecordedRow.unpack(row).draw(token, piece)
            for token, row, piece in zip(tokens, rows, self._split(tokens, text), strict=True)
        ]
        if ends_by_token and told:
            told[-1] = None
        self.lost = self.lost or None in told[: len(told) - ends_by_token]
        self.length += len(tokens)
        self.drawn += [token for token in told if token is not None]
        return told

    def _split(self, tokens: Sequence[int], text: str) -> list[str]:
        """Split the text into a piece for each token. vLLM may hold text back, so the last token gets the rest."""
        pieces, begin = [], self._written
        end = begin + len(text)
        for place, token in enumerate(tokens):
            self._final += len(self._growing.add(token)) if self._growing is not None else 0
            upto = end if place == len(tokens) - 1 else min(max(self._final, self._written), end)
            pieces.append(text[self._written - begin : upto - begin])
            self._written = upto
        self._written = end
        return pieces
