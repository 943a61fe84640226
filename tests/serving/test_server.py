"""A real server, asked by OpenAI's own client and by plain HTTP."""

import json
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from serving import Running, make_config, serving

import radq
from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.decoding.engine import Engine
from radq.errors import OptionError, RadqError
from radq.models import kv_cache
from radq.registry.config import RequestLimits
from radq.serving import app as app_module
from radq.serving import scheduler as scheduler_module

openai = pytest.importorskip("openai", reason="OpenAI's client is in radq[dev]")
PROMPT = "the film was"


@pytest.fixture
def client(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0)


def post(running: Running, route: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(running.address + route, json=body, timeout=60)


def expected(running: Running, prompts: list[Any], names: dict[str, float], **options: Any) -> list[Any]:
    """The texts of `radq.generate` with the same guides."""
    served = running.served
    order = [name for name in served.config.guides if name in names]
    guide = None
    for group in ([name for name in order if name != "length"], [name for name in order if name == "length"]):
        if group:
            folder = served.config.guides[group[0]].folder
            part = radq.load_guide(f"{folder}:" + ",".join(f"{name}={names[name]}" for name in group))
            guide = part if guide is None else guide + part
    options = {"max_new_tokens": 8} | options
    return radq.generate(served.lm, served.tokenizer, prompts, guide, **options)


def guide_of(running: Running, name: str) -> Any:
    loaded = running.served.loaded
    return loaded.guides[loaded.places[name][0]]


# --- OpenAI's client ---


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "toy@kind", "toy@mixed"]
    assert client.models.retrieve("toy@kind").radq == {"praise": 10.0}


def test_completions_are_those_of_generate(client: Any, running: Running) -> None:
    answer = client.completions.create(
        model="toy", prompt=[PROMPT, "this plot"], n=2, max_tokens=4, seed=5, extra_body={"radq": {"praise": 10}}
    )
    texts = expected(running, [PROMPT, "this plot"], {"praise": 10}, samples=2, seed=5, max_new_tokens=4)
    assert [choice.text for choice in answer.choices] == [one.text for one in texts]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in answer.choices] == [one.finish_reason for one in texts]
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in texts)
    cut = [n for n, text in enumerate(texts) if text.finish_reason == "length"]  # the server's means have no stop token
    assert cut
    assert [answer.choices[n].radq["kl"] for n in cut] == pytest.approx([texts[n].kl for n in cut], abs=1e-6)
    assert answer.radq == {
        "seed": 5,
        "sampler": "radq",
        "strengths": {"praise": 10.0},
        "kl_budget": DEFAULT_KL_BUDGET,
        "top_k": 20,
    }


@pytest.mark.parametrize("seed", [0, 2**40 + 1])
@pytest.mark.parametrize("names", [{}, {"praise": 10}, {"praise": 10, "length": -5}])
def test_every_form_of_a_request_draws_the_texts_of_generate(
    seed: int, names: dict[str, float], client: Any, running: Running
) -> None:
    """Prompts as texts and as tokens, samples, streams, chats, and all of them at once."""
    options: dict[str, Any] = {"model": "toy", "n": 3, "max_tokens": 8, "seed": seed, "extra_body": {"radq": names}}
    prompts = [PROMPT, "this plot", "the very good"]
    ids = [running.served.tokenizer(prompt).input_ids for prompt in prompts]
    messages: Any = [{"role": "user", "content": "film was"}]

    def read_stream() -> list[str]:
        texts = [""] * 9
        for event in client.completions.create(prompt=prompts, stream=True, **options):
            for choice in event.choices:
                texts[choice.index] += choice.text
        return texts

    with ThreadPoolExecutor(4) as pool:
        whole, tokens, chat = (
            pool.submit(create, **options, **given)
            for create, given in (
                (client.completions.create, {"prompt": prompts}),
                (client.completions.create, {"prompt": ids}),
                (client.chat.completions.create, {"messages": messages}),
            )
        )
        streamed = pool.submit(read_stream)
    wanted = [one.text for one in expected(running, prompts, names, samples=3, seed=seed)]
    assert [choice.text for choice in whole.result().choices] == wanted
    assert [choice.text for choice in tokens.result().choices] == wanted
    assert streamed.result() == wanted
    answers = expected(running, [messages], names, samples=3, seed=seed)
    assert [choice.message.content for choice in chat.result().choices] == [one.text for one in answers]
    assert len(set(wanted)) > 3  # or the seeds were not seen


