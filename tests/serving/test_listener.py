"""Connections that are slow, half open or too many, at a real server."""

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from serving import Running, make_config, serving

from radq.registry.config import Connections

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = {"prompt": "the film was", "max_tokens": 2}


@pytest.fixture(scope="module")
def hasty(models: Path) -> Iterator[Running]:
    """A server with eight connections, which waits for nobody."""
    limits = Connections(8, header_seconds=0.2, body_seconds=0.2, idle_seconds=0.2, send_seconds=0.2)
    with serving(make_config(models, connections=limits)) as found:
        yield found


@contextmanager
def connection(running: Running, content: bytes = b"") -> Iterator[socket.socket]:
    place = httpx.URL(running.address)
    assert place.port is not None
    with socket.create_connection((place.host, place.port), timeout=60) as one:
        one.sendall(content)
        yield one


def is_closed(one: socket.socket) -> bool:
    """Wait until the server closes a connection."""
    try:
        while one.recv(2**16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("content", [b"", b"POST /v1/comp", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_half_requests_are_cut_off(hasty: Running, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with connection(hasty, content) as one:
        assert is_closed(one)
    assert httpx.get(f"{hasty.address}/health").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def send_slowly(one: socket.socket, times: int) -> None:
    for _ in range(times):
        one.sendall(b"x")
        with suppress(TimeoutError):
            assert not one.recv(1)


@pytest.mark.parametrize("content", [HEAD + b"X-Slow: ", HEAD + b"Content-Length: 99999\r\n\r\n"])
def test_drops_do_not_keep_a_connection(hasty: Running, content: bytes) -> None:
    with connection(hasty, content) as one:
        one.settimeout(0.01)
        with pytest.raises(OSError, match="Broken pipe|reset"):
            send_slowly(one, 6000)
    assert httpx.get(f"{hasty.address}/health").status_code == 200


def test_a_connection_may_rest_between_two_requests(hasty: Running) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connection(hasty, request + request) as one:
        answers = b""
        while content := one.recv(2**16):
            answers += content
    assert answers.count(b"200 OK") == 2


def test_clients_that_do_not_read_are_cut_off(hasty: Running) -> None:
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connection(hasty) as one, pytest.raises(OSError, match="Broken pipe|reset"):
        one.sendall(request * 10**6)


def test_half_open_connections_leave_the_server_reachable(models: Path) -> None:
    config = make_config(models, connections=Connections(8))
    with serving(config) as running, ExitStack() as stack:
        begun, go = threading.Event(), threading.Event()
        running.server.scheduler.call(lambda: (begun.set(), go.wait(60)))
        assert begun.wait(60)
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(httpx.post, f"{running.address}/v1/completions", json=BODY, timeout=60)
            while not running.server.scheduler.waiting:
                assert not early.done()
            half = [stack.enter_context(connection(running, HEAD)) for _ in range(100)]
            assert httpx.get(f"{running.address}/health", timeout=60).status_code == 200
            assert all(is_closed(one) for one in half[:90])
            go.set()
            assert early.result().status_code == 200


def test_a_server_whose_connections_are_all_answered(models: Path) -> None:
    with serving(make_config(models, connections=Connections(1))) as running:
        begun, go = threading.Event(), threading.Event()
        running.server.scheduler.call(lambda: (begun.set(), go.wait(60)))
        assert begun.wait(60)
        with ThreadPoolExecutor(1) as pool:
            early = pool.submit(httpx.post, f"{running.address}/v1/completions", json=BODY, timeout=60)
            while not running.server.scheduler.waiting:
                assert not early.done()
            refused = httpx.get(f"{running.address}/health", timeout=60)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "all connections are taken" in refused.json()["error"]["message"]
            go.set()
            assert early.result().status_code == 200
        assert httpx.get(f"{running.address}/health", timeout=60).status_code == 200
