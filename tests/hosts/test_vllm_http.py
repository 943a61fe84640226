"""The middleware of vLLM's server, before an application that answers as vLLM does."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the server needs radq[serve]")

from families import make_number_tokenizer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PretrainedConfig

from radq.decoding.config import Steering
from radq.errors import OptionError
from radq.hosts import vllm_http
from radq.hosts.details import LOST, AnswerDetails, prepare_details
from radq.hosts.guidance import GUIDES
from radq.hosts.vllm_http import GuideMiddleware
from radq.hosts.vllm_server import VllmServer
from radq.registry.details import TokenTexts
from radq.registry.strengths import Guidance

TOKENIZER = make_number_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
PROMPT = [5, 9, 3]
RANGES = {"nice": [0.0, 1.0], "rude": [0.0, 1.0]}


def make_row(choice: int, position: int, token: int, known: bool = True) -> dict[str, Any]:
    """A recorded row in which a token could have been drawn."""
    numbers = {"ids": [token, 36], "base": [0.5, 0.5], "guided": [0.75, 0.25], "shift": [1.0, 0.0]}
    return {
        **numbers,
        "rewards": {"nice": [0.5, 0.25], "rude": [0.0, 1.0]},
        "base_logprobs": [-2.0, -2.0],
        "kl": 0.125,
        "token": token if known else None,
        "choice": choice,
        "position": position,
    }


class Engine:
    """The client of vLLM's engine, with workers that have recorded some rows."""

    def __init__(self, folder: Path, has_workers: bool = True):
        self.model_config = SimpleNamespace(max_model_len=20, tokenizer=str(folder), hf_config=PretrainedConfig())
        self.has_workers, self.calls, self.speculates, self.errored = has_workers, [], False, False
        self.rows: list[dict[str, Any]] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, *args))
        if not self.has_workers:
            raise AttributeError(method)
        rows, self.rows = (self.rows, []) if method == "radq_details" else ([], self.rows)
        answers = {
            "radq_facts": {"ranges": RANGES, "details": not self.speculates},
            "radq_take": {"tokens": 2.0, "kl": 0.5, "clipped": 0.0, "failed": 0.0},
            "radq_details": rows,
            "radq_score": {"nice": [0.5] * 3, "rude": [0.25] * 3},
        }
        return [answers[method], None if method != "radq_details" else []]  # the second rank draws no tokens


