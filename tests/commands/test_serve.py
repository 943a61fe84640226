"""The command that serves, as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

pytest.importorskip("fastapi", reason="the server needs radq[serve]")

from command_runs import fails
from serving import make_models

from radq.cli import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Path:
    folder = make_models(tmp_path_factory.mktemp("served"), toy)
    config = {"base": str(folder / "toy"), "guides": {"praise": f"{folder / 'q'}:praise=10"}, "device": "cpu"}
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    return folder


@contextmanager
def process(models: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "radq", "serve", str(models / "serve.yaml"), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as one:
        assert one.stdout is not None
        lines = ""
        while not lines.strip().endswith("}"):
            line = one.stdout.readline()
            assert line, "the server did not start"
            lines += line
        try:
            yield one, json.loads(lines)["address"]
        finally:
            one.kill()


@pytest.mark.slow
def test_sigterm_under_load(models: Path) -> None:
    with process(models) as (one, address):

        def ask(number: int) -> int:
            body = {"prompt": "the film", "max_tokens": 40, "radq": {"praise": number}}
            try:
                return httpx.post(f"{address}/v1/completions", json=body, timeout=60).status_code
            except httpx.TransportError:
                return -1  # the server listens no more

        with ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(ask, number % 10) for number in range(100)]
            while sum(answer.done() for answer in answers) < 5:
                time.sleep(0.01)
            one.send_signal(signal.SIGTERM)
            code = one.wait(timeout=60)
            statuses = [answer.result() for answer in answers]
    assert code == 0
    assert set(statuses) <= {200, 503, -1}
    assert 200 in statuses


def test_health_tells_the_end_before_the_door_closes(models: Path) -> None:
    with process(models) as (one, address):
        assert httpx.get(f"{address}/health").status_code == 200
        one.send_signal(signal.SIGTERM)
        statuses = []
        while 503 not in statuses:
            statuses.append(httpx.get(f"{address}/health").status_code)
        assert one.wait(timeout=60) == 0
    assert set(statuses) <= {200, 503}


def test_check(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--check", str(models / "serve.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"base": "toy", "guides": ["praise"], "models": []}
    assert main(["serve", "--check", str(models / "serve.yaml")]) == 0
    assert "guide praise: praise, strengths from -100 to 100" in capsys.readouterr().out
    assert "nowhere" in fails(capsys, "serve", "--check", str(models / "serve.yaml"), "--base", "./nowhere")
    assert "--max-model-len 63" in fails(
        capsys, "serve", "--check", str(models / "serve.yaml"), "--max-model-len", "64"
    )


def test_a_port_that_is_taken(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "cannot listen" in fails(capsys, "serve", str(models / "serve.yaml"), "--port", str(port))


def test_an_address_of_ipv6(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        taken_port = str(taken.getsockname()[1])
        line = fails(capsys, "serve", str(models / "serve.yaml"), "--host", "::1", "--port", taken_port)
    assert f"cannot listen at ::1:{taken_port}: Address already in use" in line
