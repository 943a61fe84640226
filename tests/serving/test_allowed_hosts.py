"""Hosts that are not the server's are refused, so that no site can let its name point to a server on this computer."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, make_config, serving

from radq.errors import OptionError
from radq.registry.config import AllowedHosts, check_host

EVERYWHERE = ["0.0.0.0", "::", "[::]", ""]
NAMES = st.from_regex(r"[a-z0-9]{1,8}(-[a-z0-9]{1,4})?(\.[a-zA-Z]{2,6}){1,2}", fullmatch=True)
PORTS = st.sampled_from(["", ":80", ":8000"])
ROUTES = ["/", "/page/page.js", "/v1/models", "/radq/info", "/health", "/metrics", "/nowhere"]

# --- names ---


@given(NAMES.filter(lambda name: name.lower() != "radq.lan"), PORTS)
def test_other_names_are_refused(name: str, port: str) -> None:
    assert not AllowedHosts("127.0.0.1").allow(name + port)
    assert not AllowedHosts("127.0.0.1", ["radq.lan"]).allow(name + port)
    assert not AllowedHosts("0.0.0.0", ["radq.lan"]).allow(name + port)


@given(NAMES, PORTS, st.sampled_from(EVERYWHERE))
def test_any_name_is_allowed_at_all_addresses(name: str, port: str, address: str) -> None:
    assert AllowedHosts(address).allow(name + port)
    assert AllowedHosts("127.0.0.1", ["*"]).allow(name + port)


@given(NAMES, PORTS, st.booleans())
def test_listed_names_are_allowed(name: str, port: str, dot: bool) -> None:
    check_host(name)
    written = name.upper() + "." * dot + port
    for listed in ([name], ["radq.lan", name.swapcase()]):
        assert AllowedHosts("127.0.0.1", listed).allow(written)
    assert AllowedHosts(name).allow(written)


@given(st.ip_addresses(), PORTS, st.sampled_from(["127.0.0.1", "::1", "0.0.0.0", "box.lan"]))
def test_addresses_are_allowed(address: Any, port: str, bound: str) -> None:
    header = f"{address}{port}" if address.version == 4 else f"[{address}]{port}"
    assert AllowedHosts(bound).allow(header)
    assert AllowedHosts(bound, ["radq.lan"]).allow(header)


@pytest.mark.parametrize("header", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]", "[::1]:80"])
def test_names_of_this_computer_are_allowed(header: str) -> None:
    for hosts in (AllowedHosts("127.0.0.1"), AllowedHosts("::1"), AllowedHosts("0.0.0.0", ["radq.lan"])):
        assert hosts.allow(header)


def test_an_asterisk_stands_for_names_below() -> None:
    hosts = AllowedHosts("127.0.0.1", ["*.example.com"])
    assert hosts.allow("a.example.com:8000")
    assert hosts.allow("a.b.example.com")
    assert not hosts.allow("example.com")
    assert not hosts.allow("badexample.com")
    assert not hosts.allow("a.example.com.evil.org")


@pytest.mark.parametrize(
    "header", ["127.0.0.1.evil.org", "localhost.evil.org", "evil.org:localhost", "", "a@localhost"]
)
def test_tricks_are_refused(header: str) -> None:
    assert not AllowedHosts("127.0.0.1", ["radq.lan"]).allow(header)


@pytest.mark.parametrize("host", ["", "a b", "http://a.org", "a.org/x", "a.org:80", "*a.org", "-a.org", "ä.org"])
def test_other_things_are_no_names(host: str) -> None:
    with pytest.raises(OptionError, match="hosts must be names"):
        check_host(host)


# --- servers ---


def ask(running: Running, host: str, route: str = "/v1/models") -> httpx.Response:
    return httpx.get(running.address + route, headers={"Host": host}, timeout=60)


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_another_site(route: str, running: Running) -> None:
    answer = ask(running, "evil.example:8000", route)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
    assert "'evil.example:8000'" in error["message"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_texts_are_not_written_for_another_site(running: Running) -> None:
    body = {"prompt": "the film was", "max_tokens": 2}
    for host, status in {"evil.example": 403, "localhost": 200}.items():
        answer = httpx.post(f"{running.address}/v1/completions", json=body, headers={"Host": host}, timeout=60)
        assert answer.status_code == status


def test_openais_client_tells_of_it(running: Running) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is in radq[dev]")
    client = openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)
    assert client.models.list()
    with pytest.raises(openai.PermissionDeniedError, match="this server is not called"):
        client.with_options(default_headers={"Host": "evil.example"}).models.list()


def test_a_request_without_a_host_is_answered(running: Running) -> None:
    """As checks of health by proxies are in HTTP/1.0; browsers always send a host."""
    import socket

    place = httpx.URL(running.address)
    with socket.create_connection((place.host, place.port or 80), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(100)


def test_listed_hosts_are_served(models: Path) -> None:
    with serving(make_config(models, hosts=["radq.example.com"])) as running:
        assert ask(running, "radq.example.com").status_code == 200
        assert ask(running, "localhost").status_code == 200
        assert ask(running, "other.example.com").status_code == 403


def test_a_server_at_all_addresses_is_served_by_any_name(models: Path) -> None:
    with serving(make_config(models), address="0.0.0.0") as running:
        assert ask(running, "gpu-box.lan").status_code == 200
