"""The page's modules without a browser: address, requests, colours and events, run by node."""

import ast
import json
import math
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PAGE = Path(__file__).parents[2] / "src" / "radq" / "registry" / "page"
NODE = shutil.which("node")
Call = Callable[[str, list[Any]], list[Any]]
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

INFO: dict[str, Any] = {
    "base": "toy",
    "chat": True,
    "needs_key": False,
    "attributes": {
        "sentiment": {"range": [-100, 100], "default": 0, "suggested": 35, "safe": [-60, 60], "rewards": [0, 1]},
        "a.b&c=<d>": {"range": [-5, 5], "default": 1, "suggested": None, "safe": None, "rewards": [-1, 3]},
    },
    "models": [{"id": "toy", "radq": {}}, {"id": "toy@kind", "radq": {"sentiment": 35}}],
    "defaults": {"kl_budget": 0.5, "top_k": 20, "max_tokens": 64},
    "limits": {"max_tokens": 1024, "prompt_tokens": 4096, "rows": 16, "top_k": 1024},
}
STATE: dict[str, Any] = {
    "model": "toy",
    "mode": "prompt",
    "prompt": 'It\'s a "film" & more\n\\ $HOME `x`',
    "messages": [{"role": "user", "content": "hello"}],
    "maxTokens": 8,
    "temperature": 1,
    "seed": 7,
    "topK": 20,
    "klBudget": None,
}
PROGRAM = """
import { createInterface } from "node:readline";
const modules = {};
for (const name of ["numbers", "request", "scale", "sse", "state", "statistics", "visible"])
  Object.assign(modules, await import(`./${name}.js`));
for await (const line of createInterface({ input: process.stdin })) {
  const { expression, values } = JSON.parse(line);
  const run = new Function("m", "value", `return ${expression}`);
  console.log(JSON.stringify(await Promise.all(values.map((value) => run(modules, value)))));
}
"""


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory):
    """Evaluate an expression of the page's modules (`m`) for a list of values (`value`)."""
    folder = tmp_path_factory.mktemp("page")
    for file in PAGE.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "program.js").write_text(PROGRAM)
    assert NODE is not None
    pipe = subprocess.PIPE
    with subprocess.Popen([NODE, "program.js"], cwd=folder, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def evaluate(expression: str, values: list[Any]) -> list[Any]:
            print(json.dumps({"expression": expression, "values": values}), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield evaluate
        process.stdin.close()


def one(call: Call, expression: str, value: Any = None) -> Any:
    return call(expression, [value])[0]


ONE_RUN = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


# --- address ---


@given(st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 2**31), st.floats(-100, 100), st.floats(-5, 5)), min_size=5))
@ONE_RUN
def test_an_address_gives_its_state_back(call: Call, cases: list[tuple[str, str, int, float, float]]) -> None:
    states = [
        one(call, "m.initialState(value)", INFO)
        | {
            "view": "grid",
            "mode": "chat",
            "model": "toy@kind",
            "prompt": prompt,
            "messages": [{"role": "system", "content": content}, {"role": "user", "content": prompt}],
            "seed": seed,
            "klBudget": None,
            "strengths": {"sentiment": first, "a.b&c=<d>": second},
            "gridStrengths": [first, 0, second],
            "colouring": "a.b&c=<d>",
        }
        for prompt, content, seed, first, second in cases
    ]
    info = json.dumps(INFO)
    for state, found in zip(states, call(f"m.fromAddress(m.toAddress(value, {info}), {info})", states), strict=True):
        assert found == {"state": json.loads(json.dumps(state)), "problems": []}


def test_the_first_state_needs_no_address_and_shows_something(call: Call) -> None:
    state = one(call, "m.initialState(value)", INFO)
    assert state["prompt"]
    assert state["strengths"] == {"sentiment": 0, "a.b&c=<d>": 1}  # the server's own strengths, as one is not zero
    assert one(call, f"m.toAddress(value, {json.dumps(INFO)})", state) == "#"
    calm = json.loads(json.dumps(INFO))
    calm["attributes"]["a.b&c=<d>"]["default"] = 0
    assert one(call, "m.initialState(value).strengths.sentiment", calm) == 35


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("#b.sentiment=many", "sentiment"),
        ("#b.sentiment=", "sentiment"),
        ("#b.other=3", "other"),
        ("#b.__proto__=3", "__proto__"),
        ("#model=other", "does not have"),
        ("#colour=other", "does not have"),
        ("#seed=-1", "seed"),
        ("#chat=%7B%7D", "chat"),
        ("#view=nothing", "view"),
        ("#wrong=1", "wrong"),
        ("#constructor=1", "constructor"),
    ],
)
def test_what_an_address_says_wrongly_is_told_and_left_out(call: Call, address: str, words: str) -> None:
    found = one(call, f"m.fromAddress(value, {json.dumps(INFO)})", address)
    assert found["state"] == one(call, "m.initialState(value)", INFO)
    assert len(found["problems"]) == 1
    assert words in found["problems"][0]


