"""Details in vLLM's answers: the same numbers about each token as those of `radq serve`, in the same places.

vLLM's answer says which tokens were drawn, and its workers have recorded what they were drawn from.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from radq.decoding.text import GrowingText
from radq.errors import OptionError
from radq.hosts.guidance import SEED, describe_guidance
from radq.hosts.records import PackedRow, RecordedRow
from radq.registry.details import Drawn, TokenTexts, summarise
from radq.registry.strengths import Guidance, shorten, to_number

Fetch = Callable[[], Awaitable[Sequence[PackedRow]]]
MOST_SEED = 2**31  # of seeds that are given out; vLLM adds the number of a choice
IDS = ("token_ids", "prompt_token_ids")
LOST = "the details of some tokens are missing."


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
    if (_read_whole(body, "n") or 1) > 1:
        _number_choices(body)
    wants_ids = bool(body.get("return_token_ids"))
    body["return_token_ids"] = True
    return wants_ids


def _number_choices(body: dict[str, Any]) -> None:
    """Let the texts of a request have seeds, by which workers can tell them apart."""
    seed = _read_whole(body, "seed")
    body["seed"] = secrets.randbelow(MOST_SEED) if seed in (None, -1) else seed  # -1 stands for none in vLLM
    body["vllm_xargs"][SEED] = body["seed"]


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

    def __init__(self, guidance: Guidance, texts: TokenTexts, fetch: Fetch, wants_ids: bool):
        """`fetch` gives the rows that workers have recorded since it was called before."""
        self.guidance, self.texts, self.wants_ids = guidance, texts, wants_ids
        self._fetch = fetch
        self._rows: dict[tuple[int, int], PackedRow] = {}  # by choice and position
        self._choices: dict[int, _Choice] = {}

    async def add(self, document: dict[str, Any]) -> None:
        """Add details to the choices of an answer, or of a chunk of a stream."""
        for choice in document.get("choices") or []:
            text = self._choices.setdefault(choice["index"], _Choice(self.texts))
            prompt = choice.get("prompt_token_ids") or document.get("prompt_token_ids")
            if prompt is not None:
                text.begin(prompt)
            await self._add_tokens(choice, text)
            self._hide_ids(choice)
        self._hide_ids(document)

    async def _add_tokens(self, choice: dict[str, Any], text: "_Choice") -> None:
        tokens = choice.get("token_ids") or []
        positions = [(choice["index"], text.length + place) for place in range(len(tokens))]
        if any(position not in self._rows for position in positions):
            self._rows |= {(row["choice"], row["position"]): row for row in await self._fetch()}
        rows = [self._rows.pop(position, None) for position in positions]
        drawn = text.add(tokens, rows, _read_text(choice), _ends_by_token(choice))
        _put(choice, [None if one is None else one.describe(self.texts.show) for one in drawn])
        if choice.get("finish_reason") is not None:
            summary = summarise(text.drawn, list(self.guidance.strengths))
            choice["radq"] = summary | describe_guidance(self.guidance) | ({"error": LOST} if text.lost else {})

    def _hide_ids(self, part: dict[str, Any]) -> None:
        """Take token ids out of an answer whose client has not asked for them."""
        if not self.wants_ids:
            part.update({name: None for name in IDS if name in part})


class _Choice:
    """A text of an answer, as far as it has come."""

    def __init__(self, texts: TokenTexts):
        self.texts = texts
        self.length = 0  # tokens, with those of the prompt
        self.drawn: list[Drawn] = []
        self.lost = True  # whether something is missing, as long as nothing has come
        self._growing: GrowingText | None = None
        self._written = 0  # characters that have come
        self._final = 0  # characters that are final by the tokens that have come

    def begin(self, prompt: Sequence[int]) -> None:
        if self._growing is None:
            self._growing, self.length, self.lost = GrowingText(self.texts.tokenizer, prompt), len(prompt), False

    def add(
        self, tokens: Sequence[int], rows: Sequence[PackedRow | None], text: str, ends_by_token: bool
    ) -> list[Drawn | None]:
        """Add tokens and the text that came with them; return their numbers, but for a token that ends the text."""
        found: list[Drawn | None] = []
        for place, (token, row, piece) in enumerate(zip(tokens, rows, self._split(tokens, text), strict=True)):
            if ends_by_token and place == len(tokens) - 1:
                found.append(None)
                continue
            one = None if row is None else RecordedRow.unpack(row).draw(token, piece)
            self.lost = self.lost or one is None
            found.append(one)
        self.length += len(tokens)
        self.drawn += [one for one in found if one is not None]
        return found

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


def _read_text(choice: Mapping[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or message.get("content") or ""


def _ends_by_token(choice: Mapping[str, Any]) -> bool:
    """Whether the last token of a choice ends it; else it ends by its length or by a text."""
    return choice.get("finish_reason") == "stop" and not isinstance(choice.get("stop_reason"), str)


def _put(choice: dict[str, Any], details: list[dict[str, Any] | None]) -> None:
    """Put details beside log-probabilities: as a list in completions, entry by entry in chats."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return
    if "content" not in logprobs:
        logprobs["radq"] = details
        return
    for entry, detail in zip(logprobs["content"] or [], details, strict=False):
        entry["radq"] = detail
