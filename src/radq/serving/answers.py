"""Answers in the form of OpenAI's interface, whole ones and chunks of a stream, on their way to the client."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request

from radq.decoding.prompt_scores import PromptScores
from radq.decoding.text import GrowingText
from radq.registry.details import LEAST, Drawn, make_finite
from radq.registry.problems import describe_problem
from radq.serving.bodies import Kind
from radq.serving.parsed_request import ParsedRequest
from radq.serving.scheduler import Scheduler
from radq.serving.served import Served
from radq.serving.texts import Text, TextUpdate

COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "radq")  # of completions
OBJECTS = {"completion": ("text_completion", "text_completion"), "chat": ("chat.completion", "chat.completion.chunk")}


class Answer:
    """The answer to a request, put together from updates."""

    def __init__(
        self,
        kind: Kind,
        parsed: ParsedRequest,
        served: Served,
        texts: Sequence[Text],
        scores: PromptScores | None = None,
    ):
        """
        Args:
            scores: of the prompts, where the answer begins with them and tells log-probabilities.
        """
        self.kind, self.parsed, self.served, self.texts, self.scores = kind, parsed, served, texts, scores
        self.head = {
            "id": f"{'cmpl' if kind == 'completion' else 'chatcmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": parsed.model,
        }
        self._begun: set[int] = set()
        self._offsets = [0] * len(texts)

    # --- whole answers ---

    def whole(self, ends: dict[int, TextUpdate]) -> dict[str, Any]:
        """Make the answer when all texts have ended; `ends` are their last updates."""
        choices = [self._choice(text, ends[text.index]) for text in self.texts]
        return self._document(0, choices) | {"usage": self.usage(), "radq": self._confirmation()}

    def _choice(self, text: Text, end: TextUpdate) -> dict[str, Any]:
        written = self._echo(text) + "".join(one.piece for one in text.drawn) + end.rest
        content = {"text": written}
        if self.kind == "chat":
            content = {"message": {"role": "assistant", "content": written}}
        return self._finish({"index": text.index, **content, **self._tokens(text, text.drawn, begin=True)}, text, end)

    def _finish(self, choice: dict[str, Any], text: Text, end: TextUpdate) -> dict[str, Any]:
        error = {} if end.error is None else {"error": end.error}
        cut = {"max_tokens": text.max_tokens} if self.parsed.cut else {}
        guided = {} if self.scores is None or not self.scores.guided else {"prompt_logprobs": self._guided(text)}
        summary = text.summary() | self._settings() | cut | guided | error
        return choice | {"finish_reason": _finish_reason(end), "radq": summary}

    # --- streams ---

    def chunk(self, update: TextUpdate) -> dict[str, Any]:
        """Make a chunk with the next piece of a text; the last chunk says why the text ends."""
        text = update.text
        begin = text.index not in self._begun
        self._begun.add(text.index)
        piece = (self._echo(text) if begin else "") + "".join(one.piece for one in update.tokens) + update.rest
        content: dict[str, Any] = {"text": piece}
        if self.kind == "chat":
            content = {"delta": ({"role": "assistant"} if begin else {}) | {"content": piece}}
        choice = {"index": text.index, **content, "finish_reason": None}
        choice |= self._tokens(text, update.tokens, begin)
        if update.finish_reason is not None:
            choice = self._finish(choice, text, update)
        return self._document(1, [choice]) | ({"radq": self._confirmation()} if begin else {})

    def last_chunk(self) -> dict[str, Any]:
        return self._document(1, []) | {"usage": self.usage()}

    # --- parts ---

    def _document(self, form: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": OBJECTS[self.kind][form], "choices": choices}

    def usage(self) -> dict[str, int]:
        read = sum(map(len, self.parsed.prompts))
        written = sum(text.count for text in self.texts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def _settings(self) -> dict[str, Any]:
        guidance = self.parsed.guidance
        return {
            "seed": self.parsed.seed,
            "sampler": "radq",  # a seed gives the texts of `radq.generate`
            "strengths": guidance.strengths,
            "kl_budget": guidance.steering.kl_budget,
            "top_k": guidance.steering.top_k,
        }

    def _confirmation(self) -> dict[str, Any]:
        """Confirm the settings that were applied to the whole request, and name its fields that were not.

        Where texts may have fewer tokens than were asked for, it says how many they may have at least.
        """
        cut = {"max_tokens": min(self.parsed.max_tokens)} if self.parsed.cut else {}
        lists = {"ignored": self.parsed.ignored, "notes": list(self.parsed.guidance.notes)}
        return self._settings() | cut | {name: found for name, found in lists.items() if found}

    def _tokens(self, text: Text, tokens: Sequence[Drawn], begin: bool) -> dict[str, Any]:
        """The ids and log-probabilities of tokens, where the request asks for them."""
        found: dict[str, Any] = {"logprobs": None}
        if self.parsed.logprobs is not None:
            found["logprobs"] = (
                self._columns(text, tokens, begin) if self.kind == "completion" else self._entries(tokens)
            )
        if self.parsed.token_ids:
            found |= {"token_ids": [one.id for one in tokens]} | ({"prompt_token_ids": text.prompt} if begin else {})
        return found

    def _columns(self, text: Text, tokens: Sequence[Drawn], begin: bool) -> dict[str, Any]:
        """Log-probabilities in the form of completions: a list for each kind of number."""
        before = self._prompt_columns(text) if begin and self.scores is not None else {}
        offsets: list[int] = []
        for one in tokens:
            offsets.append(self._offsets[text.index])
            self._offsets[text.index] += len(one.piece)
        columns: dict[str, Any] = {
            "tokens": [self.served.show_token(one.id) for one in tokens],
            "token_logprobs": [make_finite(one.logprob) for one in tokens],
            "top_logprobs": [_by_name(self._top(one)) for one in tokens] if self.parsed.logprobs else None,
            "text_offset": offsets,
        }
        if self.parsed.guidance.details:
            columns["radq"] = [one.describe(self.served.show_token) for one in tokens]
        return {name: None if values is None else [*before.get(name, []), *values] for name, values in columns.items()}

    # --- prompts ---

    def _echo(self, text: Text) -> str:
        return "" if self.parsed.echo is None else self.parsed.echo[text.index // self.parsed.n]

    def _guided(self, text: Text) -> list[float | None]:
        """The log-probabilities of the tokens of a prompt as guides would have them drawn."""
        assert self.scores is not None
        guided = self.scores.guided[text.index // self.parsed.n]
        return [None if one is None else make_finite(one) for one in guided]

    def _prompt_columns(self, text: Text) -> dict[str, list[Any]]:
        """The columns of the tokens of a prompt under the base model, whose first token has no numbers."""
        assert self.scores is not None
        show, growing = self.served.show_token, GrowingText(self.served.tokenizer, [])
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for token, score in zip(text.prompt, self.scores.base[text.index // self.parsed.n], strict=True):
            columns["tokens"].append(show(token))
            columns["text_offset"].append(self._offsets[text.index])
            columns["radq"].append(None)
            columns["token_logprobs"].append(None if score is None else make_finite(score.log_probability))
            best = [] if score is None else [*score.best, (token, score.log_probability)]
            named = _by_name([(show(other), make_finite(number)) for other, number in best])
            columns["top_logprobs"].append(named or None)
            self._offsets[text.index] += len(growing.add(token))
        self._offsets[text.index] = len(self._echo(text))
        return columns

    def _entries(self, tokens: Sequence[Drawn]) -> dict[str, Any]:
        """Log-probabilities in the form of chats: an entry for each token."""
        return {
            "content": [
                _entry(self.served.show_token(one.id), one.logprob)
                | {"top_logprobs": [_entry(*pair) for pair in self._top(one)]}
                | ({"radq": one.describe(self.served.show_token)} if self.parsed.guidance.details else {})
                for one in tokens
            ]
        }

    def _top(self, one: Drawn) -> list[tuple[str, float]]:
        """The most likely candidates, with the logarithms of their probabilities."""
        ranked = sorted(one.candidates or [], key=lambda candidate: -candidate.probability)[: self.parsed.logprobs]
        return [(self.served.show_token(candidate.id), _log(candidate.probability)) for candidate in ranked]


def _finish_reason(end: TextUpdate) -> str:
    return "error" if end.error is not None else end.finish_reason or "stop"


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": make_finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def _by_name(ranked: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Name numbers by the texts of tokens; of tokens with one text, such as halves of characters, the first counts."""
    return {name: next(number for other, number in ranked if other == name) for name, _ in ranked}


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else LEAST


class TextStream:
    """The texts of a request, and what the scheduler's thread says about them, in the thread of the event loop."""

    def __init__(self, parsed: ParsedRequest, served: Served, scheduler: Scheduler, client: str):
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[TextUpdate] = asyncio.Queue()
        self._scheduler = scheduler
        self.texts: list[Text] = parsed.texts(served, self._deliver, client)
        self._left = len(self.texts)

    def start(self) -> None:
        """Let the texts be decoded; those without room for a token end at once."""
        if any(text.max_tokens for text in self.texts):
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
        return {one.text.index: one async for one in self if one.finish_reason is not None}

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
        if answer.parsed.usage:
            yield _event(answer.last_chunk())
        yield b"data: [DONE]\n\n"
    finally:
        stream.cancel()


def _event(document: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )


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
