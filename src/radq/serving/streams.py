"""The texts of a request on their way from the scheduler's thread to its client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from radq.registry.problems import describe_problem
from radq.serving.answers import Answer
from radq.serving.orders import Order
from radq.serving.scheduler import Scheduler
from radq.serving.served import Served
from radq.serving.texts import Delivery, Text


class TextStream:
    """The texts of an order, and what the scheduler's thread says about them, in the thread of the event loop."""

    def __init__(self, order: Order, served: Served, scheduler: Scheduler, client: str):
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Delivery] = asyncio.Queue()
        self._scheduler = scheduler
        self.texts: list[Text] = order.texts(served, self._deliver, client)
        self._left = len(self.texts)

    def start(self) -> None:
        """Let the texts be decoded; those without room for a token end at once."""
        if any(text.max_tokens for text in self.texts):
            self._scheduler.submit(self.texts)
        else:
            for text in self.texts:
                self._news.put_nowait(Delivery(text, [], finish_reason="length"))

    def _deliver(self, delivery: Delivery) -> None:
        """Hand news over to the event loop, which may have ended."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, delivery)
        except RuntimeError:
            delivery.text.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while self._left:
            delivery = await self._news.get()
            self._left -= delivery.finish_reason is not None
            yield delivery

    async def collect(self) -> dict[int, Delivery]:
        """Wait for all texts; return their last deliveries by their numbers."""
        return {one.text.index: one async for one in self if one.finish_reason is not None}

    def cancel(self) -> None:
        if self._left:
            self._scheduler.cancel(self.texts)
            self._scheduler.metrics.cancelled.inc(self._left)


async def write_events(stream: TextStream, answer: Answer) -> AsyncIterator[bytes]:
    """Write the events of a stream. It is closed when the client goes away, and its texts are then cancelled."""
    try:
        async for delivery in stream:
            yield _event(answer.chunk(delivery))
            if delivery.error is not None:
                yield _event(describe_problem(503, delivery.error))
        if answer.order.usage:
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
