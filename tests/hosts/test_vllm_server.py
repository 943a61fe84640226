"""`vllm serve` with guides, over HTTP: whatever one client asks for, all others get their own texts."""

import asyncio
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
import yaml
from families import make_reward
from serving import Running, serving
from vllm_world import NEW_TOKENS, PROMPTS, TOKENIZER, World

from radq.models.kinds import RadQ
from radq.registry.config import ServeConfig
from radq.sources.hub import quiet

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: radq[vllm]"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
START_SECONDS = 900
GREEDY: dict[str, Any] = {"model": "base", "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}


class Server:
    """A running `vllm serve`."""

    def __init__(self, world: World, folder: Path):
        self.world, self.folder = world, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        q, v = world.guides["q"].partition(":")[0], world.guides["v"].partition(":")[0]
        guides = {
            "nice": f"{q}:nice=4",
            "rude": {"guide": f"{q}:rude", "range": [-60, 60], "suggested": -6},
            "kind": f"{v}:nice=4",
            "broken": f"{make_broken(world, folder)}:nice=1",
        }
        settings = {
            "base": str(world.base),
            "name": "base",
            "guides": guides,
            "defaults": {"max_tokens": 12},
            "limits": {"top_k": 32},
            "models": {"gentle": {"nice": 8, "rude": True, "kl_budget": 0.2, "top_k": 6}},
        }
        (folder / "guides.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(world.base)]
        command += ["--port", str(self.port), "--served-model-name", "base", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "63", "--max-num-seqs", "64", "--no-enable-chunked-prefill"]
        command += ["--generation-config", "vllm", "--gpu-memory-utilization", "0.2"]
        command += ["--logits-processors", "radq.hosts.vllm:GuidedProcessor"]
        command += ["--middleware", "radq.hosts.vllm_http.GuideMiddleware"]
        command += ["--worker-extension-cls", "radq.hosts.vllm_worker.GuideWorker"]
        variables = {"RADQ_GUIDES": str(folder / "guides.yaml"), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(command, env=os.environ | variables, stdout=self.log, stderr=self.log)

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(1)
        raise RuntimeError((self.folder / "log").read_text()[-4000:])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.log.close()

    def complete(self, body: dict[str, Any], route: str = "completions") -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{route}", json=body, timeout=120)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line.startswith("radq_"))}


def make_broken(world: World, folder: Path) -> Path:
    """A reward model that has diverged where it reads the token 33, and scores all other texts."""
    model = make_reward("q", world.base)
    assert isinstance(model, RadQ)
    with torch.no_grad():
        model.backbone.get_input_embeddings().weight[33] = torch.nan
    with quiet():
        model.save_pretrained(folder / "broken")
    return folder / "broken"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    running = Server(World("llama", folder), folder)
    try:
        running.wait()
        yield running
    finally:
        running.stop()


def own(server: Server, prompt: str, strengths: dict[str, float], **options: Any) -> str:
    """The text of radq.generate alone, with the same strengths."""
    q, v = server.world.guides["q"].partition(":")[0], server.world.guides["v"].partition(":")[0]
    kinds = {"nice": f"{q}:nice", "rude": f"{q}:rude", "kind": f"{v}:nice"}
    specifications = [f"{kinds[name]}={number}" for name, number in strengths.items()]
    options = {"top_k": 6, **options}
    tokens = server.world.own(specifications or None, [prompt], **options)[0]
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def ask(prompt: str, radq: str, **fields: Any) -> dict[str, Any]:
    return {**GREEDY, "prompt": prompt, "vllm_xargs": {"radq": radq}, **fields}


def read_stream(server: Server, body: dict[str, Any], route: str = "completions") -> list[dict[str, Any]]:
    """The documents of a stream."""
    with httpx.stream("POST", f"{server.url}/v1/{route}", json={**body, "stream": True}, timeout=120) as stream:
        events = stream.read().decode().strip().split("\n\n")
        assert stream.status_code == 200, events
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"].strip()


# --- clients ---


def test_clients_as_they_are(server: Server) -> None:
    """OpenAI's, Open WebUI's shape of a request, which has texts alone, and plain JSON, as curl sends it."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    arguments = {"radq_guide": "nice", "radq_beta": -7, "radq_top_k": 6, "radq_kl_budget": "none"}
    found = client.completions.create(
        model="base", prompt=PROMPTS[0], temperature=0, max_tokens=8, extra_body={"vllm_xargs": arguments}
    )
    expected = own(server, PROMPTS[0], {"nice": -7}, max_new_tokens=8, stop_token_ids=None)
    assert found.choices[0].text.strip() == expected.strip()
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": PROMPTS[1]}],
        "stream": False,
        "temperature": 0,
        "max_tokens": 8,
        "vllm_xargs": {"radq": "nice=9,rude=-3,kl_budget=none,top_k=6"},
    }
    written = server.complete(body, "chat/completions").json()["choices"][0]["message"]["content"]
    expected = own(server, PROMPTS[1], {"nice": 9, "rude": -3}, max_new_tokens=8, stop_token_ids=None)
    assert written.strip() == expected.strip()
    as_in_radq_serve = {**GREEDY, "prompt": PROMPTS[2], "radq": {"kind": 5, "top_k": 6, "kl_budget": None}}
    assert text_of(server.complete(as_in_radq_serve)) == own(server, PROMPTS[2], {"kind": 5}).strip()


def test_virtual_models_are_their_strengths(server: Server) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["base", "base@gentle"]
    virtual = server.complete(GREEDY | {"model": "base@gentle", "prompt": PROMPTS[0]})
    named = server.complete(ask(PROMPTS[0], "nice=8,rude,kl_budget=0.2,top_k=6"))
    assert text_of(virtual) == text_of(named)
    assert virtual.json()["radq"]["strengths"] == {"nice": 8.0, "rude": -6.0}
    changed = server.complete(GREEDY | {"model": "base@gentle", "prompt": PROMPTS[0], "radq": {"rude": 0}})
    assert changed.json()["radq"]["strengths"] == {"nice": 8.0}
    assert server.complete(GREEDY | {"model": "base@nowhere", "prompt": PROMPTS[0]}).status_code == 404
    twice = ask(PROMPTS[0], "nice=8") | {"radq": "nice=4"}
    assert server.complete(twice).status_code == 400


def test_answers_confirm_what_was_applied(server: Server) -> None:
    before = server.metrics()
    response = server.complete(ask(PROMPTS[0], "nice=9,kl_budget=0.25,top_k=6", n=2, temperature=1))
    applied = response.json()["radq"]
    assert applied["strengths"] == {"nice": 9}
    assert (applied["kl_budget"], applied["top_k"]) == (0.25, 6)
    assert 0 < applied["kl"] <= 0.25 + 1e-4
    assert json.loads(response.headers["x-radq"])["strengths"] == {"nice": 9}
    after = server.metrics()
    assert after["radq_tokens_total"] - before["radq_tokens_total"] == 2 * NEW_TOKENS
    assert after["radq_kl_total"] > before["radq_kl_total"]
    plain = server.complete({**GREEDY, "prompt": PROMPTS[0]})
    assert "radq" not in plain.json()
    assert "x-radq" not in plain.headers
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask("5 9", "nice=9", stream=True)) as stream:
        assert json.loads(stream.headers["x-radq"])["strengths"] == {"nice": 9}
        assert b"[DONE]" in stream.read()
    chunks = read_stream(server, ask(PROMPTS[0], "nice=9,kl_budget=0.25,top_k=6", n=2, temperature=1))
    assert all("radq" in chunk or chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert chunks[-1]["radq"]["strengths"] == {"nice": 9}
    assert 0 < chunks[-1]["radq"]["kl"] <= 0.25 + 1e-4


# --- details ---

DETAILED = [
    {"nice": 9, "rude": -3, "kl_budget": 0.4, "top_k": 6},
    {"kind": 6, "nice": 0, "kl_budget": None, "top_k": 5},
    {"nice": 0, "rude": 0, "kind": 0},
]
NUMBERS = ("logprob", "base_logprob", "shift", "kl")


def drop_last(details: list[Any]) -> list[dict[str, Any]]:
    """Details without that of a token that ends the text, of which there are none."""
    return details[:-1] if details[-1] is None else details


def assert_same_details(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [(one["id"], one["token"], one["piece"]) for one in found] == [
        (one["id"], one["token"], one["piece"]) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert [one[name] for name in NUMBERS] == pytest.approx([other[name] for name in NUMBERS], abs=1e-3)
        assert one["rewards"] == pytest.approx(other["rewards"], abs=1e-3)
        assert len(one["candidates"]) == len(other["candidates"])
        known = {candidate["id"]: candidate for candidate in other["candidates"]}  # equal ones may change places
        for candidate in one["candidates"]:
            same = known[candidate["id"]]
            assert candidate.keys() == same.keys()
            assert candidate["token"] == same["token"]
            for name in ("base_probability", "probability", "shift", "rewards"):
                assert candidate[name] == pytest.approx(same[name], abs=1e-3)


@pytest.fixture(scope="module")
def own_server(server: Server) -> Iterator[Running]:
    """A server of `radq serve` with the same file."""
    with serving(ServeConfig.read(server.folder / "guides.yaml")) as running:
        yield running


def assert_same_summary(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["strengths"] == expected["strengths"]
    assert found["rewards"] == pytest.approx(expected["rewards"], abs=1e-3)
    for name in ("kl", "shift", "perplexity"):
        assert found[name] == pytest.approx(expected[name], abs=1e-3, rel=1e-3)


@pytest.mark.parametrize("radq", DETAILED)
def test_details_are_those_of_radq_serve(radq: dict[str, Any], server: Server, own_server: Running) -> None:
    count = 0
    for prompt in PROMPTS:
        body = {"model": "base", "prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 1}
        body |= {"radq": radq | {"details": True}, "return_token_ids": True}
        expected = httpx.post(f"{own_server.address}/v1/completions", json=body, timeout=60).json()["choices"][0]
        whole = server.complete(body).json()["choices"][0]
        assert whole["prompt_token_ids"] == expected["prompt_token_ids"]
        details = drop_last(whole["logprobs"]["radq"])
        assert_same_details(details, expected["logprobs"]["radq"])
        assert "".join(one["piece"] for one in details) == whole["text"]
        assert_same_summary(whole["radq"], expected["radq"])

        chunks = [chunk["choices"][0] for chunk in read_stream(server, body)]
        told = [[one for one in chunk["logprobs"]["radq"] if one is not None] for chunk in chunks]
        assert ["".join(one["piece"] for one in part) for part in told] == [chunk["text"] for chunk in chunks]
        assert_same_details([one for part in told for one in part], details)
        assert_same_summary(chunks[-1]["radq"], whole["radq"])
        count += len(details)
    assert count > 12


def test_chats_have_details_too(server: Server, own_server: Running) -> None:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    radq = {"nice": 9, "kl_budget": None, "top_k": 6, "details": True}
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "logprobs": True, "radq": radq, "model": "base"}
    answer = httpx.post(f"{own_server.address}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    expected = [entry["radq"] for entry in answer["logprobs"]["content"]]
    whole = server.complete(body, "chat/completions").json()
    details = [entry["radq"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert_same_details(drop_last(details), expected)
    assert whole["prompt_token_ids"] is None  # nobody has asked for it
    chunks = [chunk["choices"][0] for chunk in read_stream(server, body, "chat/completions")]
    streamed = [entry["radq"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert_same_details(drop_last(streamed), expected)


def test_each_choice_has_its_own_details(server: Server) -> None:
    body = GREEDY | {"prompt": PROMPTS[0], "temperature": 1, "n": 4, "logprobs": 0, "return_token_ids": True}
    body |= {"radq": {"nice": 3, "top_k": 9, "details": True}, "max_tokens": 10}
    whole = server.complete(body).json()["choices"]
    streams: dict[int, list[dict[str, Any]]] = {}
    for chunk in read_stream(server, body):
        for choice in chunk["choices"]:
            streams.setdefault(choice["index"], []).append(choice)
    joined = [
        {
            "token_ids": [token for chunk in chunks for token in chunk["token_ids"]],
            "logprobs": {
                name: [value for chunk in chunks for value in chunk["logprobs"][name]]
                for name in ("token_logprobs", "radq")
            },
        }
        for chunks in streams.values()
    ]
    assert len(joined) == len(whole) == 4
    for choice in whole + joined:
        details = choice["logprobs"]["radq"]
        assert [one["id"] for one in details] == choice["token_ids"]
        assert [one["base_logprob"] for one in details] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    assert len({tuple(choice["token_ids"]) for choice in whole}) > 1


def test_details_at_random_times_are_those_of_a_text_alone(server: Server) -> None:
    """Some of the clients go away, and some ask for no details."""
    rng = random.Random(2)
    radq = {"nice": 5, "kind": 0, "kl_budget": None, "top_k": 6, "details": True}
    bodies = [GREEDY | {"prompt": prompt, "logprobs": 0, "radq": radq} for prompt in PROMPTS]
    alone = [server.complete(body).json()["choices"][0]["logprobs"]["radq"] for body in bodies]

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, list[Any]] | None:
        await asyncio.sleep(rng.uniform(0, 1))
        if number % 4 == 1:
            await client.post("/v1/completions", json=ask(PROMPTS[0], "nice=3"))
            return None
        body = bodies[number % len(bodies)] | {"stream": True}
        found: list[Any] = []
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line[6:])["choices"][0]["logprobs"]["radq"]
                if number % 4 == 2 and len(found) > 3:
                    return None
        return number % len(bodies), found

    async def run() -> list[tuple[int, list[Any]] | None]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    found = [pair for pair in asyncio.run(run()) if pair is not None]
    assert len(found) == 16
    for number, details in found:
        assert_same_details(details, alone[number])


# --- the page ---


def test_the_page_and_its_description_are_those_of_radq_serve(server: Server, own_server: Running) -> None:
    for path in ("/", "/page/main.js", "/page/style.css"):
        found, expected = httpx.get(server.url + path), httpx.get(own_server.address + path)
        assert found.status_code == 200
        assert found.content == expected.content
        assert found.headers["content-security-policy"] == expected.headers["content-security-policy"]
    assert httpx.get(f"{server.url}/page/nothing.js").status_code == 404
    info, expected = httpx.get(f"{server.url}/radq/info").json(), httpx.get(f"{own_server.address}/radq/info").json()
    assert info == expected | {"context": 63}
    assert str(server.folder) not in json.dumps(info)


def test_texts_are_scored_as_by_radq_serve(server: Server, own_server: Running) -> None:
    for text in (PROMPTS[0], "7", "5 33 8"):
        found, expected = (
            httpx.post(f"{address}/radq/score", json={"text": text}, timeout=60).json()
            for address in (server.url, own_server.address)
        )
        assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-3)
        assert ("33" in text) == (found["rewards"]["broken"] is None)
        assert found["rewards"] == pytest.approx(expected["rewards"], abs=1e-3)
        for one, other in zip(found["tokens"], expected["tokens"], strict=True):
            assert (one["id"], one["token"]) == (other["id"], other["token"])
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            assert one["rewards"]["kind"] == pytest.approx(other["rewards"]["kind"], abs=1e-3)
    for body in ({}, {"text": ""}, {"text": 5}, {"text": "5", "more": 1}, {"text": "5 " * 63}, {"text": "\ud800"}):
        content = json.dumps(body)
        response = httpx.post(f"{server.url}/radq/score", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from browser import start_browser

    with start_browser() as found:
        yield found


@pytest.fixture(scope="module")
def seed(server: Server) -> int:
    """A seed that gives two different texts, neither of them short."""
    for number in range(100):
        texts = [ask_as_the_page(server, number, nice)["text"] for nice in (8, 0)]
        if min(len(text.split()) for text in texts) >= 4 and texts[0] != texts[1]:
            return number
    raise AssertionError("all texts are short")


@pytest.fixture
def page(driver: Any, server: Server, seed: int) -> Iterator[Any]:
    """The page, with a guide that was set; afterwards the browser must not have complained."""
    from browser import Page

    driver.get_log("browser")
    yield Page(driver, server.url, f"tokens=12&seed={seed}&prompt={quote(PROMPTS[0])}&b.nice=8")
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def ask_as_the_page(server: Server, seed: int, nice: float) -> dict[str, Any]:
    """The answer of the server to the first request of the page."""
    body = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 12, "seed": seed, "temperature": 1, "logprobs": 1}
    radq = {"nice": nice, "rude": 0, "kind": 0, "broken": 0, "details": True, "top_k": 20, "kl_budget": 1.0}
    response = server.complete(body | {"radq": radq})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_the_page_shows_both_texts_and_why(page: Any, server: Server, seed: int) -> None:
    page.open().generate()
    guided, unguided = ask_as_the_page(server, seed, 8), ask_as_the_page(server, seed, 0)
    assert page.text(".guided").split() == guided["text"].split()
    assert page.text(".unguided").split() == unguided["text"].split()
    assert page.coloured(".guided") > 0
    assert page.coloured(".unguided") == 0  # nothing shifts it
    page.point_at(page.all(".guided .token")[2])
    page.until(page.inspector.is_displayed)
    rows, candidates = page.all("#inspector tbody tr"), guided["logprobs"]["radq"][2]["candidates"]
    assert len(rows) >= 8
    for row, candidate in zip(rows[:8], candidates, strict=False):
        shown = row.get_property("textContent")
        assert candidate["token"] in shown
        assert f"{candidate['rewards']['nice']:.2f}".replace("-", "−") in shown


def test_a_candidate_on_the_page_branches(page: Any) -> None:
    page.open().generate()
    before = page.tokens(".guided")
    page.point_at(page.all(".guided .token")[2])
    page.until(page.inspector.is_displayed)
    other = page.find("#inspector tbody tr:not(.chosen) .candidate")
    word = other.get_property("textContent")
    other.click()
    page.wait()
    after = page.tokens(".guided")
    assert after[:2] == before[:2]
    assert after[2] == word != before[2]


def test_the_page_scores_a_text(page: Any, server: Server) -> None:
    page.open("&view=score")
    page.write("#score-text", PROMPTS[2])
    page.generate()
    scores = httpx.post(f"{server.url}/radq/score", json={"text": PROMPTS[2]}, timeout=60).json()
    page.until(lambda: page.tokens("#scored") == [token["token"] for token in scores["tokens"]])
    assert page.numbers("#scored")["perplexity"] == f"{scores['perplexity']:.1f}"


# --- mistakes ---

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"vllm_xargs": {"radq_guide": "nice", "radq_beta": 1e39}}, "nice must be from -100 to 100"),
    ({"vllm_xargs": {"radq": "nice=1e39"}}, "nice must be from -100 to 100"),
    ({"vllm_xargs": {"radq": "rude=61"}}, "rude must be from -60 to 60"),
    ({"vllm_xargs": {"radq": "polite=3"}}, "there is no guide 'polite'"),
    ({"vllm_xargs": {"radq_guide": "/etc/passwd"}}, "there is no guide"),
    ({"vllm_xargs": {"radq_guide": "nice", "radq_top_k": 0}}, "top_k must be a whole number from 1 to 32"),
    ({"vllm_xargs": {"radq": "nice=3,top_k=33"}}, "top_k must be a whole number from 1 to 32"),
    ({"vllm_xargs": {"radqguide": "nice"}}, "no argument 'radqguide'"),
    ({"vllm_args": {"radq_guide": "nice"}}, "'vllm_args' is no field"),
    ({"radq_guide": "nice"}, "'radq_guide' is no field"),
    ({"nice": 4}, "'nice' is no field"),
    ({"radq": {"nice": 3, "details": True}}, "details together with logprobs"),
    ({"radq": {"nice": 3, "details": True}, "logprobs": 1, "prompt": ["5", "9"]}, "one prompt at a time"),
    ({"radq": {"nice": 3, "details": True}, "logprobs": 1, "n": 2, "seed": "x"}, "seed must be a whole number"),
    ({"vllm_xargs": {"radq": "nice=3"}, "use_beam_search": True, "n": 2}, "beam search cannot be guided"),
]


@pytest.mark.parametrize(("fields", "reason"), WRONG)
def test_mistakes_are_answered_with_a_reason(fields: dict[str, Any], reason: str, server: Server) -> None:
    response = server.complete({**GREEDY, "prompt": PROMPTS[0], **fields})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert str(server.folder) not in response.text


def test_a_model_that_diverged_ends_its_own_texts_alone(server: Server) -> None:
    expected = own(server, PROMPTS[0], {"nice": 4}).strip()

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            bodies = [ask(PROMPTS[0], "nice=4,kl_budget=none,top_k=6"), ask("5 33", "broken=1", ignore_eos=False)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies * 4))

    responses = asyncio.run(run())
    assert [text_of(response) for response in responses[::2]] == [expected] * 4
    for response in responses[1::2]:
        assert text_of(response) == ""
        assert "could not score" in response.json()["radq"]["error"]
        assert response.json()["choices"][0]["finish_reason"] == "stop"


# --- many at once ---


def make_wish(rng: random.Random) -> dict[str, float]:
    names = rng.sample(["nice", "rude", "kind"], rng.randint(0, 2))
    return {name: rng.choice([-8.5, 6.0]) for name in names}


def write_wish(wish: dict[str, float], budget: float | None) -> str:
    parts = [f"{name}={number}" for name, number in wish.items()]
    return ",".join([*parts, "top_k=6", f"kl_budget={'none' if budget is None else budget}"])


def test_mixed_requests_at_random_times_get_the_texts_that_they_get_alone(server: Server) -> None:
    rng = random.Random(0)
    wishes = [(rng.choice(PROMPTS), make_wish(rng), rng.choice([None, 0.3]), rng.uniform(0, 4)) for _ in range(64)]

    async def one(client: httpx.AsyncClient, prompt: str, wish: dict[str, float], budget: Any, delay: float) -> str:
        await asyncio.sleep(delay)
        body = ask(prompt, write_wish(wish, budget)) if wish else {**GREEDY, "prompt": prompt}
        return text_of(await client.post("/v1/completions", json=body))

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(one(client, *wish) for wish in wishes))

    for found, (prompt, wish, budget, _) in zip(asyncio.run(run()), wishes, strict=True):
        options = {"kl_budget": budget} if wish else {}
        assert found == own(server, prompt, wish, **options).strip()


def test_cancelled_requests_disturb_nobody_and_leave_nothing_behind(server: Server) -> None:
    rng = random.Random(1)
    expected = own(server, PROMPTS[3], {"nice": 3.0}).strip()

    async def one(client: httpx.AsyncClient, delay: float, patience: float | None) -> str | None:
        await asyncio.sleep(delay)
        call = client.post("/v1/completions", json=ask(PROMPTS[3], "nice=3,kl_budget=none,top_k=6"))
        try:
            return text_of(await asyncio.wait_for(call, patience))
        except TimeoutError:
            return None

    async def run() -> list[str | None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            patience = [rng.uniform(0.05, 2) if rng.random() < 0.5 else None for _ in range(200)]
            return await asyncio.gather(*(one(client, rng.uniform(0, 2), most) for most in patience))

    found = asyncio.run(run())
    assert {text for text in found if text is not None} == {expected}
    deadline = time.monotonic() + 60
    while server.metrics()["radq_cache_bytes"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert server.metrics()["radq_cache_bytes"] == 0
    assert text_of(server.complete(ask(PROMPTS[3], "nice=3,kl_budget=none,top_k=6"))) == expected


def test_a_server_that_is_asked_to_end_answers_everybody(server: Server) -> None:
    """This test is the last one, since it ends the server that all of them share.

    Every client asks again and again, so that there are requests under way when the server is asked to end.
    """
    begun, ended = threading.Event(), threading.Event()

    def read(number: int) -> list[str]:
        body = ask(PROMPTS[3], f"nice={number % 9}", max_tokens=40, stream=number % 2 == 0)
        answers: list[str] = []
        while not ended.is_set():
            lines: list[str] = []
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as answer:
                    for line in answer.iter_lines():
                        begun.set()
                        lines.append(line)
            except httpx.TransportError:  # it came too late
                assert not lines
                break
            answers.append("\n".join(lines))
        return answers

    with ThreadPoolExecutor(48) as pool:
        clients = [pool.submit(read, number) for number in range(48)]
        begun.wait()
        server.process.terminate()
        try:
            server.process.wait(60)
        finally:
            ended.set()
        found = [text for client in clients for text in client.result()]
    for text in found:
        assert "[DONE]" in text or json.loads(text).keys() & {"choices", "error"}
    assert any('"error"' in text for text in found)  # radq's, or vLLM's own where it is faster