class World:
    """An application behind the middleware, and what has reached it."""

    def __init__(self, folder: Path, **options: Any):
        self.app, self.bodies = FastAPI(), []
        self.app.state.engine_client = self.engine = Engine(folder, **options)
        names = SimpleNamespace(base_model_paths=[SimpleNamespace(name="base")])
        self.app.state.openai_serving_models = names
        self.app.state.args = SimpleNamespace(api_key=None, chat_template=None)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/responses")(self.complete)
        self.app.add_middleware(GuideMiddleware)

    async def complete(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        tokens = [7, 8]
        if body.get("logprobs") is not None:
            self.engine.rows = [make_row(0, len(PROMPT) + place, token) for place, token in enumerate(tokens)]
        if not body.get("stream"):
            choice = make_chunk(0, tokens, " 7 8", "length", PROMPT)
            return JSONResponse({"choices": [choice]})
        chunks = [make_chunk(0, [7], " 7", None, PROMPT), make_chunk(0, [8], " 8", "length")]
        events = [f"data: {json.dumps({'choices': [one]}, separators=(',', ':'))}\n\n" for one in chunks]
        content = "".join([*events, "data: [DONE]\n\n"]).encode()
        parts = [content[first : first + 7] for first in range(0, len(content), 7)]
        return StreamingResponse(iter(parts), media_type="text/event-stream")

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def complete_with(self, **fields: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", json={"model": "base", "prompt": PROMPT, **fields})


def make_chunk(
    index: int, tokens: list[int], text: str, finish: str | None, prompt: list[int] | None = None, **fields: Any
) -> dict[str, Any]:
    logprobs = {"tokens": [str(token) for token in tokens]}
    known = {"index": index, "text": text, "token_ids": tokens, "prompt_token_ids": prompt, "logprobs": logprobs}
    return {**known, "finish_reason": finish, **fields}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("middleware")
    TOKENIZER.save_pretrained(found)
    (found / "guides.yaml").write_text("guides: {nice: 'x:nice=4', rude: 'x:rude=-6'}\nlimits: {body_bytes: 2000}\n")
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "PATIENCE_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def guides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUIDES, str(folder / "guides.yaml"))


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder)


# --- details ---


def test_details_stand_beside_log_probabilities(world: World) -> None:
    answer = world.complete_with(logprobs=0, radq={"nice": 4, "rude": 0, "details": True}).json()
    (choice,) = answer["choices"]
    first, second = choice["logprobs"]["radq"]
    assert (first["id"], first["piece"], second["id"], second["piece"]) == (7, " 7", 8, " 8")
    assert first["candidates"][1] == {
        "id": 36,
        "token": " 36",
        "base_probability": 0.5,
        "probability": 0.25,
        "shift": 0.0,
        "rewards": {"nice": 0.25, "rude": 1.0},
    }
    assert choice["token_ids"] is None
    assert (choice["radq"]["kl"], choice["radq"]["strengths"]) == (0.125, {"nice": 4.0, "rude": 0.0})
    assert (answer["radq"]["kl"], answer["radq"]["sampler"]) == (0.25, "vllm")
    assert world.bodies[0]["return_token_ids"] is True


def test_streams_have_the_same_details_and_end_with_a_confirmation(world: World) -> None:
    fields = {"logprobs": 0, "radq": {"nice": 4, "details": True}}
    whole = world.complete_with(**fields).json()
    response = world.complete_with(**fields, stream=True, return_token_ids=True)
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    first, second = (json.loads(event.removeprefix("data: ")) for event in events)
    details = [chunk["choices"][0]["logprobs"]["radq"] for chunk in (first, second)]
    assert details[0] + details[1] == whole["choices"][0]["logprobs"]["radq"]
    assert "radq" not in first
    assert second["radq"] == whole["radq"]
    assert second["choices"][0]["radq"] == whole["choices"][0]["radq"]
    assert first["choices"][0]["prompt_token_ids"] == PROMPT


def test_other_requests_pay_nothing(world: World) -> None:
    """An unguided one passes as it is; a guided one without details is asked about once, when it ends."""
    plain = world.complete_with(stream=True)
    assert '"radq"' not in plain.text
    assert "vllm_xargs" not in world.bodies[0]
    assert world.engine.calls == []
    guided = world.complete_with(stream=True, radq={"nice": 4})
    assert guided.text.count('"radq"') == 1
    assert [call[0] for call in world.engine.calls] == ["radq_take"]
    assert "return_token_ids" not in world.bodies[1]


def test_several_texts_are_told_apart_by_seeds(world: World) -> None:
    for seed in (None, -1, 12, "12"):
        world.complete_with(logprobs=0, n=3, seed=seed, radq={"nice": 4, "details": True})
        body = world.bodies.pop()
        assert body["seed"] == body["vllm_xargs"]["radq_seed"] >= 0
        assert body["seed"] == 12 or seed in (None, -1)
    world.complete_with(logprobs=0, seed=5, radq={"nice": 4, "details": True}, vllm_xargs={"radq_seed": "mine"})
    assert "radq_seed" not in world.bodies.pop()["vllm_xargs"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "together with logprobs"),
    ({"logprobs": False}, "together with logprobs"),
    ({"logprobs": 1, "prompt": ["a", "b"]}, "one prompt at a time"),
    ({"logprobs": 1, "prompt": [[5], [6]]}, "one prompt at a time"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"logprobs": 1, "n": "many"}, "n must be a whole number, got 'many'"),
    ({"logprobs": 1, "n": [2]}, "n must be a whole number"),
    ({"logprobs": 1, "n": 2, "seed": 1.5}, "seed must be a whole number, got 1.5"),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_details_that_cannot_be_told_are_refused(fields: dict[str, Any], reason: str, world: World) -> None:
    response = world.complete_with(radq={"nice": 4, "details": True}, **fields)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert world.bodies == []


