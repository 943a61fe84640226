"""Every field of a request is honoured, refused by its name, or changes no text."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from pydantic import ValidationError
from serving import Running

import radq
from radq.decoding.text import find_stops
from radq.serving import bodies
from radq.serving.bodies import Kind

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
ROUTES = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
WELL_FORMED: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "the film was"},
    "chat": {"messages": [{"role": "user", "content": "film"}]},
}
MEANINGFUL = ("x", 7, [7], {"x": 7}, True, False)

# The fields of OpenAI's reference and of vLLM's, in version 0.32.
OPENAI = (
    "audio best_of echo frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens "
    "messages metadata modalities model n parallel_tool_calls prediction presence_penalty prompt prompt_cache_key "
    "prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream "
    "stream_options suffix temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"
)
VLLM = (
    "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template "
    "chat_template_kwargs continue_final_message documents guided_json ignore_eos include_reasoning "
    "include_stop_str_in_output length_penalty logits_processors min_p min_tokens mm_processor_kwargs priority "
    "prompt_embeds prompt_logprobs repetition_penalty request_id return_token_ids return_tokens_as_token_ids "
    "skip_special_tokens spaces_between_special_tokens stop_token_ids structural_tag structured_outputs "
    "thinking_token_budget top_k truncate_prompt_tokens typical_p use_beam_search vllm_xargs"
)


def ask(running: Running, kind: str, **fields: Any) -> httpx.Response:
    body = WELL_FORMED[kind] | {"max_tokens": 1} | fields
    return httpx.post(running.address + ROUTES[kind], json=body, timeout=60)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_fields_of_openai_and_vllm_are_known(kind: Kind) -> None:
    known = {*bodies.honoured(kind), *bodies.refused(kind), *bodies.HARMLESS}
    assert set(f"{OPENAI} {VLLM}".split()) <= known


@pytest.mark.parametrize("kind", get_args(Kind))
def test_refused_fields_are_named(running: Running, kind: Kind) -> None:
    for name, nothing in bodies.refused(kind).items():
        meaningful = next(value for value in MEANINGFUL if not any(bodies.same(value, one) for one in nothing))
        answer = ask(running, kind, **{name: meaningful})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_refused_fields_may_say_nothing(running: Running, kind: Kind) -> None:
    table = bodies.refused(kind)
    harmless = {name: nothing[0] for name, nothing in table.items() if nothing} | dict.fromkeys(bodies.HARMLESS, "x")
    for given in (harmless, dict.fromkeys(table)):
        answer = ask(running, kind, **given)
        assert answer.status_code == 200, answer.text
        assert "ignored" not in answer.json()["radq"]


def test_docs_list_all_fields() -> None:
    """The docs name the fields of each part of the table, in its order."""
    text = DOCS.read_text(encoding="utf-8")
    begin, end = text.index("### Fields"), text.index("### The length of texts")
    listed = dict(re.findall(r"^- \*\*(\w+)[^*]*\*\*((?:.|\n  )*)", text[begin:end], re.MULTILINE))
    named = {part: re.findall(r"`(\w+)`", names) for part, names in listed.items()}
    both = set(bodies.honoured("completion")) & set(bodies.honoured("chat"))
    assert named == {
        "Honoured": sorted(both),
        "Completions": sorted(set(bodies.honoured("completion")) - both),
        "Chats": sorted(set(bodies.honoured("chat")) - both),
        "Refused": sorted(bodies.REFUSED),
        "Harmless": sorted(bodies.HARMLESS),
    }


@pytest.mark.parametrize("stop", ["", [""], []])
def test_no_stop_text_stops_nothing(running: Running, stop: Any) -> None:
    settings = {"max_tokens": 8, "seed": 3}
    texts = [ask(running, "completion", **settings, **more).json()["choices"] for more in ({}, {"stop": stop})]
    assert texts[0][0]["text"] == texts[1][0]["text"] != ""


def test_new_names_work_in_completions(running: Running) -> None:
    answer = ask(running, "completion", max_completion_tokens=3, ignore_eos=False, top_logprobs=2).json()
    assert answer["usage"]["completion_tokens"] <= 3
    assert all(len(one) == 2 for one in answer["choices"][0]["logprobs"]["top_logprobs"])


CHANGES = [
    ({"min_p": 0.2}, {"min_p": 0.2}),
    ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ({"frequency_penalty": 2, "repetition_penalty": 1.3}, {"frequency_penalty": 2.0, "repetition_penalty": 1.3}),
    ({"logit_bias": {"7": 5, "9": -100}}, {"logit_bias": {7: 5.0, 9: -100.0}}),
    ({"min_tokens": 9, "stop": ["good"]}, {"min_new_tokens": 9}),
]


@pytest.mark.parametrize(("fields", "changes"), CHANGES)
def test_texts_with_changes_are_those_of_generate(
    running: Running, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    served = running.served
    guide = radq.load_guide(f"{served.config.guides['praise'].folder}:praise=10")
    options: dict[str, Any] = {"stop": fields.get("stop", []), "max_new_tokens": 12, "seed": 4}
    prompts = ["the film was", "this plot"]
    settings = {"prompt": prompts, "max_tokens": 12, "seed": 4, "radq": {"praise": 10}}
    answer = ask(running, "completion", **settings, **fields).json()
    texts = radq.generate(served.lm, served.tokenizer, prompts, guide, changes=radq.LogitChanges(**changes), **options)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in texts]
    plain = ask(running, "completion", **settings).json()
    assert [one["text"] for one in plain["choices"]] != [one.text for one in texts]


def test_stop_tokens_of_a_request(running: Running) -> None:
    """They are added to the model's, which `ignore_eos` takes away; a text never holds the token that ended it."""
    served = running.served
    model_ends = find_stops(served.lm, served.tokenizer, None)
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 4, "return_token_ids": True}
    endless = ask(running, "completion", ignore_eos=True, **settings).json()["choices"][0]
    assert (endless["finish_reason"], len(endless["token_ids"])) == ("length", 12)
    own = endless["token_ids"][5]
    for ends, stops in (({"ignore_eos": True}, [own]), ({}, [own, *model_ends])):
        choice = ask(running, "completion", stop_token_ids=[own], **settings, **ends).json()["choices"][0]
        options: dict[str, Any] = {"max_new_tokens": 12, "seed": 4, "stop_token_ids": stops}
        (text,) = radq.generate(served.lm, served.tokenizer, ["the film was"], **options)
        assert (choice["text"], choice["finish_reason"]) == (text.text, "stop")
        assert own not in choice["token_ids"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 2),
        ("presence_penalty", 3),
        ("logit_bias", {"good": 1}),
        ("logit_bias", {"1000000": 1}),
        ("logit_bias", {"5": 101}),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", list(range(17))),
        ("min_tokens", -1),
    ],
)
def test_wrong_values_are_named(running: Running, name: str, value: Any) -> None:
    answer = ask(running, "completion", **{name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)


# --- the length of texts ---


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_more_tokens_than_the_limit_are_cut_and_said(running: Running, kind: Kind, name: str) -> None:
    settings = {"seed": 4, "ignore_eos": True, "max_tokens": None}
    whole = ask(running, kind, **settings | {name: 48}).json()
    cut = ask(running, kind, **settings | {name: 10**6}).json()
    assert "max_tokens" not in whole["radq"] | whole["choices"][0]["radq"]
    assert cut["radq"]["max_tokens"] == cut["choices"][0]["radq"]["max_tokens"] == 48
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"] == whole["usage"]
    assert cut["usage"]["completion_tokens"] == 48


def test_texts_go_on_to_the_limit_or_the_context(running: Running) -> None:
    """The toy has 64 positions, its server allows 48 tokens."""
    context = running.served.context
    prompts = ["the film was", "the film " * 15]
    settings = {"prompt": prompts, "ignore_eos": True, "return_token_ids": True}
    for max_tokens, said in ((None, False), (10**6, True)):
        answer = ask(running, "completion", **settings, max_tokens=max_tokens).json()
        for choice in answer["choices"]:
            most = min(48, context - len(choice["prompt_token_ids"]))
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (most, "length")
            assert (choice["radq"].get("max_tokens") == most) is said


def test_a_stream_says_that_it_is_cut(running: Running) -> None:
    lines = ask(running, "completion", max_tokens=10**6, stream=True).text.splitlines()
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["radq"]["max_tokens"] == 48


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("name", bodies.REFUSED_OF_MESSAGES)
def test_refused_fields_of_messages_are_named(running: Running, name: str) -> None:
    message = {"role": "assistant", "content": None}
    asked = ask(running, "chat", messages=[*WELL_FORMED["chat"]["messages"], message | {name: {"id": "1"}}])
    assert refusal(asked) == (400, f"messages.1.{name}")
    assert ask(running, "chat", messages=[message | {name: None, "content": "film"}]).status_code == 200


def test_unknown_fields_of_messages_are_named_in_the_answer(running: Running) -> None:
    messages = [{"role": "user", "content": "film", "name": "Ann", "refusal": None}]
    assert ask(running, "chat", messages=messages).json()["radq"]["ignored"] == ["messages.name"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object", "schema": {"type": "array"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "grammar": "x"}}),
        ("stream_options", {"include_usage": True, "continuous_usage_stats": True}),
    ],
)
def test_unknown_parts_of_fields_are_refused(running: Running, name: str, value: dict[str, Any]) -> None:
    status, place = refusal(ask(running, "completion", **{name: value}))
    assert (status, place.split(".")[0]) == (400, name)


def test_the_newer_name_of_max_tokens_is_named(running: Running) -> None:
    assert refusal(ask(running, "chat", max_completion_tokens=0)) == (400, "max_completion_tokens")


def test_errors_of_scored_texts_name_the_text(running: Running) -> None:
    for text in ("", " ", "\ud800"):
        content = json.dumps({"text": text})
        answer = httpx.post(
            f"{running.address}/radq/score", content=content, headers={"Content-Type": "application/json"}
        )
        assert refusal(answer) == (400, "text")


@pytest.mark.parametrize("prompt", [[True], [1, "a"], [[1], "a"], [1.5], [[1.5]], [None], ["film", 1]])
def test_mixed_prompts_are_refused(running: Running, prompt: list[Any]) -> None:
    status, place = refusal(ask(running, "completion", prompt=prompt))
    assert (status, place.split(".")[0]) == (400, "prompt")


def test_many_token_ids_are_refused_at_once(running: Running) -> None:
    """Each of them was checked by Python, and named in an error of its own."""
    for value in (5, True):
        asked = bodies.CompletionBody.model_validate
        began = time.perf_counter()
        with suppress(ValidationError):
            asked({"prompt": [value] * 400_000})
        assert time.perf_counter() - began < 0.5  # it took more than one second