def test_requests_for_vllm_are_understood(client: Any) -> None:
    options: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    mine = client.completions.create(**options, extra_body={"radq": "praise=10"})
    vllms = client.completions.create(**options, extra_body={"vllm_xargs": {"radq": "praise=10"}})
    assert mine.choices[0].text == vllms.choices[0].text
    assert vllms.radq["strengths"] == {"praise": 10}
    assert "ignored" not in vllms.radq


def test_chats(client: Any, running: Running) -> None:
    messages = [{"role": "user", "content": "film was"}]
    answer = client.chat.completions.create(model="toy", messages=messages, max_tokens=8, seed=1)
    (text,) = expected(running, [messages], {}, seed=1, kl_budget=None)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", text.text)


@pytest.mark.parametrize("stop", [None, ["good", "bad"], "."])
def test_streams_are_the_whole_texts(client: Any, stop: Any) -> None:
    options = {"model": "toy@kind", "max_tokens": 12, "seed": 3, "n": 2, "stop": stop}
    whole = client.completions.create(prompt=PROMPT, **options)
    pieces = ["", ""]
    reasons: list[Any] = [None, None]
    usage = None
    for chunk in client.completions.create(
        prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert pieces == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_streams_of_chats(client: Any) -> None:
    options = {"model": "toy@mixed", "messages": [{"role": "user", "content": "plot"}], "max_tokens": 6, "seed": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_virtual_models_are_their_strengths(client: Any) -> None:
    options = {"prompt": PROMPT, "max_tokens": 8, "seed": 2}
    steering = {"radq": "calm=-5,length=2,kl_budget=0.3"}
    virtual = client.completions.create(model="toy@mixed", **options)
    assert (
        virtual.choices[0].text
        == client.completions.create(model="toy", extra_body=steering, **options).choices[0].text
    )
    assert virtual.radq["strengths"] == {"calm": -5.0, "length": 2.0}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (openai.NotFoundError, {"model": "gpt-5", "prompt": "x"}),
        (openai.BadRequestError, {"model": "toy", "prompt": "x", "max_tokens": 0}),
        (openai.BadRequestError, {"model": "toy", "prompt": "x", "extra_body": {"radq": {"joy": 1}}}),
    ],
)
def test_errors_are_openais(client: Any, kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**body)
    assert "hint" in caught.value.body["message"]


# --- numbers about tokens ---


def test_details_are_the_candidates_and_their_rewards(running: Running) -> None:
    radq_field = {"praise": 10, "calm": -4, "kl_budget": None, "details": True}
    answer = post(running, prompt=PROMPT, max_tokens=6, seed=4, logprobs=3, temperature=0.7, radq=radq_field).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(one["piece"] for one in logprobs["radq"]) == choice["text"]
    for one, top, logprob in zip(logprobs["radq"], logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True):
        candidates = one["candidates"]
        assert len(candidates) == 20
        assert sum(each["probability"] for each in candidates) == pytest.approx(1)
        weights = [each["base_probability"] * math.exp(each["shift"]) for each in candidates]
        for each, weight in zip(candidates, weights, strict=True):
            assert each["probability"] == pytest.approx(weight / sum(weights), rel=1e-4)
            if each["id"] != running.served.tokenizer.eos_token_id:  # whose probability is left to the base model
                shift = 10 * each["rewards"]["praise"] - 4 * each["rewards"]["calm"]
                assert each["shift"] == pytest.approx(shift, abs=1e-4)
        chosen = next(each for each in candidates if each["id"] == one["id"])
        assert logprob == one["logprob"] == pytest.approx(math.log(chosen["probability"]), abs=1e-4)
        kl = sum(each["probability"] * math.log(each["probability"] / each["base_probability"]) for each in candidates)
        assert one["kl"] == pytest.approx(kl, abs=1e-4)
        assert len(top) == 3
    assert choice["radq"]["perplexity"] == pytest.approx(
        math.exp(-np.mean([one["base_logprob"] for one in logprobs["radq"]]))
    )


