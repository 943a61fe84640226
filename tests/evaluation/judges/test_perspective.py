"""The Perspective judge against a server in this process: queries, quota, retries, and what it says on failure."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radq.errors import ModelError, OptionError
from radq.evaluation.judges.base import CachedJudge, load_judge
from radq.evaluation.judges.perspective import MAX_BYTES, PerspectiveJudge

Answer = tuple[int, Any, dict[str, str]]


class Service:
    """Answers as it is told to, and remembers what it was asked and when."""

    def __init__(self) -> None:
        self.queries: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.answer: Callable[[dict[str, Any]], Answer] = lambda query: score(len(query["comment"]["text"]) / 100)
        self.url = ""


def score(value: float, attribute: str = "TOXICITY") -> Answer:
    return 200, {"attributeScores": {attribute: {"summaryScore": {"value": value, "type": "PROBABILITY"}}}}, {}


def failure(status: int, message: str, **headers: str) -> Answer:
    return status, {"error": {"code": status, "message": message}}, headers


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            service.queries.append(query)
            service.keys.append(self.headers["X-Goog-Api-Key"])
            service.paths.append(self.path)
            status, document, headers = service.answer(query)
            data = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PERSPECTIVE_API_KEY", "secret-key")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield service
    server.shutdown()
    server.server_close()
    thread.join()


def make(service: Service, attribute: str = "TOXICITY", **options: Any) -> PerspectiveJudge:
    return PerspectiveJudge(attribute, service.url, **({"queries_per_second": 1e6, "backoff": 0.001} | options))


def test_queries_and_scores(service: Service) -> None:
    np.testing.assert_allclose(make(service).score(["abcd", "", "ä"]), [0.04, np.nan, 0.01])
    assert service.queries[0] == {
        "comment": {"text": "abcd"},
        "requestedAttributes": {"TOXICITY": {}},
        "languages": ["en"],
        "doNotStore": True,
    }
    assert service.keys == ["secret-key"] * 2
    assert service.paths == ["/v1alpha1/comments:analyze"] * 2  # the key is in no address, where logs would keep it
    service.answer = lambda query: score(0.5, "INSULT")
    assert make(service, "insult").score(["x"]).tolist() == [0.5]
    assert make(service, "insult").name == "perspective:INSULT"


def test_by_name_with_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_URL", service.url + "/")
    monkeypatch.setenv("PERSPECTIVE_QPS", "1000")
    assert load_judge("perspective").score(["abc"]).tolist() == [0.03]
    assert load_judge("not:perspective:TOXICITY").score(["abc"]).tolist() == [0.97]
    monkeypatch.setenv("PERSPECTIVE_QPS", "0")
    with pytest.raises(OptionError, match="PERSPECTIVE_QPS is '0'"):
        load_judge("perspective")
    monkeypatch.delenv("PERSPECTIVE_API_KEY")
    with pytest.raises(OptionError, match="needs a key.*PERSPECTIVE_API_KEY"):
        load_judge("perspective")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the judge waited, on a clock that goes on only while it does."""
    waits: list[float] = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr("radq.evaluation.judges.perspective.time", clock)
    return waits


def test_one_query_a_second_unless_told_otherwise(
    service: Service, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PERSPECTIVE_QPS", raising=False)
    PerspectiveJudge(url=service.url).score(["a", "b", "c"])
    assert waits == [0, 1, 1]
    waits.clear()
    make(service, queries_per_second=20).score(["a", "b", "c"])
    assert waits == pytest.approx([0, 0.05, 0.05])


def test_passing_failures_are_tried_again(service: Service) -> None:
    answers = [
        failure(429, "quota"),
        failure(503, "overload", Retry_After="0"),
        (500, b"oops", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        score(0.25),
    ]
    service.answer = lambda query: answers[len(service.queries) - 1]
    assert make(service).score(["x"]).tolist() == [0.25]
    assert len(service.queries) == 4


def test_waits_grow_and_the_service_may_ask_for_more(service: Service, waits: list[float]) -> None:
    service.answer = lambda query: failure(429, "quota", **({"Retry_After": "7"} if len(service.queries) == 2 else {}))
    with pytest.raises(ModelError, match="did not answer in 4 attempts: status 429, quota.*2026"):
        make(service, backoff=2.0, attempts=4).score(["x"])
    assert [wait for wait in waits if wait >= 1] == [2, 7, 8]


def test_lasting_failures_are_named_at_once(service: Service) -> None:
    service.answer = lambda query: failure(403, "API key not valid")
    with pytest.raises(ModelError, match="status 403, API key not valid.*PERSPECTIVE_API_KEY") as caught:
        make(service).score(["x"])
    assert "secret-key" not in str(caught.value)
    service.answer = lambda query: failure(400, "Attribute RUDE is unknown")
    with pytest.raises(ModelError, match="refused 'x'.*Attribute RUDE is unknown"):
        make(service, "rude").score(["x"])
    assert len(service.queries) == 2
    service.answer = lambda query: (200, {"attributeScores": {}}, {})
    with pytest.raises(ModelError, match="without a score for TOXICITY"):
        make(service).score(["x"])
    service.answer = lambda query: (200, b"<html>", {})
    with pytest.raises(ModelError, match="<html>"):
        make(service).score(["x"])


def test_no_service_and_one_that_is_too_slow(service: Service) -> None:
    given_up = threading.Event()

    def slow(query: dict[str, Any]) -> Answer:
        given_up.wait()  # however long that takes
        return score(0.5)

    service.answer = slow
    with pytest.raises(ModelError, match=r"2 attempts: \w+Timeout"):
        make(service, timeout=0.05, attempts=2).score(["x"])
    given_up.set()
    service.url = "http://127.0.0.1:9"
    with pytest.raises(ModelError, match="2 attempts: ConnectError"):
        make(service, attempts=2).score(["x"])


def test_texts_too_long_for_the_service_are_cut_and_counted(service: Service) -> None:
    service.answer = lambda query: score(0.5)
    judge = make(service)
    judge.score(["a" * MAX_BYTES, "a" + "ä" * MAX_BYTES])
    assert judge.truncated == 1
    sent = service.queries[1]["comment"]["text"]
    assert len(sent.encode()) <= MAX_BYTES
    assert set(sent) == {"a", "ä"}


def test_what_is_scored_is_kept_when_the_service_fails(service: Service, tmp_path: Any) -> None:
    service.answer = lambda query: score(0.5) if len(service.queries) < 3 else failure(403, "no")
    with pytest.raises(ModelError, match="403"):
        CachedJudge(make(service), tmp_path).score(["a", "b", "c"])
    service.answer = lambda query: score(0.7)
    assert CachedJudge(make(service), tmp_path).score(["a", "b", "c"]).tolist() == [0.5, 0.5, 0.7]
    assert [query["comment"]["text"] for query in service.queries] == ["a", "b", "c", "c"]
