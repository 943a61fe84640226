"""A judge that asks a server: scores, prose, failures of all kinds, and the key, which stays secret."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_servers import Answer, faking, read_text, refuse, say

from radq.errors import OptionError, ServerError
from radq.judges import chat
from radq.judges.base import CachedJudge
from radq.judges.chat import ChatServer, RefusedError, _choose_wait, _read_wait, find_server
from radq.judges.llm import ASKS, Rubric, RubricJudge, load_rubric_judge

RUBRIC = Rubric("How long is it? Scale: 1 to 5", (1.0, 5.0))
TEXTS = [f"{'very ' * n}fine" for n in range(20)]
HELLO = [{"role": "user", "content": f"x\n{'=' * 10}\nhello\n{'=' * 10}\n"}]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chat, "FIRST_WAIT", 0.001)
    return None


def grade(text: str) -> float:
    return len(text) % 5 + 1.0


def answer_well(number: int, body: dict[str, Any]) -> Answer:
    return say(f"{grade(read_text(body)):g}")


def ask(server: ChatServer) -> str:
    return server.ask(HELLO, threading.Event())


# --- scores ---


def test_scores_are_those_of_the_server(tmp_path: Path) -> None:
    with faking(answer_well) as (fake, address):
        judge = RubricJudge(ChatServer("m", address, "secret"), RUBRIC, jobs=3)
        cached = CachedJudge(judge, tmp_path)
        scores = cached.score([*TEXTS, " ", TEXTS[3]])
        np.testing.assert_array_equal(scores, [*map(grade, TEXTS), np.nan, grade(TEXTS[3])])
        assert sorted(fake.texts) == sorted(TEXTS)  # a text that stands twice is judged once
        assert (judge.server.usage.calls, judge.server.usage.prompt_tokens) == (20, 2000)
        assert judge.server.usage.completion_tokens == 40
        call = fake.calls[0]
        assert (call["model"], call["temperature"], call["path"]) == ("m", 0, "/v1/chat/completions")
        assert call["headers"]["Authorization"] == "Bearer secret"
        np.testing.assert_array_equal(cached.score(TEXTS), [*map(grade, TEXTS)])
        assert cached.kept == 20
        assert len(fake.calls) == 20
    assert (tmp_path / "judges.sqlite").read_bytes().find(b"secret") < 0
    assert judge.limits == (1, 5)


def test_the_name_tells_model_rubric_and_server() -> None:
    def name(model: str = "m", address: str = "http://a/v1", rubric: Rubric = RUBRIC) -> str:
        return RubricJudge(ChatServer(model, address, "key"), rubric).name

    names = [name(), name("n"), name(address="http://b/v1"), name(rubric=Rubric("Scale: 1 to 5", (1, 5)))]
    assert len({*names}) == 4
    assert name() == name(address="http://a/v1/")


def test_prose_is_asked_again_and_then_missing(tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        text, asked = read_text(body), (len(body["messages"]) + 1) // 2
        if text == "never":
            return say(["It is rather good, a 4.", None, "9"][asked - 1])  # type: ignore
        return say("3" if asked == 2 else "I think that it deserves a 3.")

    with faking(answer) as (fake, address):
        judge = RubricJudge(ChatServer("m", address), RUBRIC)
        cached = CachedJudge(judge, tmp_path)
        np.testing.assert_array_equal(cached.score(["a", "never", "b"]), [3, np.nan, 3])
        assert cached.missing == judge.missing == 1
        assert judge.problem == "'9' is not one number from 1 to 5"
        assert len(fake.calls) == 2 + ASKS + 2
        again = next(call for call in fake.calls if len(call["messages"]) == 3)["messages"]
        assert [message["role"] for message in again] == ["user", "assistant", "user"]
        assert "without any word" in again[2]["content"]
        assert "Authorization" not in fake.calls[0]["headers"]
        np.testing.assert_array_equal(cached.score(["a", "never"]), [3, np.nan])  # only missing ones are asked again
        assert len(fake.calls) == 2 + ASKS + 2 + ASKS


def test_a_text_that_the_server_refuses_is_missing() -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        return refuse(400, "too long.", code="context_length_exceeded") if "very" in read_text(body) else say("2")

    with faking(answer) as (_, address):
        judge = RubricJudge(ChatServer("m", address), RUBRIC)
        np.testing.assert_array_equal(judge.score(["fine", "very fine"]), [2, np.nan])
    assert judge.problem == "the server refuses it: too long"


# --- failures ---


FAILURES: list[Answer | None] = [
    refuse(429, headers={"Retry-After": "0"}),
    refuse(500),
    refuse(503, headers={"Retry-After": "soon"}),
    (502, b"<html>bad gateway</html>", {}),
    (200, b'{"choices": [', {}),
    (200, {"choices": []}, {}),
    (200, b"", {"Content-Length": "99"}),  # the connection ends too early
    None,
]


@pytest.mark.parametrize("failure", FAILURES, ids=str)
def test_failures_are_repeated(failure: Answer | None) -> None:
    with faking(lambda number, body: failure if number in (1, 2, 5) else answer_well(number, body)) as (fake, address):
        judge = RubricJudge(ChatServer("m", address, timeout=0.5), RUBRIC, jobs=2)
        np.testing.assert_array_equal(judge.score(TEXTS[:5]), [*map(grade, TEXTS[:5])])
        assert judge.server.usage.failures >= 3
        assert judge.server.usage.calls == 5


def test_a_server_that_stays_down_ends_the_work_and_keeps_its_scores(tmp_path: Path) -> None:
    with faking(lambda number, body: refuse(500, "down") if number >= 7 else answer_well(number, body)) as (fake, url):
        judge = RubricJudge(ChatServer("m", url), RUBRIC, jobs=3)
        with pytest.raises(ServerError, match=r"fails: 500, down\. hint: run the same command again"):
            CachedJudge(judge, tmp_path).score(TEXTS)
        fake.answer = answer_well
        cached = CachedJudge(RubricJudge(ChatServer("m", url), RUBRIC), tmp_path)
        np.testing.assert_array_equal(cached.score(TEXTS), [*map(grade, TEXTS)])
        assert cached.kept == 7


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            refuse(401, "Incorrect API key provided: hush."),
            "refuses the key: Incorrect API key provided: ….*OPENAI_API",
        ),
        (refuse(403), "refuses the key"),
        (refuse(404, "no such model"), "has no model 'm'.*no such model.*with /v1"),
        ((307, b"", {"Location": "http://127.0.0.1:1/v1/chat/completions"}), "redirects"),
    ],
)
def test_mistakes_end_the_work_at_once(answer: Answer, message: str) -> None:
    with faking(lambda number, body: answer) as (fake, address):
        judge = RubricJudge(ChatServer("m", address, "hush"), RUBRIC, jobs=1)
        with pytest.raises(ServerError, match=message) as found:
            judge.score(TEXTS)
        assert len(fake.calls) == 1
        assert "hush" not in str(found.value)


def test_a_server_that_never_answers() -> None:
    with faking(answer_well) as (_, address):
        pass  # it is closed again
    with pytest.raises(ServerError, match="refused"):
        ask(ChatServer("m", address))


def test_settings_that_a_model_does_not_have_are_left_out() -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        for name in ("max_tokens", "temperature"):
            if name in body:
                return refuse(400, f"Unsupported parameter: {name!r}.", param=name, code="unsupported_parameter")
        return say(str(body["max_completion_tokens"]))

    with faking(answer) as (fake, address):
        server = ChatServer("m", address, max_tokens=33)
        assert [ask(server), ask(server)] == ["33", "33"]
        assert len(fake.calls) == 4
        fake.answer = lambda number, body: refuse(400, "prompt is unsupported", param="messages")
        with pytest.raises(RefusedError):
            ask(server)


def test_waits() -> None:
    assert _read_wait("7") == 7
    assert _read_wait("-7") == _read_wait(None) == _read_wait("soon") == 0
    assert 50 < _read_wait(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)) <= 60
    assert _choose_wait(1, 5.0) == 5
    assert _choose_wait(1, 1e9) == chat.LONGEST_WAIT
    assert 0.0005 <= _choose_wait(1, 0) <= 0.001
    assert 0.002 <= _choose_wait(3, 0) <= 0.004
    assert _choose_wait(500, 0) <= chat.LONGEST_WAIT


# --- the environment ---


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    assert find_server("m").address == chat.OPENAI
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1/")
    assert find_server("m").address == "http://127.0.0.1:8000/v1"
    assert "hush" not in repr(vars(find_server("m").usage))
    (tmp_path / "rubric.md").write_text("Scale: 0 to 2")
    judge = load_rubric_judge(f"m#{tmp_path}/rubric.md")
    assert (judge.limits, judge.server.model) == ((0, 2), "m")
    with pytest.raises(OptionError, match="no rubric.*openai:m#rubric.md"):
        load_rubric_judge("m")
    with pytest.raises(OptionError, match="names no model"):
        find_server("")
    for wrong in ("127.0.0.1:8000", "ftp://a/v1", "http://me:hush@a/v1", "http://a/v1?key=hush", "http://[a"):
        monkeypatch.setenv("OPENAI_BASE_URL", wrong)
        with pytest.raises(OptionError, match="OPENAI_BASE_URL must be") as found:
            find_server("m")
        assert "hush" not in str(found.value)
    monkeypatch.setenv("OPENAI_BASE_URL", "")
    monkeypatch.setenv("OPENAI_API_KEY", "hu\nsh")
    with pytest.raises(OptionError, match="no key has"):
        find_server("m")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(OptionError, match="neither"):
        find_server("m")