def test_a_completion_ends_with_the_means_of_its_rewards(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 4, "logprobs": 0}
    plain = post(running, **body, radq={"praise": 10, "calm": -4}).json()["choices"][0]
    told = post(running, **body, radq={"praise": 10, "calm": -4, "details": True}).json()["choices"][0]
    for name in ("praise", "calm"):
        mean = np.mean([one["rewards"][name] for one in told["logprobs"]["radq"]])
        assert plain["radq"]["rewards"][name] == pytest.approx(mean, abs=1e-6)
    assert plain["radq"] == told["radq"]
    unguided = post(running, **body).json()["choices"][0]
    assert unguided["radq"]["rewards"] == {}


def test_a_strength_of_zero_measures_and_does_not_steer(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 4, "logprobs": 0}
    plain = post(running, **body).json()["choices"][0]
    measured = post(running, **body, radq={"praise": 0, "details": True}).json()["choices"][0]
    assert measured["text"] == plain["text"]
    assert all(one["kl"] < 1e-6 and "praise" in one["rewards"] for one in measured["logprobs"]["radq"])


def test_chats_tell_log_probabilities_too(running: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "film"}]}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 3, "radq": "praise,details=1"}
    (choice,) = post(running, "/v1/chat/completions", **body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["radq"]["candidates"] for entry in entries)
    assert choice["radq"]["strengths"] == {"praise": 10.0}  # the suggested strength


def test_branches_go_on_from_token_ids(running: Running) -> None:
    answer = post(running, prompt=PROMPT, max_tokens=5, temperature=0, return_token_ids=True).json()["choices"][0]
    ids = answer["prompt_token_ids"] + answer["token_ids"][:2]
    rest = post(running, prompt=ids, max_tokens=3, temperature=0).json()["choices"][0]
    assert answer["text"].endswith(rest["text"])


def test_scores_are_those_of_the_reward_model(running: Running) -> None:
    text = "the film was good"
    answer = post(running, "/radq/score", text=text).json()
    served = running.served
    ids = served.encode(text)
    guide = guide_of(running, "praise")
    with torch.no_grad():
        rewards = guide.model.token_rewards(torch.tensor([ids]))[0, :, 0].clamp(-1, 1).tolist()
    assert [one["rewards"]["praise"] for one in answer["tokens"]] == pytest.approx(rewards)
    assert [one["id"] for one in answer["tokens"]] == ids
    assert answer["tokens"][0]["logprob"] is None


# --- many requests ---


@pytest.mark.slow
def test_64_mixed_requests_at_random_times_are_themselves_alone(running: Running) -> None:
    rng = random.Random(0)
    jobs: list[dict[str, Any]] = []
    for number in range(64):
        names = {
            name: float(rng.randint(-20, 20)) for name in rng.sample(["praise", "calm", "length"], rng.randint(0, 3))
        }
        prompt = " ".join(["the film", "was good", "this", "plot seemed dull"][: rng.randint(1, 4)])
        options = {
            "top_k": rng.choice([5, 20, 30]),
            "temperature": rng.choice([0.0, 0.0, 0.8]),
            "seed": number,
            "kl_budget": rng.choice([None, 0.2, 1.0]),
            "max_new_tokens": rng.randint(1, 20),
        }
        jobs.append({"prompt": prompt, "names": names, "options": options, "wait": rng.random()})

    def ask(job: dict[str, Any]) -> str:
        time.sleep(job["wait"])
        options = dict(job["options"])
        steering = job["names"] | {"kl_budget": options.pop("kl_budget")}
        max_tokens = options.pop("max_new_tokens")
        answer = post(running, prompt=job["prompt"], radq=steering, max_tokens=max_tokens, **options)
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(ask, jobs))
    for job, text in zip(jobs, texts, strict=True):
        assert text == expected(running, [job["prompt"]], job["names"], **job["options"])[0].text


