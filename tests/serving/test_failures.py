"""Failures of the engine and of the scheduler: clients are told, and the server goes on, or its process ends."""

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx
import pytest
from instruments import FailOnce
from serving import Running, make_config, serving

from radq.decoding import engine as engine_module
from radq.decoding.engine import Engine
from radq.registry.config import RequestLimits
from radq.serving import scheduler as scheduler_module

PROMPT = "the film was"
BODIES: list[dict[str, Any]] = [
    {"prompt": PROMPT, "n": 2, "seed": 1, "radq": {"praise": 5}},
    {"prompt": "this plot was good", "seed": 2, "radq": {"length": 3}},
    {"prompt": PROMPT, "seed": 3},
]


def ask(running: Running, body: dict[str, Any], **changes: Any) -> Any:
    answer = httpx.post(f"{running.address}/v1/completions", json={"max_tokens": 5} | body | changes, timeout=60)
    assert answer.status_code == 200
    return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def health(running: Running) -> int:
    return httpx.get(f"{running.address}/health").status_code


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scheduler_module, "PAUSE", 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is full
        yield


def test_memory_that_runs_out_anywhere_costs_no_text(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, mode = Engine.step, FailOnce(None)

    def failing(self: Engine) -> Any:
        with mode:
            return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    with serving(make_config(models)) as running, ThreadPoolExecutor(3) as pool:
        whole = [ask(running, body) for body in BODIES]
        count = mode.count
        for number in range(0, count, count // 15):
            mode = FailOnce(number)
            monkeypatch.setattr(engine_module, "_HALVED", WeakKeyDictionary())
            assert list(pool.map(lambda body: ask(running, body), BODIES)) == whole
            assert health(running) == 200


def fail(times: int, work: Callable[..., Any]) -> Callable[..., Any]:
    left = [times]

    def failing(*given: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("a bug")
        return work(*given, **options)

    return failing


@pytest.mark.parametrize("name", ["_admit", "_step", "_deliver", "_put_away", "_obey_deadline"])
def test_after_a_bug_the_scheduler_begins_anew(models: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_config(models)) as running:
        (whole,) = ask(running, BODIES[2])
        scheduler = running.server.scheduler
        monkeypatch.setattr(scheduler, name, fail(1, getattr(scheduler, name)))
        (text,) = ask(running, BODIES[2])
        assert text in [whole, ("", "error")]
        assert ask(running, BODIES[2]) == [whole]
        assert health(running) == 200


def test_a_text_whose_engine_cannot_be_made_is_answered(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_config(models)) as running:
        monkeypatch.setattr(scheduler_module, "take_engine", fail(1, scheduler_module.take_engine))
        assert ask(running, BODIES[2]) == [("", "error")]
        assert ask(running, BODIES[2])[0][1] != "error"


def test_a_server_that_can_decode_nothing_any_more_ends_with_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_config(models)) as running:
        scheduler, ended = running.server.scheduler, threading.Event()
        scheduler.when_broken = ended.set
        monkeypatch.setattr(Engine, "step", fail(10**9, Engine.step))
        assert ask(running, BODIES[2]) == [("", "error")]
        assert ended.wait(30)
        scheduler.join()
        assert health(running) == 503
        assert httpx.post(f"{running.address}/radq/score", json={"text": PROMPT}).status_code == 503


# --- turns ---


def test_many_samples_of_one_request_leave_room_for_others(models: Path) -> None:
    """Clients at one address without a key are one client, whose requests take turns, too."""
    with (
        serving(make_config(models, limits=RequestLimits(rows=2, max_tokens=48))) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        scheduler, begun, go = running.server.scheduler, threading.Event(), threading.Event()
        scheduler.call(lambda: (begun.set(), go.wait(30)))
        assert begun.wait(30)
        ends: list[str] = []

        def asked(name: str, n: int) -> None:
            ask(running, {"prompt": PROMPT, "n": n, "max_tokens": 20, "temperature": 0})
            ends.append(name)

        many = pool.submit(asked, "many", 16)
        while scheduler.waiting < 16:
            threading.Event().wait(0.01)
        few = pool.submit(asked, "few", 1)
        while scheduler.waiting < 17:
            threading.Event().wait(0.01)
        go.set()
        few.result(), many.result()
    assert ends == ["few", "many"]


def test_long_texts_of_one_request_leave_a_row_for_others(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a request that takes all rows would hold up all others until one of its texts ends."""
    with (
        serving(make_config(models, limits=RequestLimits(rows=2, max_tokens=48))) as running,
        ThreadPoolExecutor(2) as pool,
    ):
        scheduler, go = running.server.scheduler, threading.Event()
        step = scheduler._step
        monkeypatch.setattr(scheduler, "_step", lambda engine: (step(engine), go.wait(30)))
        ends: list[str] = []

        def asked(name: str, n: int, tokens: int) -> None:
            ask(running, {"prompt": PROMPT, "n": n, "max_tokens": tokens, "ignore_eos": True})
            ends.append(name)

        many = pool.submit(asked, "many", 2, 40)
        while scheduler.running < 2:
            threading.Event().wait(0.01)
        few = pool.submit(asked, "few", 1, 2)
        while scheduler.waiting < 1:
            threading.Event().wait(0.01)
        go.set()
        few.result(), many.result()
    assert ends == ["few", "many"]


def test_scores_are_refused_when_the_time_of_an_end_is_over(models: Path) -> None:
    with serving(make_config(models)) as running, ThreadPoolExecutor(1) as pool:
        scheduler, begun, go = running.server.scheduler, threading.Event(), threading.Event()
        scheduler.call(lambda: (begun.set(), go.wait(30)))
        assert begun.wait(30)
        score = pool.submit(httpx.post, f"{running.address}/radq/score", json={"text": PROMPT}, timeout=60)
        while not len(scheduler._tasks) > 1:
            threading.Event().wait(0.01)
        scheduler.close()
        go.set()
        assert score.result().status_code == 503
