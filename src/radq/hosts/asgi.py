"""Tools for a middleware that changes requests and responses of an ASGI application.

The engine of an application may stop in the middle of an answer. vLLM's server, asked to end, stops its engine and then
waits for its clients, whose texts will never come. So `answer_while_running` ends these answers: with status 503, or in
a stream by an event with an error.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

EVENT_END = b"\n\n"
DATA = b"data: "


async def read_body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return content


def replay(content: bytes, receive: Receive) -> Receive:
    """Make a function that receives the body again, and then the next messages, such as that the client has gone."""
    given = False

    async def replay_once() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replay_once


def with_length(scope: Scope, content: bytes) -> Scope:
    """Return the scope of a request with the length of another body."""
    kept = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    return {**scope, "headers": [*kept, (b"content-length", str(len(content)).encode())]}


async def send_json(send: Send, status: int, document: dict[str, Any]) -> None:
    content = json.dumps(document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class Tail:
    """Sends a response, and at its end the bytes that `write` returns."""

    def __init__(self, send: Send, write: Callable[[], Awaitable[bytes]]):
        self._send, self._write = send, write

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message["headers"] if pair[0].lower() != b"content-length"]
            message = {**message, "headers": kept}
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + await self._write()}
        await self._send(message)


class Rewrite(ABC):
    """Sends a response, and changes its JSON document, or the events of a stream, on their way.

    Errors pass unchanged.
    """

    def __init__(self, send: Send):
        self._send = send
        self._start: Message = {}
        self._pass: Send = send  # what the parts of the body go through
        self._content = b""  # that was not sent yet

    @abstractmethod
    async def change(self, document: dict[str, Any]) -> None:
        """Change the document in place."""

    def reads(self, event: bytes) -> bool:
        """Whether an event of a stream may have to be changed."""
        return False

    async def change_event(self, document: dict[str, Any]) -> None:
        """Change the document of an event in place."""
        await self.change(document)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return headers to add to the response."""
        return []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body":
            await self._pass(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        headers = [(name.lower(), value) for name, value in message["headers"]]
        kind = dict(headers).get(b"content-type", b"") if message["status"] == 200 else b""
        whole = kind.startswith(b"application/json")
        kept = [pair for pair in headers if not whole or pair[0] != b"content-length"]
        self._start = {**message, "headers": [*kept, *self.headers()]}
        if whole:
            self._pass = self._pass_whole
            return
        if kind.startswith(b"text/event-stream"):
            self._pass = self._pass_events
        await self._send(self._start)

    async def _pass_whole(self, message: Message) -> None:
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return
        document = json.loads(self._content)
        if isinstance(document, dict):  # vLLM answers with null when the client has gone away
            await self.change(document)
        content = json.dumps(document).encode()
        self._start["headers"].append((b"content-length", str(len(content)).encode()))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": content})

    async def _pass_events(self, message: Message) -> None:
        *events, self._content = (self._content + message.get("body", b"")).split(EVENT_END)
        changed = [await self._change(event) + EVENT_END for event in events]
        rest = b"" if message.get("more_body") else self._content
        await self._send({**message, "body": b"".join([*changed, rest])})

    async def _change(self, event: bytes) -> bytes:
        if not event.startswith(DATA + b"{") or not self.reads(event):
            return event
        document = json.loads(event[len(DATA) :])
        await self.change_event(document)
        return DATA + json.dumps(document).encode()


POLL_SECONDS = 0.5
PATIENCE_SECONDS = 2.0  # for what an application sends by itself when its engine has stopped
REASON = {"message": "the server is about to end.", "type": "server_error", "param": None, "code": 503}


class _Sent:
    """Sends a response, and remembers how far it is."""

    def __init__(self, send: Send):
        self._send = send
        self._begun = self._streams = self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message["headers"]}
            self._begun, self._streams = True, headers.get(b"content-type", b"").startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body")
        await self._send(message)

    async def end(self) -> None:
        """End the response with an error, if it has not ended."""
        if not self._begun:
            await send_json(self._send, 503, {"error": REASON})
        elif not self._ended:
            events = [json.dumps({"error": REASON}).encode(), b"[DONE]"] if self._streams else []
            body = b"".join(DATA + event + EVENT_END for event in events)
            await self._send({"type": "http.response.body", "body": body})


async def answer_while_running(
    answer: Callable[[Send], Awaitable[None]], send: Send, is_stopped: Callable[[], bool]
) -> None:
    """Let an application answer a request, until its engine has stopped."""
    sent = _Sent(send)
    task = asyncio.ensure_future(answer(sent))
    try:
        while not task.done() and not is_stopped():
            await asyncio.wait([task], timeout=POLL_SECONDS)
        await asyncio.wait([task], timeout=PATIENCE_SECONDS)
    finally:
        unfinished = task.cancel()  # also if the server has given up this request
    if unfinished:
        await asyncio.wait([task], timeout=PATIENCE_SECONDS)
        await sent.end()
    else:
        task.result()