@pytest.mark.slow
def test_cancelled_requests_leave_nothing(running: Running) -> None:
    rng = random.Random(1)
    cancelled_before = running.server.metrics.cancelled._value.get()

    def ask(number: int) -> str | None:
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True, "radq": {"praise": number % 7}}
        leaves = number % 3 == 0
        with httpx.stream("POST", f"{running.address}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            pieces = []
            for line in answer.iter_lines():
                if leaves and rng.random() < 0.5:
                    return None
                if line.startswith("data: {"):
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        return None if leaves else "".join(pieces)

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, range(200)))
    for strength in range(7):
        found = {text for number, text in enumerate(texts) if number % 7 == strength and text is not None}
        (text,) = found
        assert text == expected(running, [PROMPT], {"praise": strength}, temperature=0.0, max_new_tokens=30)[0].text
    deadline = time.monotonic() + 30
    scheduler = running.server.scheduler
    while (scheduler.running or scheduler.waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (scheduler.running, scheduler.waiting, scheduler.nbytes) == (0, 0, 0)
    assert running.server.metrics.cancelled._value.get() > cancelled_before


def test_requests_with_other_guides_share_steps_and_read_few_tokens_between_them(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PROMPT_BUDGET", {"cpu": 4})
    wishes: list[dict[str, float]] = [{}, {"praise": 5.0}, {"length": 3.0}, {"calm": -5.0, "length": 2.0}]
    options = {"temperature": 0.0, "max_new_tokens": 5}
    prompt, rounds, running_rows = "the plot was good and the film seemed dull", [0], [0]
    with serving(make_config(models)) as running:
        alone = [expected(running, [prompt], wish, **options)[0].text for wish in wishes]
        scheduler, begun, go = running.server.scheduler, threading.Event(), threading.Event()

        extend = kv_cache.extend

        def count(model: Any, prefix: Any, tokens: torch.Tensor, *rest: Any, **options: Any) -> Any:
            rounds[-1] += tokens.numel()
            return extend(model, prefix, tokens, *rest, **options)

        monkeypatch.setattr(kv_cache, "extend", count)
        step = scheduler._step

        def step_and_count(engine: Engine) -> None:
            rounds.append(0)
            step(engine)
            running_rows.append(len(engine.running))

        scheduler._step = step_and_count
        scheduler.call(lambda: (begun.set(), go.wait(30)))  # until all requests are there
        assert begun.wait(30)
        bodies = [{"prompt": prompt, "radq": wish, "temperature": 0, "max_tokens": 5} for wish in wishes]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(post, running, **body) for body in bodies]
            while scheduler.waiting < 4:
                time.sleep(0.01)
            go.set()
            found = [answer.result().json()["choices"][0]["text"] for answer in answers]
    assert found == alone
    assert max(running_rows) == 4
    assert 0 < max(rounds) <= 4


def test_a_client_that_waits_for_the_whole_and_goes_away(models: Path) -> None:
    with serving(make_config(models)) as running:
        scheduler, begun, go = running.server.scheduler, threading.Event(), threading.Event()
        scheduler.call(lambda: (begun.set(), go.wait(30)))  # nothing is decoded meanwhile
        assert begun.wait(30)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.address}/v1/completions", json={"prompt": PROMPT, "max_tokens": 40}, timeout=0.5)
        deadline = time.monotonic() + 30
        while running.server.metrics.cancelled._value.get() == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        go.set()
        post(running, prompt=PROMPT, max_tokens=1)
        assert running.server.metrics.cancelled._value.get() == 1
        tokens = {line for line in running.server.metrics.write().decode().splitlines() if "radq_tokens_total{" in line}
        assert tokens == {'radq_tokens_total{guided="no"} 1.0'}


