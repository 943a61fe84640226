"""Answers of an ASGI application whose engine may stop in the middle.

vLLM's server, asked to end, stops its engine and then waits for its clients, whose texts will never come. So radq ends
these answers: with status 503, or in a stream by an event with an error.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from radq.hosts.asgi import DATA, EVENT_END, Message, Send, send_json

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
