"""The socket of a server: limits of its connections, and its end.

    Listener(app, "127.0.0.1", 8000, print).run()       # until a signal comes

A client that sends half a request, or does not read its answer, is cut off after some time. When all connections are
taken, a new one takes the place of the one that has waited longest for the rest of its request.
"""

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from radq.registry.config import Connections

PATIENCE = 6.0  # seconds that running texts have when the server is asked to end
BACKLOG = 128  # connections that are accepted at once, before any of them can be closed
BUSY = b'{"error": {"message": "all connections are taken. hint: try again later.", "type": "server_error"}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BUSY), BUSY)
)

Phase = Literal["head", "body", "answer", "idle"]


class OpenConnections:
    """The open connections of a server; those in `unfinished` have not sent a whole request, the oldest one first."""

    def __init__(self, limits: Connections):
        self.limits = limits
        self.open: set[Connection] = set()
        self.unfinished: dict[Connection, None] = {}

    def enter(self, connection: "Connection") -> bool:
        """Let a connection in, maybe in place of an unfinished one; return whether there was room."""
        if len(self.open) >= self.limits.most:
            if not self.unfinished:
                return False
            next(iter(self.unfinished)).cut_off()
        self.open.add(connection)
        return True


class Connection(H11Protocol):
    """A connection, which knows how much of a request has come and how long the rest may take."""

    def __init__(self, others: OpenConnections, **options: Any):
        super().__init__(**options)
        self.others, self.limits, self.phase = others, others.limits, None
        self._seconds = {"head": self.limits.header_seconds, "body": self.limits.body_seconds}
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if self.others.enter(self):
            self._begin("head")
        else:
            transport.write(REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._begin(self._find_phase("head"))

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which may begin the next request
        self._begin(self._find_phase("idle"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.limits.send_seconds, self.cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_timer = _cancel(self._send_timer)

    def cut_off(self) -> None:
        """Close the connection without another word, for example since its client is too slow."""
        self._leave()
        self.transport.abort()

    def _find_phase(self, between: Phase) -> Phase:
        """Find what a connection waits for; `between` is the phase between two requests."""
        if self.cycle is None or self.cycle.response_complete:
            return between
        return "body" if self.cycle.more_body else "answer"

    def _begin(self, phase: Phase) -> None:
        """Begin to wait for a part of a request, or to answer it. Uvicorn itself ends connections that are idle."""
        if phase == self.phase or self not in self.others.open:
            return
        self.phase, self._timer = phase, _cancel(self._timer)
        self.others.unfinished.pop(self, None)
        if phase != "answer":
            self.others.unfinished[self] = None
        if phase in self._seconds:
            self._timer = self.loop.call_later(self._seconds[phase], self.cut_off)

    def _leave(self) -> None:
        self.others.open.discard(self)
        self.others.unfinished.pop(self, None)
        self._timer, self._send_timer = _cancel(self._timer), _cancel(self._send_timer)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Listener(uvicorn.Server):
    """Listens until a signal comes. Running texts then have some seconds to end."""

    def __init__(self, app: Any, host: str, port: int, announce: Callable[[str], None] = lambda address: None):
        """`announce` is told the address when the server, which `make_app` has made, can be reached."""
        self.radq, self.announce, self._drains = app.state.server, announce, False
        limits: Connections = self.radq.config.connections
        self.connections = OpenConnections(limits)
        options: dict[str, Any] = {"http": partial(Connection, self.connections), "ws": "none", "backlog": BACKLOG}
        options |= {"log_level": "warning", "server_header": False, "timeout_keep_alive": limits.idle_seconds}
        self.radq.scheduler.when_broken = self._give_up
        super().__init__(uvicorn.Config(app, host, port, timeout_graceful_shutdown=int(PATIENCE) + 2, **options))

    @property
    def address(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, *given: Any, **options: Any) -> None:
        await super().startup(*given, **options)
        if self.servers:
            self.announce(self.address)

    def handle_exit(self, sig: int, frame: Any) -> None:
        terminates = sig == signal.SIGTERM
        self._drains = terminates and not self.should_exit  # not after a second signal
        self.radq.scheduler.close(PATIENCE)
        if terminates:  # an end that was asked for is no failure; uvicorn would raise the signal again after it
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        """Serve until a signal. After SIGTERM, go on until /health has said so, since balancers ask there."""
        await super().main_loop()
        end = asyncio.get_running_loop().time() + self.connections.limits.drain_seconds
        while self._drains and not self.radq.told_end and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)

    def _give_up(self) -> None:
        self.should_exit = True

    def run(self, *given: Any, **options: Any) -> None:
        """Listen until a signal comes; end the process with 1 if nothing can be decoded any more."""
        super().run(*given, **options)
        if self.radq.scheduler.broken:
            raise SystemExit(1)