def test_a_row_without_numbers_ends_alone(models: Path) -> None:
    with serving(make_config(models)) as running:
        guide: Any = guide_of(running, "praise")
        with torch.no_grad():
            guide.model.backbone.get_input_embeddings().weight[7] = math.nan
        good = {"prompt": PROMPT, "temperature": 0, "radq": {"calm": 5}, "max_tokens": 3}
        with ThreadPoolExecutor(2) as pool:
            fine = pool.submit(post, running, **good | {"radq": {"length": 3}})
            broken = post(running, **good | {"prompt": [7, 8], "radq": {"praise": 5}})
        assert fine.result().json()["choices"][0]["finish_reason"] in ("length", "stop")
        choice = broken.json()["choices"][0]
        assert (broken.status_code, choice["finish_reason"]) == (200, "error")
        assert "finite" in choice["radq"]["error"]


def test_an_error_of_the_engine_ends_its_texts_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_config(models)) as running:
        guide = guide_of(running, "length")

        def fail(*_: Any) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(guide, "advise", fail)
        broken = post(running, prompt=PROMPT, radq={"length": 3}).json()["choices"][0]
        assert broken["finish_reason"] == "error"
        assert "a bug" not in broken["radq"]["error"]
        assert post(running, prompt=PROMPT, radq={"praise": 3}).json()["choices"][0]["finish_reason"] != "error"
        monkeypatch.undo()
        assert post(running, prompt=PROMPT, radq={"length": 3}).json()["choices"][0]["finish_reason"] != "error"


def test_two_names_of_one_strength_add_up(models: Path) -> None:
    entries = {"praise": f"{models / 'q'}:praise=10", "length": f"{models / 'v'}:length=3"}
    with serving(make_config(models, guides={**entries, "twin": f"{models / 'q'}:praise"}, models={})) as running:
        steering = {"praise": 4, "twin": 5, "details": True}
        answer = post(running, prompt=PROMPT, radq=steering, temperature=0, logprobs=1, max_tokens=8).json()
        once = expected(running, [PROMPT], {"praise": 9}, temperature=0.0)[0]
        assert answer["choices"][0]["text"] == once.text
        rewards = [token["rewards"] for token in answer["choices"][0]["logprobs"]["radq"]]
        assert all(reward["praise"] == reward["twin"] for reward in rewards)


