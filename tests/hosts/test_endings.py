"""Answers that are ended when the engine behind them has stopped."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs radq[serve]")

from starlette.types import Send

from radq.hosts import vllm_http
from radq.hosts.vllm_http import answer_while_running

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"Content-Type", b"application/json")]


class Application:
    """Sends some messages, then has its engine stop, and then waits or does something else."""

    def __init__(self, *messages: dict[str, Any], then: Any = None):
        self.messages, self.then = messages, then
        self.stopped = self.cancelled = False
        self.sent: list[dict[str, Any]] = []

    async def answer(self, send: Send) -> None:
        for message in self.messages:
            await send(message)
        self.stopped = True
        try:
            await (asyncio.Event().wait() if self.then is None else self.then(send))
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def run(self) -> None:
        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        asyncio.run(answer_while_running(self.answer, send, lambda: self.stopped))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(vllm_http, "PATIENCE_SECONDS", 0.1)


def begin(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_a_request_without_an_answer_gets_503() -> None:
    app = Application()
    app.run()
    assert app.cancelled
    assert app.sent[0]["status"] == 503
    assert json.loads(app.body)["error"]["message"] == "the server is about to end."


def test_a_stream_ends_with_an_error() -> None:
    app = Application(begin(EVENTS), part(b"data: {}\n\n"))
    app.run()
    assert app.sent[0]["status"] == 200
    first, error, done, rest = app.body.split(b"\n\n")
    assert (first, done, rest) == (b"data: {}", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 503
    assert not app.sent[-1].get("more_body")


def test_an_answer_that_has_begun_is_only_ended() -> None:
    app = Application(begin(JSON), part(b'{"a": '))
    app.run()
    assert app.body == b'{"a": '
    assert not app.sent[-1].get("more_body")


def test_what_the_application_still_sends_is_kept() -> None:
    async def finish(send: Send) -> None:
        await send(part(b"data: [DONE]\n\n", more=False))

    app = Application(begin(EVENTS), then=finish)
    app.run()
    assert app.body == b"data: [DONE]\n\n"
    assert not app.cancelled


def test_an_application_that_has_ended_its_answer_is_left_alone() -> None:
    app = Application(begin(JSON), part(b"{}", more=False))
    app.run()
    assert app.sent == [begin(JSON), part(b"{}", more=False)]


def test_errors_pass() -> None:
    async def fail(_: Send) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Application(then=fail).run()


def test_a_request_that_the_server_gives_up_is_given_up() -> None:
    app = Application(begin(EVENTS))

    async def run() -> None:
        async def send(message: dict[str, Any]) -> None:
            app.sent.append(message)

        task = asyncio.ensure_future(answer_while_running(app.answer, send, lambda: False))
        while not app.sent:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert app.cancelled
    assert app.sent == [begin(EVENTS)]