def test_strengths_of_an_address_stay_in_range(call: Call) -> None:
    found = one(call, f"m.fromAddress(value, {json.dumps(INFO)})", "#b.sentiment=1e9")
    assert found["state"]["strengths"]["sentiment"] == 100


# --- requests ---


def test_both_sides_ask_for_the_same_random_numbers(call: Call) -> None:
    unguided = one(call, f"m.detailedRequest(m.plainRequest(value, m.zeroStrengths({json.dumps(INFO)})))", STATE)
    guided = one(call, "m.detailedRequest(m.plainRequest(value, {sentiment: 35}))", STATE)
    assert unguided["path"] == guided["path"] == "v1/completions"
    settings = {"kl_budget": None, "top_k": STATE["topK"], "details": True}
    assert unguided["body"]["radq"] == {"sentiment": 0, "a.b&c=<d>": 0, **settings}
    assert guided["body"]["radq"] == {"sentiment": 35, **settings}
    assert guided["body"] | {"radq": None} == unguided["body"] | {"radq": None}
    assert guided["body"]["logprobs"] == 1
    assert guided["body"]["prompt"] == STATE["prompt"]


def test_small_strengths_are_numbers_too(call: Call) -> None:
    assert one(call, "m.plainRequest(value, {sentiment: 0.5})", STATE)["body"]["radq"]["sentiment"] == 0.5


def test_a_chat_branches_by_its_tokens(call: Call) -> None:
    request = one(call, "m.plainRequest(value, {sentiment: 35}, 2)", STATE | {"mode": "chat"})
    assert request["path"] == "v1/chat/completions"
    assert request["body"]["n"] == 2
    branch = one(call, "m.continuedRequest(value, [1, 2, 3], 5)", request)
    assert branch["path"] == "v1/completions"
    assert branch["body"]["prompt"] == [1, 2, 3]
    assert branch["body"]["max_tokens"] == 5
    assert branch["body"]["radq"]["sentiment"] == 35
    assert not {"messages", "n"} & set(branch["body"])


@given(st.lists(st.tuples(TEXTS, NUMBERS), min_size=5))
@ONE_RUN
def test_copied_requests_hold_the_same_body(call: Call, cases: list[tuple[str, float]]) -> None:
    requests = call(
        "m.plainRequest(value, {sentiment: value.strength})",
        [STATE | {"prompt": prompt, "strength": strength} for prompt, strength in cases],
    )
    for form in ("curl", "Python", "openai"):
        texts = call(f"m.FORMS.{form}('http://localhost:1', value, true)", requests)
        for text, request in zip(texts, requests, strict=True):
            assert _body_of(form, text) == request["body"]
            assert "RADQ_API_KEY" in text


def _body_of(form: str, text: str) -> dict[str, Any]:
    """The body that a copied text sends."""
    if form == "curl":
        words = shlex.split(text.replace("\\\n", " ", 3))
        return json.loads(words[words.index("-d") + 1])
    tree = ast.parse(text)
    if form == "Python":
        (value,) = [
            node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "body"
        ]
        return ast.literal_eval(value)
    (create,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".create")
    ]
    found = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in create.keywords}
    return found.pop("extra_body") | found


# --- colours and numbers ---


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=20))
@ONE_RUN
def test_colours_are_symmetric_and_bounded(call: Call, cases: list[tuple[float, float, float]]) -> None:
    found = call("m.lean(...value)", [list(case) for case in cases])
    mirrored = call("m.lean(-value[0], -value[2], -value[1])", [list(case) for case in cases])
    other = {"low": "high", "high": "low", "none": "none"}
    for (value, low, high), one, mirror in zip(cases, found, mirrored, strict=True):
        assert 0 <= one["amount"] <= 1
        assert mirror["side"] == other[one["side"]]
        if high > low and value <= low:
            assert one == {"side": "low", "amount": 1}
        if high > low and value >= high:
            assert one == {"side": "high", "amount": 1}
        if one["side"] == "high":
            assert value > (low + high) / 2


def test_the_shift_of_a_token_is_relative_to_the_other_candidates(call: Call) -> None:
    def detail(base: float, guided: float) -> dict[str, Any]:
        candidate = {"id": 1, "base_probability": base, "probability": guided, "shift": 99.0}
        return {"id": 1, "shift": 99.0, "candidates": [candidate]}

    cases = [detail(0.3, 0.3), detail(0.01, 0.5), detail(0.5, 0.01), {"id": 1, "candidates": []}]
    found = call("m.leanOfTokens([value], 'shift', {})", cases)
    both = call("m.sharedLogRatio(value)", [cases[:2], cases[1:3], cases[2:]])
    assert both == [pytest.approx(math.log(50)), pytest.approx(0), None]
    assert [one["side"] for one in found] == ["none", "high", "low", "none"]