def test_cancelled_texts_do_not_fill_the_queue(models: Path) -> None:
    with serving(make_config(models, limits=RequestLimits(rows=1, queue=2, max_tokens=48))) as running:
        scheduler = running.server.scheduler
        body = {"prompt": PROMPT, "max_tokens": 48, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{running.address}/v1/completions", json=body, timeout=60) as first:
            assert first.status_code == 200
            for _ in range(20):
                with httpx.stream("POST", f"{running.address}/v1/completions", json=body, timeout=60) as answer:
                    assert answer.status_code == 200
                while scheduler.waiting:
                    time.sleep(0.01)


# --- bad requests ---


WRONG = [
    ({"radq": {"joy": 1}}, 400, "there are praise, calm, length"),
    ({"radq": {"calm": 51}}, 400, "from -50 to 50"),
    ({"radq": {"praise": 1e39}}, 400, "from -100 to 100"),
    ({"radq": "praise=nan"}, 400, "finite"),
    ({"radq": {"../../etc/passwd": 1}}, 400, "there is no guide"),
    ({"radq": {"kl_budget": -1}}, 400, "kl_budget"),
    ({"radq": {"top_k": 5000}}, 400, "top_k"),
    ({"radq": {"details": 1}}, 400, "logprobs"),
    ({"radq_guide": "praise"}, 400, "is no field"),
    ({"praise": 3}, 400, "is no field"),
    ({"vllm_args": {"radq": "praise=3"}}, 400, "is no field"),
    ({"vllm_xargs": {"radq_guide": "praise"}}, 400, "no other field"),
    ({"vllm_xargs": {"radq": "praise=1e39"}}, 400, "from -100 to 100"),
    ({"vllm_xargs": {"radq": 3}}, 400, "names of guides"),
    ({"vllm_xargs": {"radq": "praise=3"}, "radq": "praise=3"}, 400, "twice"),
    ({"use_beam_search": True}, 400, "use_beam_search"),
    ({"top_k": 0}, 400, "top_k"),
    ({"n": -1}, 400, "n"),
    ({"n": 17}, 400, "at most 16 texts"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "the film " * 25}, 400, "at most 40 tokens"),
    ({"prompt": [10**6]}, 400, "token ids below"),
    ({"prompt": [-1]}, 400, "token ids below"),
    ({"prompt": []}, 400, "no prompt"),
    ({"prompt": ["x"] * 17}, 400, "at most 16"),
    ({"prompt": "\ud800"}, 400, "Unicode"),
    ({"prompt": None}, 400, "prompt"),
    ({"stop": ["x"] * 10_000}, 400, "stop"),
    ({"temperature": -1}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"model": "/etc/passwd"}, 404, "there are toy, toy@kind"),
]


@pytest.mark.parametrize(("change", "status", "reason"), WRONG)
def test_wrong_requests(running: Running, change: dict[str, Any], status: int, reason: str) -> None:
    content = json.dumps({"prompt": PROMPT, "max_tokens": 2} | change)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.address}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert reason in error["message"]
    assert error["type"]
    assert str(running.served.config.base) not in answer.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}']
)
def test_bodies_that_are_no_json(running: Running, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.address}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "the body" in message or message.startswith("prompt")


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"]
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/radq/score"])
def test_bodies_that_pages_of_other_sites_may_send(running: Running, route: str, kind: str | None) -> None:
    """A browser sends such a request for any page without asking the server; it must cost nothing."""
    headers = {"origin": "http://elsewhere.example"} | ({} if kind is None else {"content-type": kind})
    body = json.dumps({"prompt": PROMPT, "messages": [{"role": "user", "content": "film"}], "text": "film"})
    answer = httpx.post(running.address + route, content=body.encode(), headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["type"]) == (415, "invalid_request_error")
    assert "access-control-allow-origin" not in answer.headers
    asked = httpx.options(running.address + route, headers=headers | {"access-control-request-method": "POST"})
    assert asked.status_code == 405
    assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