def test_a_server_that_cannot_tell_details_says_so(folder: Path) -> None:
    fields = {"logprobs": 0, "radq": {"nice": 4, "details": True}}
    lonely = World(folder, has_workers=False)
    response = lonely.complete_with(**fields)
    assert response.status_code == 400
    assert "--worker-extension-cls" in response.json()["error"]["message"]
    for answer in (lonely.ask("GET", "/radq/info"), lonely.ask("POST", "/radq/score", json={"text": "5"})):
        assert answer.status_code == 503
        assert "--worker-extension-cls" in answer.json()["error"]["message"]
    assert lonely.ask("GET", "/").status_code == 200
    speculating = World(folder)
    speculating.engine.speculates = True
    assert "speculated" in speculating.complete_with(**fields).json()["error"]["message"]
    other = speculating.ask("POST", "/v1/responses", json={"input": "5", **fields})
    assert "this kind of answer" in other.json()["error"]["message"]


# --- texts in pieces ---


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], str]]]:
    """Tokens, and chunks of them with their text; some of it is held back until later chunks."""
    tokens = draw(st.lists(st.integers(3, 35), min_size=1, max_size=12))
    whole = "".join(f" {token}" for token in tokens)
    ends = sorted({*draw(st.lists(st.integers(1, len(tokens)))), len(tokens)})
    chunks, first, written = [], 0, 0
    for end in ends:
        known = sum(len(f" {token}") for token in tokens[:end])
        upto = len(whole) if end == len(tokens) else draw(st.integers(written, known))
        chunks.append((tokens[first:end], whole[written:upto]))
        first, written = end, upto
    return tokens, chunks


@settings(deadline=None)
@given(cut_texts(), st.booleans())
def test_pieces_of_a_chunk_make_its_text(cut: tuple[list[int], list[tuple[list[int], str]]], known: bool) -> None:
    tokens, chunks = cut
    rows = [make_row(2, len(PROMPT) + place, token, known) for place, token in enumerate(tokens)]

    async def fetch() -> Iterator[Any]:
        """Two more rows than have been asked for."""
        taken, rows[:] = rows[:2], rows[2:]
        return taken + rows

    async def run() -> list[Any]:
        details, found = AnswerDetails(Guidance({"nice": 1.0}, Steering()), TEXTS, fetch, False), []
        for number, (part, text) in enumerate(chunks):
            finish = "length" if number == len(chunks) - 1 else None
            chunk = make_chunk(2, part, text, finish, None if number else PROMPT)
            await details.add({"choices": [chunk]})
            told = chunk["logprobs"]["radq"]
            assert "".join(one["piece"] for one in told) == text
            found += told
            assert ("radq" in chunk) == (finish is not None)
            assert "error" not in chunk.get("radq", {})
        return found

    assert [one["id"] for one in asyncio.run(run())] == tokens


def add_whole(rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    async def fetch() -> list[dict[str, Any]]:
        return rows

    choice = make_chunk(0, [7, 8, 2], " 7 8", "stop", PROMPT, **fields)
    asyncio.run(AnswerDetails(Guidance({"nice": 1.0}, Steering()), TEXTS, fetch, True).add({"choices": [choice]}))
    return choice


def test_whole_answers_are_cut_at_their_tokens() -> None:
    rows = [make_row(0, 3 + place, token) for place, token in enumerate([7, 8, 2])]
    ended = add_whole(rows)  # by the last token, which is no part of the text
    assert [one and one["piece"] for one in ended["logprobs"]["radq"]] == [" 7", " 8", None]
    stopped = add_whole(rows, stop_reason="9")
    assert [one["id"] for one in stopped["logprobs"]["radq"]] == [7, 8, 2]
    assert "error" not in ended["radq"] | stopped["radq"]


def test_details_that_are_lost_are_named() -> None:
    """A row of another token, or none at all, is never told as if it belonged to the text."""
    choice = add_whole([make_row(0, 3, 7), make_row(0, 4, 9)])
    assert [one and one["id"] for one in choice["logprobs"]["radq"]] == [7, None, None]
    assert choice["radq"]["error"] == LOST


def test_requests_are_prepared_once() -> None:
    with pytest.raises(OptionError, match="kind of answer"):
        prepare_details({"logprobs": 1}, "/v1/messages")
    body: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "vllm_xargs": {}}
    assert prepare_details(body, "/v1/chat/completions")
    assert body == {"logprobs": True, "return_token_ids": True, "vllm_xargs": {}}