def test_numbers_as_people_read_them(call: Call) -> None:
    assert call("m.formatNumber(value)", [1.005, -2, -0.001, None]) == ["1.00", "−2.00", "0.00", "–"]
    assert call("m.formatProbability(value)", [0.5, 0.034, 0.0001, 0, 1]) == ["50%", "3.4%", "<0.1%", "0.0%", "100%"]
    assert call("m.formatRatio(Math.log(value))", [3.2, 1 / 3.2, 1, 50]) == ["×3.2", "÷3.2", "×1", "×50"]


def test_statistics_of_a_text(call: Call) -> None:
    details = [
        {"id": 1, "base_logprob": -1, "kl": 0.5, "rewards": {"sentiment": 0.2}},
        {"id": 2, "base_logprob": -3, "kl": 0.1, "rewards": {"sentiment": 0.6}},
        {"id": None, "rewards": {}},
    ]
    found = one(call, "m.summarise(value)", details)
    assert found["tokens"] == 2
    assert found["perplexity"] == pytest.approx(7.389056)
    assert found["kl"] == pytest.approx(0.3)
    assert found["rewards"]["sentiment"] == pytest.approx(0.4)
    assert one(call, "m.summarise(value)", [])["perplexity"] is None


@given(st.lists(st.floats(-8, 0), min_size=2, max_size=6), st.floats(0.2, 3))
@ONE_RUN
def test_the_base_probability_of_a_chosen_candidate(call: Call, logprobs: list[float], temperature: float) -> None:
    weights = [2.718281828459045 ** (logprob / temperature) for logprob in logprobs]
    candidates = [
        {"id": number, "token": "x", "base_probability": weight / sum(weights), "probability": 0.1, "rewards": {}}
        for number, weight in enumerate(weights)
    ]
    detail = {"id": 0, "base_logprob": logprobs[0], "candidates": candidates}
    found = call("m.forcedDetail(...value)", [[detail, candidate, temperature] for candidate in candidates])
    assert [one["base_logprob"] for one in found] == pytest.approx(logprobs, abs=1e-6)


# --- events ---


@given(st.lists(TEXTS.filter(lambda text: not set(text) & set("\r\n")), max_size=6), st.randoms())
@ONE_RUN
def test_events_may_be_cut_anywhere(call: Call, texts: list[str], random: Any) -> None:
    stream = ": a comment\n\n" + "".join(
        f"data: {text}{end}{end}" for text in texts for end in [random.choice(["\n", "\r\n"])]
    )
    pieces, rest = [], stream
    while rest:
        size = random.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    found = one(
        call, "(() => { const feed = m.createParser(); return value.flatMap((piece) => feed(piece)); })()", pieces
    )
    assert found == texts


READ = """(async () => {
  const body = new Blob([value]).stream();
  const found = [];
  try { for await (const event of m.readEvents(body)) found.push(event); } catch (error) { found.push(error.message); }
  return found;
})()"""


BROKE = "The connection broke before the text was complete."


def test_a_stream_without_its_end_has_broken_off(call: Call) -> None:
    assert one(call, READ, 'data: {"a":"é"}\n\ndata: [DONE]\n\n') == [{"a": "é"}]
    assert one(call, READ, 'data: {"a":1}\n\n') == [{"a": 1}, BROKE]
    broken = "m.readEvents(new ReadableStream({ start: (c) => c.error(new TypeError('network error')) }))"
    assert one(call, f"{broken}.next().catch((error) => [error.message, error instanceof m.ConnectionBroke])") == [
        BROKE,
        True,
    ]


def test_events_of_completions_and_chats_are_read_alike(call: Call) -> None:
    detail = {"id": 5, "piece": " a", "token": " a"}
    completion = {
        "index": 1,
        "text": " a",
        "finish_reason": None,
        "logprobs": {"radq": [detail]},
        "prompt_token_ids": [3],
    }
    chat = {"index": 1, "delta": {"content": " a"}, "logprobs": {"content": [{"token": " a", "radq": detail}]}}
    expected = {"index": 1, "details": [detail], "promptIds": [3], "finish": None}
    found = call("m.readChoices(value)", [{"choices": [completion]}, {"choices": [chat]}, {"choices": []}])
    assert found == [[expected], [expected | {"promptIds": None}], []]
    end = {"index": 0, "text": " a!", "finish_reason": "stop", "logprobs": {"radq": [detail]}}
    (last,) = one(call, "m.readChoices(value)", {"choices": [end]})
    assert "".join(entry["piece"] for entry in last["details"]) == " a!"
    assert last["finish"] == "stop"


# --- whitespace ---


