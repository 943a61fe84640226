"""Answers in the form of OpenAI's interface, whole ones and chunks of a stream, on their way to the client."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from fastapi import Request

from radq.decoding.prompt_scores import PromptScores
from radq.decoding.text import GrowingText
from radq.registry.details import LEAST, DrawnToken, make_finite, summarise
from radq.registry.loaded_guides import Served
from radq.registry.problems import describe_problem
from radq.serving.bodies import ChatBody
from radq.serving.parsed_request import ParsedRequest, ServedText, TextUpdate
from radq.serving.scheduler import Scheduler


class Answer:
    """The answer to a request, put together from updates."""

    def __init__(
        self,
        parsed: ParsedRequest,
        served: Served,
        texts: Sequence[ServedText],
        scores: PromptScores | None = None,
    ):
        """`scores` are those of the prompts, where the answer begins with them and tells log-probabilities."""
        self.parsed, self.served, self.texts, self.scores = parsed, served, texts, scores
        self.is_chat = isinstance(parsed.body, ChatBody)
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": name, "created": int(time.time()), "model": parsed.model}
        self._begun: set[int] = set()
        self._offsets = [0] * len(texts)

    # --- whole answers ---

    def whole(self, ends: dict[int, TextUpdate]) -> dict[str, Any]:
        """Make the answer when all texts have ended; `ends` are their last updates."""
        choices = [self._choice(text, text.drawn, ends[text.index], begins=True) for text in self.texts]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage(), "radq": self._confirmation()}

    def _choice(
        self, text: ServedText, tokens: Sequence[DrawnToken], update: TextUpdate, begins: bool, part: str = "message"
    ) -> dict[str, Any]:
        """Make the part of an answer that is about one text: some of its tokens, and its end if it has come."""
        content: Any = (self._echo(text) if begins else "") + "".join(token.piece for token in tokens) + update.rest
        if self.is_chat:
            content = ({"role": "assistant"} if begins else {}) | {"content": content}
        choice = {"index": text.index, part if self.is_chat else "text": content, "finish_reason": None}
        ended = {} if update.finish_reason is None else self._end(text, update)
        return choice | self._tokens(text, tokens, begins) | ended

    def _end(self, text: ServedText, end: TextUpdate) -> dict[str, Any]:
        """The reason why a text ended, and means over its tokens."""
        error = {} if end.error is None else {"error": end.error}
        cut = {"max_tokens": text.request.max_new_tokens} if self.parsed.cut else {}
        guided: dict[str, Any] = {}
        if self.scores is not None and self.scores.guided:  # as guides would have the tokens of the prompt drawn
            numbers = self.scores.guided[text.index // self.parsed.n]
            guided["prompt_logprobs"] = [None if one is None else make_finite(one) for one in numbers]
        reason = "error" if end.error is not None else end.finish_reason
        return {
            "finish_reason": reason,
            "radq": summarise(text.drawn, list(text.places)) | self._settings() | cut | guided | error,
        }

    # --- streams ---

    def chunk(self, update: TextUpdate) -> dict[str, Any]:
        """Make a chunk with the next piece of a text; the last chunk says why the text ends."""
        begins = update.text.index not in self._begun
        self._begun.add(update.text.index)
        choice = self._choice(update.text, update.tokens, update, begins, "delta")
        return self._chunk([choice]) | ({"radq": self._confirmation()} if begins else {})

    def last_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices}

    # --- parts ---

    def usage(self) -> dict[str, int]:
        read = sum(map(len, self.parsed.prompts))
        written = sum(text.count for text in self.texts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.parsed.seed, **self.parsed.guidance.describe("radq")}

    def _confirmation(self) -> dict[str, Any]:
        """Confirm the settings that were applied to the whole request, and name its fields that were not.

        Where texts may have fewer tokens than were asked for, it says how many they may have at least.
        """
        cut = {"max_tokens": min(self.parsed.max_tokens)} if self.parsed.cut else {}
        lists = {"ignored": self.parsed.ignored, "notes": list(self.parsed.guidance.notes)}
        return self._settings() | cut | {name: lines for name, lines in lists.items() if lines}

    def _tokens(self, text: ServedText, tokens: Sequence[DrawnToken], begins: bool) -> dict[str, Any]:
        """The ids and log-probabilities of tokens, where the request asks for them."""
        told: dict[str, Any] = {"logprobs": None}
        if self.parsed.logprobs is not None:
            told["logprobs"] = self._entries(tokens) if self.is_chat else self._columns(text, tokens, begins)
        if self.parsed.body.return_token_ids:
            told["token_ids"] = [token.id for token in tokens]
            told |= {"prompt_token_ids": text.request.prompt} if begins else {}
        return told

    def _columns(self, text: ServedText, tokens: Sequence[DrawnToken], begins: bool) -> dict[str, Any]:
        """Log-probabilities in the form of completions: a list for each kind of number."""
        before = self._prompt_columns(text) if begins and self.scores is not None else {}
        lengths = (len(token.piece) for token in tokens)
        *offsets, self._offsets[text.index] = accumulate(lengths, initial=self._offsets[text.index])
        columns: dict[str, Any] = {
            "tokens": [self.served.show_token(token.id) for token in tokens],
            "token_logprobs": [make_finite(token.logprob) for token in tokens],
            "top_logprobs": [_by_name(self._top(token)) for token in tokens] if self.parsed.logprobs else None,
            "text_offset": offsets,
        }
        if self.parsed.guidance.details:
            columns["radq"] = [token.describe(self.served.show_token) for token in tokens]
        return {name: None if values is None else [*before.get(name, []), *values] for name, values in columns.items()}

    def _echo(self, text: ServedText) -> str:
        return "" if self.parsed.echo is None else self.parsed.echo[text.index // self.parsed.n]

    def _prompt_columns(self, text: ServedText) -> dict[str, list[Any]]:
        """The columns of the tokens of a prompt under the base model, whose first token has no numbers."""
        assert self.scores is not None
        show, growing = self.served.show_token, GrowingText(self.served.tokenizer, [])
        scores, prompt = self.scores.base[text.index // self.parsed.n], text.request.prompt
        *offsets, _ = accumulate((len(growing.add(token)) for token in prompt), initial=self._offsets[text.index])
        self._offsets[text.index] = len(self._echo(text))
        best = [
            [] if score is None else [*score.best, (token, score.log_probability)]
            for token, score in zip(prompt, scores, strict=True)
        ]
        named = [_by_name([(show(other), make_finite(number)) for other, number in ranked]) for ranked in best]
        return {
            "tokens": [show(token) for token in prompt],
            "token_logprobs": [None if score is None else make_finite(score.log_probability) for score in scores],
            "top_logprobs": [one or None for one in named],
            "text_offset": offsets,
            "radq": [None] * len(offsets),
        }

    def _entries(self, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        """Log-probabilities in the form of chats: an entry for each token."""
        show, details = self.served.show_token, self.parsed.guidance.details
        return {
            "content": [
                _entry(show(token.id), make_finite(token.logprob))
                | {"top_logprobs": [_entry(*pair) for pair in self._top(token)]}
                | ({"radq": token.describe(show)} if details else {})
                for token in tokens
            ]
        }

    def _top(self, token: DrawnToken) -> list[tuple[str, float]]:
        """The most likely candidates, with the logarithms of their probabilities."""
        if token.candidates is None:
            return []
        ids, guided = token.candidates.ids, token.candidates.guided
        ranked = np.argsort(-guided, kind="stable")[: self.parsed.logprobs].tolist()
        logprobs = [math.log(guided[index]) if guided[index] > 0 else LEAST for index in ranked]
        return [(self.served.show_token(int(ids[index])), one) for index, one in zip(ranked, logprobs, strict=True)]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


def _by_name(ranked: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Name numbers by the texts of tokens; of tokens with one text, such as halves of characters, the first counts."""
    named: dict[str, float] = {}
    for name, number in ranked:
        named.setdefault(name, number)
    return named


