"""Texts with a `response_format`, of a server whose base model writes bytes."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from json_world import save_byte_lm
from serving import Running, serving

import radq
from radq import errors
from radq.registry.config import ServeConfig

pytest.importorskip("llguidance", reason="JSON schemas need radq[serve]")
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}},
    "required": ["good"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(ServeConfig(base=str(save_byte_lm(tmp_path_factory.mktemp("bytes"))), device="cpu")) as found:
        yield found


def ask(running: Running, route: str = "completions", **fields: Any) -> httpx.Response:
    prompt = {"prompt": "A film:"} if route == "completions" else {"messages": [{"role": "user", "content": "A film:"}]}
    return httpx.post(f"{running.address}/v1/{route}", json=prompt | {"max_tokens": 100} | fields, timeout=60)


def test_answers_are_json_of_the_schema(running: Running) -> None:
    answer = ask(running, n=8, seed=3, response_format=FORMAT).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert all(isinstance(json.loads(text)["good"], bool) for text in texts)
    served = running.served
    changes = radq.LogitChanges(json_schema=SCHEMA)
    options: dict[str, Any] = {"samples": 8, "seed": 3, "max_new_tokens": 100, "changes": changes}
    assert texts == [one.text for one in radq.generate(served.lm, served.tokenizer, ["A film:"], **options)]
    (chat,) = ask(running, "chat/completions", response_format=FORMAT, logprobs=True).json()["choices"]
    assert json.loads(chat["message"]["content"])
    assert chat["finish_reason"] == "stop"


def test_streams_are_json_beside_other_texts(running: Running) -> None:
    lines = ask(running, stream=True, n=4, response_format=FORMAT, seed=1).text.splitlines()
    pieces = ["", "", "", ""]
    for line in lines:
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            pieces[choice["index"]] += choice["text"]
    whole = ask(running, n=4, response_format=FORMAT, seed=1).json()
    assert pieces == [choice["text"] for choice in whole["choices"]]


def test_any_object(running: Running) -> None:
    """A random model writes long strings, so the braces are made likely."""
    bias = {str(running.served.tokenizer.convert_tokens_to_ids(word)): 50 for word in '"}'}
    answer = ask(running, response_format={"type": "json_object"}, logit_bias=bias).json()
    assert isinstance(json.loads(answer["choices"][0]["text"]), dict)


def test_a_text_that_is_cut_has_no_end(running: Running) -> None:
    (choice,) = ask(running, response_format=FORMAT, max_tokens=3).json()["choices"]
    assert choice["finish_reason"] == "length"


def nested(depth: int) -> str:
    """Write a format with a schema of lists of lists, which Python's own writer may refuse."""
    schema = '{"items": ' * depth + "{}" + "}" * depth
    return '{"type": "json_schema", "json_schema": {"schema": ' + schema + "}}"


@pytest.mark.parametrize(
    "form",
    [
        '{"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}',
        '{"type": "json_schema"}',
        '{"type": "json_schema", "json_schema": {"name": "x"}}',
        '{"type": "xml"}',
        "{}",
        '"json"',
        nested(300),
        nested(450),
        nested(800),
        nested(5000),
    ],
)
def test_formats_that_cannot_be_used(running: Running, form: str) -> None:
    content = '{"prompt": "x", "response_format": ' + form + "}"
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.address}/v1/completions", content=content, headers=headers, timeout=60)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "response_format").startswith("response_format")


def test_a_text_that_cannot_end_is_refused(running: Running) -> None:
    answer = ask(running, response_format=FORMAT, ignore_eos=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ignore_eos")


def test_a_missing_package_is_named(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(errors.importlib, "import_module", find)
    answer = ask(running, response_format=FORMAT)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "llguidance" in answer.json()["error"]["message"]
    assert "serve" in answer.json()["error"]["message"]