@given(st.lists(TEXTS, min_size=10))
@ONE_RUN
def test_marks_change_no_text(call: Call, texts: list[str]) -> None:
    for text, parts in zip(texts, call("m.visibleParts(value)", texts), strict=True):
        assert "".join(part["text"] for part in parts) == text


def test_whitespace_is_visible_and_has_names(call: Call) -> None:
    marks = call("m.visibleParts(value).map((part) => part.mark)", ["a b", "\n", "\ta", "a  b", " ", "\r\n"])
    assert marks == [[None, None, None], ["↵"], ["⇥", None], [None, "·", "·", None], ["·"], ["␍", "↵"]]
    assert call("m.spokenText(value)", [" very", "\n", " ", "", "\n\n"]) == [
        "very", "line break", "space", "no text", "2 blanks, first a line break",
    ]  # fmt: skip


@given(TEXTS, st.integers(0, 900))
@ONE_RUN
def test_long_texts_fold_between_characters(call: Call, text: str, length: int) -> None:
    long = "😀" * length + text
    places = one(call, "m.foldPlaces(value)", long)
    assert (places is None) == (len(long.encode("utf-16-le")) <= 840)
    if places:
        cut = "[value.slice(0, f[0]), value.slice(f[0], f[1]), value.slice(f[1])]"
        parts = one(call, f"((f) => {cut})(m.foldPlaces(value))", long)
        assert "".join(parts) == long
        assert all(parts)
        assert len(parts[0] + parts[2]) < 340


# --- characters of several tokens ---


def test_parts_of_a_character_are_known(call: Call) -> None:
    special = {"id": 2, "piece": "", "token": "<|im_end|>"}
    part, last = {"id": 1, "piece": "", "token": " \ufffd"}, {"id": 3, "piece": " 本", "token": "\ufffd"}
    assert call("m.isPart(value)", [part, last, special]) == [True, False, False]
    shown = call("m.shownText(value)", [[part, last], [part], [special]])
    assert shown == [
        {"text": " 本", "ghost": False},
        {"text": "◌", "ghost": True},
        {"text": "<|im_end|>", "ghost": True},
    ]
    begun = call("m.asBegun(value)", [part, last, {"id": 4, "piece": " a", "token": " a"}])
    assert [detail["piece"] for detail in begun] == [" ", "", " a"]
    assert call("m.isPart(value)", [*begun, {"piece": "", "token": ""}, {"piece": " ", "token": " "}]) == [
        True, True, False, True, False,
    ]  # fmt: skip
    assert call("m.candidateName(value)", ["\ufffd\ufffd", " a", ""]) == ["◌", " a", "◌"]


# --- what steering does ---


def test_the_spread_of_some_numbers(call: Call) -> None:
    found = call("m.spreadOf(value)", [[1, 2, 6, None], [4], []])
    assert found == [
        {"mean": 3, "spread": pytest.approx(math.sqrt(7))},
        {"mean": 4, "spread": None},
        {"mean": None, "spread": None},
    ]


def test_the_effect_in_one_sentence(call: Call) -> None:
    unguided = [{"rewards": {"praise": mean, "calm": 0.5}, "perplexity": 10} for mean in (0.2, 0.4)]
    guided = [{"rewards": {"praise": mean, "calm": 0.5}, "perplexity": 12} for mean in (0.7, 0.9)]
    sentence = "m.describeEffect(...value)"
    assert one(call, sentence, [unguided, guided, {"praise": 10, "calm": 0}]) == (
        "Over 2 texts, praise rises from 0.30 to 0.80, at 1.20 times the perplexity."
    )
    both = one(call, sentence, [guided[:1], unguided[:1], {"praise": -1, "calm": 2}])
    assert both == "In one text, praise falls from 0.70 to 0.20 and calm stays at 0.50, at 0.83 times the perplexity."
    assert "0" in one(call, sentence, [unguided, guided, {"praise": 0}])


# --- strengths ---


def test_strengths_have_names_where_they_are_calibrated(call: Call) -> None:
    calibrated = {"range": [-100, 100], "strengths": {"strong": -45, "weak": -8}, "suggested": -20}
    suggested = {"range": [-100, 30], "strengths": {}, "suggested": 20, "safe": [-10, 25]}
    bare = {"range": [-5, 5], "suggested": None}
    cases = [calibrated, suggested, bare]
    levels = [list(one.items()) for one in call("m.levelsOf(value)", cases)]
    assert levels == [[("off", 0), ("weak", -8), ("strong", -45)], [("off", 0), ("suggested", 20)], [("off", 0)]]
    assert call("m.reachOf(value)", cases) == [[-90, 90], [-50, 30], [-5, 5]]
    assert call("m.gridStrengths(value)", cases) == [[0, -8, -45], [0, 10, 20, 30], [0, 0.625, 1.25, 2.5]]