class TextStream:
    """The texts of a request, and what the scheduler's thread says about them, in the thread of the event loop."""

    def __init__(self, parsed: ParsedRequest, served: Served, scheduler: Scheduler, client: str):
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[TextUpdate] = asyncio.Queue()
        self._scheduler = scheduler
        self.texts: list[ServedText] = parsed.texts(served, self._deliver, client)
        self._left = len(self.texts)

    def start(self) -> None:
        """Let the texts be decoded; those without room for a token end at once."""
        if any(text.request.max_new_tokens for text in self.texts):
            self._scheduler.submit(self.texts)
        else:
            for text in self.texts:
                self._news.put_nowait(TextUpdate(text, [], finish_reason="length"))

    def _deliver(self, update: TextUpdate) -> None:
        """Hand news over to the event loop, which may have ended."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, update)
        except RuntimeError:
            update.text.cancelled = True

    async def __aiter__(self) -> AsyncIterator[TextUpdate]:
        while self._left:
            update = await self._news.get()
            self._left -= update.finish_reason is not None
            yield update

    async def collect(self) -> dict[int, TextUpdate]:
        """Wait for all texts; return their last updates by their numbers."""
        return {update.text.index: update async for update in self if update.finish_reason is not None}

    def cancel(self) -> None:
        if self._left:
            self._scheduler.cancel(self.texts)
            self._scheduler.metrics.cancelled.inc(self._left)


async def write_events(stream: TextStream, answer: Answer) -> AsyncIterator[bytes]:
    """Write the events of a stream. It is closed when the client goes away, and its texts are then cancelled."""
    try:
        async for update in stream:
            yield _event(answer.chunk(update))
            if update.error is not None:
                yield _event(describe_problem(503, update.error))
        options = answer.parsed.body.stream_options
        if options is not None and options.include_usage:
            yield _event(answer.last_chunk())
        yield b"data: [DONE]\n\n"
    finally:
        stream.cancel()


def _event(document: dict[str, Any]) -> bytes:
    content = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + content.encode("utf-8", "replace") + b"\n\n"


async def unless_gone(request: Request, work: Any) -> Any:
    """Wait for the result of `work`; None if the client goes away before."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