def test_names_of_json(running: Running, kind: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    headers = {"content-type": kind}
    assert httpx.post(f"{running.address}/v1/completions", content=body, headers=headers, timeout=60).status_code == 200


def test_bodies_that_are_too_long(running: Running) -> None:
    answer = post(running, prompt="x" * 2**20)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")


def test_long_chats_are_refused_before_templates_write_them(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radq.decoding.text.check_size", refuse_size := mock.Mock(side_effect=OptionError("size")))
    monkeypatch.setattr("radq.decoding.text.find_control_tokens", mock.Mock(side_effect=AssertionError))
    answer = httpx.post(
        f"{running.address}/v1/chat/completions", json={"messages": [{"role": "user", "content": "film"}] * 2}
    )
    assert answer.status_code == 400
    assert refuse_size.call_args.args[1] == "filmfilm"


def test_long_bodies_do_not_hold_up_short_ones(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, read = threading.Event(), threading.Event(), app_module.parse_request

    def read_slowly(body: Any, served: Any) -> Any:
        if len(body.prompt) > 10**4:
            begun.set()
            assert go.wait(30)
        return read(body, served)

    monkeypatch.setattr(app_module, "parse_request", read_slowly)
    with ThreadPoolExecutor(16) as pool:
        long = [pool.submit(post, running, prompt="the film " * 10**4) for _ in range(16)]
        assert begun.wait(30)
        assert post(running, prompt=PROMPT, max_tokens=2).status_code == 200
        go.set()
        assert {answer.result().status_code for answer in long} == {400}


def test_images_and_tools_are_refused(running: Running) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    assert post(running, "/v1/chat/completions", messages=image).status_code == 400
    messages = [{"role": "user", "content": "film"}]
    for change in ({"tools": [{}]}, {"response_format": {"type": "json_object"}}, {"top_logprobs": 2}):
        assert post(running, "/v1/chat/completions", messages=messages, **change).status_code == 400


def test_ignored_fields_are_named(running: Running) -> None:
    answer = post(running, prompt=PROMPT, max_tokens=2, chat_id=2, user="me").json()
    assert answer["radq"]["ignored"] == ["chat_id"]


def test_the_request_of_open_webui(running: Running) -> None:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "film was"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "chat_id": "5f",
        "features": {},
        "radq": "praise=20,kl_budget=none",  # its custom parameters are texts
    }
    lines = post(running, "/v1/chat/completions", **body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["radq"]["strengths"] == {"praise": 20.0}
    assert events[0]["radq"]["ignored"] == ["chat_id", "features"]
    assert events[-1]["usage"]["completion_tokens"] >= 1
    assert lines[-2] == "data: [DONE]"


def test_unknown_routes(running: Running) -> None:
    answer = httpx.get(f"{running.address}/page/../config.py")
    assert answer.status_code == 404
    assert httpx.get(f"{running.address}/page/..%2fconfig.py").status_code == 404
    assert httpx.get(f"{running.address}/v1/completions").status_code == 405


def test_a_full_queue_is_429(models: Path) -> None:
    limits = RequestLimits(prompt_tokens=40, max_tokens=48, rows=1, queue=2)
    with serving(make_config(models, limits=limits)) as running:
        answer = post(running, prompt=PROMPT, n=4)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert post(running, prompt=PROMPT, n=3, max_tokens=2).status_code == 200


def test_a_key(models: Path) -> None:
    with serving(make_config(models), api_key="secret") as running:
        assert post(running, prompt=PROMPT).status_code == 401
        wrong = httpx.get(f"{running.address}/v1/models", headers={"Authorization": "Bearer sécret".encode()})
        assert wrong.status_code == 401
        right = httpx.get(f"{running.address}/v1/models", headers={"Authorization": "Bearer secret"})
        assert right.status_code == 200
        assert httpx.get(f"{running.address}/health").status_code == 200


def test_a_server_that_is_about_to_end(models: Path) -> None:
    with serving(make_config(models)) as running:
        running.server.scheduler.close(5)
        running.server.scheduler.join()
        assert post(running, prompt=PROMPT).status_code == 503
        assert httpx.get(f"{running.address}/health").status_code == 503


def test_guides_of_another_vocabulary_are_refused(models: Path, lm_folders: dict[str, Path]) -> None:
    from radq.registry.loaded_guides import Served

    with pytest.raises(RadqError):
        Served(make_config(models, base=str(lm_folders["gpt2"])))


def test_metrics(running: Running) -> None:
    post(running, prompt=PROMPT, radq={"praise": 5}, max_tokens=2)
    text = httpx.get(f"{running.address}/metrics").text
    for name in (
        'radq_requests_total{route="/v1/completions",status="200"}',
        'radq_tokens_total{guided="yes"}',
        "radq_waiting_texts",
        "radq_time_to_first_token_seconds_count",
        "radq_time_per_token_seconds_count",
        "radq_kl_nats_sum",
        "radq_guide_seconds_total",
    ):
        assert name in text