# --- the page ---


def test_the_page_is_served_with_what_it_needs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<title>" in world.ask("GET", "/").text
    assert world.ask("GET", "/page/main.js").headers["content-security-policy"]
    assert world.ask("GET", "/page/..%2fapp.py").status_code == 404
    info = world.ask("GET", "/radq/info").json()
    assert (info["base"], info["context"], info["chat"], info["needs_key"]) == ("base", 20, False, False)
    assert info["attributes"]["nice"]["rewards"] == [0.0, 1.0]

    async def find_likelihoods(_: VllmServer, token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    monkeypatch.setattr(VllmServer, "find_likelihoods", find_likelihoods)
    monkeypatch.setattr("radq.registry.details.find_bos", lambda config, tokenizer: 1)
    scores = world.ask("POST", "/radq/score", json={"text": "5 9 3"}).json()
    assert [one["rewards"]["rude"] for one in scores["tokens"]] == [0.25] * 3
    assert [one["logprob"] for one in scores["tokens"]] == [None, -1.0, -1.0]
    for body in ({"text": "5 " * 20}, {"text": " "}, {"words": "5"}):
        assert world.ask("POST", "/radq/score", json=body).status_code == 400
    assert world.ask("POST", "/radq/score", json={"text": "5" * 3000}).status_code == 413
    assert world.ask("GET", "/radq/score").status_code == 405


def test_keys_guard_what_reads_models(world: World) -> None:
    world.app.state.args.api_key = ["first", "second"]
    assert world.ask("GET", "/").status_code == 200
    for headers in ({}, {"Authorization": "Bearer third"}):
        assert world.ask("GET", "/radq/info", headers=headers).status_code == 401
        assert world.ask("POST", "/radq/score", json={"text": "5"}, headers=headers).status_code == 401
    info = world.ask("GET", "/radq/info", headers={"Authorization": "Bearer second"})
    assert info.json()["needs_key"] is True


def test_nothing_is_told_without_a_key(world: World) -> None:
    """vLLM itself refuses such a request, after the middleware."""
    world.app.state.args.api_key = ["first"]
    fields = {"model": "base", "prompt": PROMPT, "radq": {"nicer": 1}}
    passed = world.ask("POST", "/v1/completions", json=fields)
    assert "nice," not in passed.text
    assert world.bodies == [fields]
    refused = world.ask("POST", "/v1/completions", json=fields, headers={"Authorization": "Bearer first"})
    assert "there are nice, rude" in refused.json()["error"]["message"]


def test_an_answer_that_is_no_object_passes(world: World) -> None:
    """As vLLM answers a client that has gone away."""

    async def answer_null(_: Request) -> JSONResponse:
        return JSONResponse(None)

    world.app.post("/v1/chat/completions")(answer_null)
    answer = world.ask("POST", "/v1/chat/completions", json={"model": "base", "radq": {"nice": 4}})
    assert (answer.status_code, answer.json()) == (200, None)


def test_a_server_whose_engine_has_stopped_answers(world: World) -> None:
    async def wait_forever(_: Request) -> None:
        world.engine.errored = True
        await asyncio.Event().wait()

    world.app.post("/v1/messages")(wait_forever)
    answer = world.ask("POST", "/v1/messages", json={"model": "base"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


def test_a_server_below_a_path_has_its_page_there(world: World) -> None:
    async def run() -> list[int]:
        transport = httpx.ASGITransport(world.app, root_path="/models")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [(await client.get(path)).status_code for path in ("/models/", "/models/page/main.js")]

    assert asyncio.run(run()) == [200, 200]
