"""What a server refuses by the headers of a request, and methods that are not GET or POST."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from serving import Running, make_config, serving

from radq.registry.web import has_key

KEY = "clé-ключ"


@pytest.fixture(scope="module")
def locked(models: Path) -> Iterator[Running]:
    with serving(make_config(models), api_key=KEY) as found:
        yield found


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_keys_that_are_not_ascii(locked: Running, scheme: str) -> None:
    header = {"Authorization": f"{scheme} {KEY}".encode()}
    assert httpx.get(f"{locked.address}/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize(
    "header", [f"Basic {KEY}", KEY, "Bearer", "Bearer ключ-clé", f"Bearer {KEY}x", "Bearer cl?-????"]
)
def test_wrong_keys(locked: Running, header: str) -> None:
    answer = httpx.get(f"{locked.address}/v1/models", headers={"Authorization": header.encode()})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_keys_in_another_encoding() -> None:
    def has(key: str, sent: bytes) -> bool:
        return has_key(Request({"type": "http", "headers": [(b"authorization", b"bearer " + sent)]}), [key])

    assert has("clé à", "clé à".encode("latin-1"))
    assert has("clé à", "clé à".encode())  # whose last byte is a space in Latin-1
    assert not has("clé-ключ", b"cl\xe9-????")
    assert not has("clé", b"cl?")


@pytest.mark.parametrize("headers", ["Content-Length: 9", "Content-Length: 999999999", "Transfer-Encoding: chunked"])
def test_a_key_is_looked_at_before_the_body_comes(locked: Running, headers: str) -> None:
    place = httpx.URL(locked.address)
    assert place.port is not None
    with socket.create_connection((place.host, place.port), timeout=60) as one:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        one.sendall(head.encode() + b"\r\n\r\n")
        assert b" 401 " in one.recv(64)


def test_a_body_that_says_it_is_too_long_is_not_waited_for(running: Running) -> None:
    place = httpx.URL(running.address)
    assert place.port is not None
    with socket.create_connection((place.host, place.port), timeout=60) as one:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999999\r\n\r\n")
        assert b" 413 " in one.recv(64)


@pytest.mark.parametrize("route", ["/", "/health", "/v1/models", "/metrics"])
def test_head_is_get_without_a_body(running: Running, route: str) -> None:
    head, get = httpx.head(running.address + route), httpx.get(running.address + route)
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", get.headers["content-type"])


METHODS = [("DELETE", "/health", "GET"), ("HEAD", "/radq/score", "POST")]


@pytest.mark.parametrize(("method", "route", "allowed"), METHODS)
def test_methods_that_a_route_has_not(running: Running, method: str, route: str, allowed: str) -> None:
    answer = httpx.request(method, running.address + route)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


PLACES = [
    ({"prompt": 3}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt.1"),
    ({}, "prompt"),
    ({"prompt": "a", "temperature": "warm"}, "temperature"),
    ({"prompt": "a", "stop": [3]}, "stop.0"),
    ({"prompt": "a", "seed": 10**400}, "seed"),
    *(
        ({"prompt": "a", name: True}, name)
        for name in ("n", "seed", "max_tokens", "temperature", "top_p", "top_k", "logprobs", "min_p")
    ),
    ({"prompt": [True, 3]}, "prompt.0"),
    ({"prompt": "a", "logit_bias": {"3": True}}, "logit_bias.3"),
]


@pytest.mark.parametrize(("body", "param"), PLACES)
def test_errors_name_places_in_the_body(running: Running, body: dict[str, object], param: str) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.address}/v1/completions", content=json.dumps(body), headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert not any(word in error["message"] for word in ("dict", "int(", "list[", "instance"))


@pytest.mark.parametrize("steering", [{"kl_budget": True}, {"praise": False}, {"top_k": True}])
def test_truth_is_no_strength(running: Running, steering: dict[str, bool]) -> None:
    answer = httpx.post(f"{running.address}/v1/completions", json={"prompt": "a", "radq": steering})
    assert answer.status_code == 400
    assert "number" in answer.json()["error"]["message"]
