"""The page in a headless browser, with a real server and tiny models."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser import PATIENCE, By, Keys, Page, start_browser
from calibrations import PRAISE
from serving import Running, make_config, make_models, serving

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.models.calibration import write_calibration
from radq.sources.model_source import ModelSource

pytestmark = pytest.mark.slow

TAG = "<i>very</i>"  # a word of the language model
TOKENS = 12
PROMPT = "this"


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with start_browser() as found:
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Path:
    """Tiny models with a word that looks like HTML."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(toy, folder / "words")
    file = folder / "words" / "tokenizer.json"
    changed = file.read_text().replace("▁very", f"▁{TAG}")
    assert TAG in changed
    file.write_text(changed)
    return make_models(folder, folder / "words")


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Running]:
    praise = {"guide": f"{models / 'q'}:praise", "range": [-50, 50], "suggested": 10, "safe": [-20, 30]}
    guides = {"praise": praise, "calm": f"{models / 'q'}:calm=5", "length": f"{models / 'v'}:length=3"}
    calibration = replace(PRAISE, attribute="calm", base_fingerprint=ModelSource.find(models / "toy").fingerprint)
    write_calibration(models / "q", calibration)
    with serving(make_config(models, guides=guides)) as found:
        yield found


@pytest.fixture(scope="module")
def seed(running: Running) -> int:
    """A seed that gives two different texts, neither of them short."""
    for number in range(100):
        guided, unguided = complete(running, number), complete(running, number, radq={"praise": 0})
        counts = [len(choice["logprobs"]["tokens"]) for choice in (guided, unguided)]
        if min(counts) >= 6 and guided["text"] != unguided["text"]:
            return number
    raise AssertionError("all texts are short")


@pytest.fixture
def page(driver: Any, running: Running, seed: int) -> Iterator[Page]:
    """The page; afterwards the browser must not have complained."""
    driver.get_log("browser")
    yield Page(driver, running.address, f"tokens={TOKENS}&texts=2&prompt={PROMPT}&seed={seed}")
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def complete_all(running: Running, seed: int, prompt: Any = PROMPT, **changes: Any) -> list[dict[str, Any]]:
    """The server's own answer to the first request of the page."""
    radq = {"praise": 10, "calm": 0, "length": 0, "kl_budget": DEFAULT_KL_BUDGET, "details": True}
    radq |= changes.pop("radq", {})
    body = {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "seed": seed,
        "top_k": 20,
        "temperature": 1,
        "logprobs": 1,
    } | changes
    answer = httpx.post(f"{running.address}/v1/completions", json=body | {"radq": radq}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def complete(running: Running, seed: int, prompt: Any = PROMPT, **changes: Any) -> dict[str, Any]:
    """The first text of an answer."""
    return complete_all(running, seed, prompt, **changes)[0]


# --- compare ---


def test_one_click_shows_both_texts(page: Page, running: Running, seed: int) -> None:
    page.open().generate()
    guided, unguided = complete(running, seed), complete(running, seed, radq={"praise": 0})
    assert page.text(".guided") == guided["text"]
    assert page.text(".unguided") == unguided["text"]
    assert guided["text"] != unguided["text"]
    for pane, choice in ((".guided", guided), (".unguided", unguided)):
        numbers, summary = page.numbers(pane), choice["radq"]
        assert numbers["perplexity"] == f"{summary['perplexity']:.1f}"
        assert numbers["KL"] == f"{summary['kl']:.2f}"
        assert numbers["praise"] == f"{summary['rewards']['praise']:.2f}".replace("-", "−")
    assert page.coloured(".guided") > 0
    assert page.coloured(".unguided") == 0  # nothing shifts it
    count = len(guided["logprobs"]["tokens"])
    assert re.fullmatch(rf"{count} tokens, .*, [0-9.]+ tokens/s", page.find(".guided .status").text)


def test_the_effect_is_shown_over_all_texts(page: Page, running: Running, seed: int) -> None:
    page.open("&texts=8").generate()
    bodies = [{"radq": {"praise": strength}, "n": 8} for strength in (0, 10)]
    sides = [complete_all(running, seed, **body) for body in bodies]
    for name, measured in (("praise", "rewards"), ("perplexity", None)):
        values = [[one["radq"][measured][name] if measured else one["radq"][name] for one in side] for side in sides]
        (row,) = [row for row in page.all(".effect tbody tr") if row.text.startswith(name)]
        shown = [[float(part) for part in cell.text.replace("−", "-").split("±")] for cell in cells(row)]
        digits = 0.006 if measured else 0.06
        for (mean, spread), side in zip(shown[:2], values, strict=True):
            assert mean == pytest.approx(statistics.mean(side), abs=digits)
            assert spread == pytest.approx(statistics.stdev(side), abs=digits)
        assert shown[2] == [pytest.approx(statistics.mean(values[1]) - statistics.mean(values[0]), abs=digits)]
        assert [len(lane.find_elements(By.CLASS_NAME, "dot")) for lane in row.find_elements(By.CLASS_NAME, "lane")] == [
            8,
            8,
        ]
    assert page.find(".lead").text.startswith("Over 8 texts, praise ")


def test_small_texts_become_the_large_ones(page: Page, running: Running, seed: int) -> None:
    page.open("&texts=4").generate()
    for pane, strength in ((".guided", 10), (".unguided", 0)):
        texts = [one["text"] for one in complete_all(running, seed, radq={"praise": strength}, n=4)]
        small = page.all(f"{pane} .excerpt")
        assert [one.get_property("textContent") for one in small] == [text.lstrip() for text in texts]
    page.click(".unguided .samples li:nth-child(3) button")
    assert page.find(".guided .sample[aria-pressed=true]").text.startswith("3")  # of the same random numbers
    assert page.text(".guided") == complete_all(running, seed, n=4)[2]["text"]


def test_words_explain_themselves_on_focus(page: Page) -> None:
    page.open()
    for word in page.all(".guided .term"):
        page.run("arguments[0].focus()", word)
        tip = page.find("#tip").text
        explanation = page.find("#" + word.get_attribute("aria-describedby")).get_property("textContent")
        assert tip.split() == explanation.split()
        assert len(tip) > 60
        page.press(Keys.ESCAPE)
        assert not page.find("#tip").is_displayed()
    page.point_at(page.find(".guided .term"))
    page.until(lambda: page.find("#tip").is_displayed())


def cells(row: Any) -> list[Any]:
    return row.find_elements(By.CSS_SELECTOR, "td:not(.lanes)")


def test_typing_sliders_and_budget_change_the_request(page: Page, running: Running) -> None:
    page.open()
    page.write("#prompt", "the plot was dull")
    slider = page.find("#strength-0")
    slider.send_keys(*[Keys.ARROW_RIGHT] * 6)
    strength = float(slider.get_property("value"))
    assert strength > 10
    page.click("#kl-limited")
    page.write("#seed", "5")
    page.generate()
    expected = complete(running, 5, "the plot was dull", radq={"praise": strength, "kl_budget": None})
    assert page.text(".guided") == expected["text"]
    assert page.find(".guided .given").text == "the plot was dull"
    assert f"praise {strength:g}" in page.find(".guided h2").text


def test_texts_stream_and_can_be_stopped(page: Page, running: Running, seed: int) -> None:
    page.open()
    blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait(PATIENCE)

    running.server.scheduler.call(block)
    assert blocked.wait(PATIENCE)
    try:
        page.find("#go").click()
        page.until(lambda: page.find("#stop").is_displayed())
        assert len(page.all(".streaming")) == 2
        page.find("#stop").click()
        page.wait()
    finally:
        go_on.set()
    assert page.find(".guided .status").text == "0 tokens, stopped"
    assert not page.find("#problem").is_displayed()
    page.generate()
    assert page.text(".guided") == complete(running, seed)["text"]


def test_colours_follow_the_choice(page: Page) -> None:
    page.open().generate()
    page.find("#colouring option[value=praise]").click()
    assert page.coloured(".unguided") > 0
    assert (page.find("#legend-low").text, page.find("#legend-high").text) == ("-1", "1")
    colours = page.run(
        "return [...document.querySelectorAll('.token.high .body, .token.low .body')]"
        ".map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) > 2
    assert "colour=praise" in page.until(lambda: "colour" in page.driver.current_url and page.driver.current_url)


def test_a_virtual_model_moves_the_sliders(page: Page, running: Running, seed: int) -> None:
    page.open()
    page.click("#more summary")
    page.find("#model option[value='toy@mixed']").click()
    strengths = [float(page.find(f"#strength-{number}").get_property("value")) for number in range(3)]
    assert strengths == [10, -5, 2]
    assert page.find("#kl-budget").get_property("value") == "0.3"
    page.generate()
    expected = complete(running, seed, radq={"praise": 10, "calm": -5, "length": 2, "kl_budget": 0.3})
    assert page.text(".guided") == expected["text"]


def test_the_safe_zone_is_marked(page: Page) -> None:
    page.open()
    slider = page.find(".strength")
    assert "safe zone −20 to 30" in slider.text
    assert page.run("return arguments[0].querySelector('.safe').getBoundingClientRect().width", slider) > 20
    page.write(".strength input[type=number]", f"40{Keys.TAB}")
    assert "beyond the safe zone" in slider.text
    assert "not calibrated" in page.all(".strength")[2].text


LEVELS = ["off", "weak", "medium", "strong"]


def test_a_calibrated_guide_has_its_safe_zone(page: Page, running: Running, seed: int) -> None:
    page.open()
    slider = page.all(".strength")[1]
    assert "safe zone −30 to 0" in slider.text
    track, zone = (
        page.run(f"return arguments[0].querySelector('{place}').getBoundingClientRect().toJSON()", slider)
        for place in (".track", ".safe")
    )
    assert zone["left"] + zone["width"] == pytest.approx(track["left"] + track["width"] / 2, abs=10)  # it ends at 0
    assert zone["width"] == pytest.approx(0.25 * track["width"], abs=10)  # the slider ends at twice the strong strength
    assert "− less calm" in slider.text
    assert "more calm +" in slider.text
    assert [level.text for level in slider.find_elements(By.CSS_SELECTOR, ".levels button")] == LEVELS
    slider.find_element("xpath", ".//button[text()='strong']").click()
    assert page.find("#strength-1").get_property("value") == "-30"
    page.generate()
    assert page.text(".guided") == complete(running, seed, radq={"calm": "strong"})["text"]
    page.write(".strength:nth-child(2) input[type=number]", f"1{Keys.TAB}")
    page.generate()
    assert page.text(".guided") == complete(running, seed, radq={"calm": 1})["text"]


# --- candidates ---


def test_pointing_at_a_token_shows_why(page: Page, running: Running, seed: int) -> None:
    page.open().generate()
    assert not page.inspector.is_displayed()
    page.point_at(page.all(".guided .token")[3])
    page.until(page.inspector.is_displayed)
    detail = complete(running, seed)["logprobs"]["radq"][3]
    (chosen,) = [one for one in detail["candidates"] if one["id"] == detail["id"]]
    shared = sum(one["base_probability"] * math.exp(one["shift"]) for one in detail["candidates"])
    assert shift_of(page) == pytest.approx(chosen["shift"] - math.log(shared), abs=0.006)
    rows = page.all("#inspector tbody tr")
    assert len(rows) >= 8
    for row, candidate in zip(rows[:8], detail["candidates"], strict=False):
        shown = row.get_property("textContent")
        assert candidate["token"] in shown
        assert f"{candidate['rewards']['praise']:.2f}".replace("-", "−") in shown
        assert ("chosen" in row.get_attribute("class")) == (candidate["id"] == detail["id"])
        for kind, value in (("base", candidate["base_probability"]), ("guided", candidate["probability"])):
            text = row.find_element(By.CLASS_NAME, kind).text
            assert text == "<0.1%" or abs(float(text.rstrip("%")) - 100 * value) < 0.51
    page.point_at(page.find("h1"))
    page.until(lambda: not page.inspector.is_displayed())


def shift_of(page: Page) -> float:
    """The shift that the panel shows, whose exponential it shows beside it."""
    facts = dict(fact.text.split("\n") for fact in page.all("#inspector .facts div"))
    shift = float(facts["Shift"].replace("−", "-"))
    ratio = facts["Likelihood"]
    assert math.log(float(ratio[1:])) * (-1 if ratio[0] == "÷" else 1) == pytest.approx(shift, abs=0.05)
    return shift


def test_texts_from_right_to_left_are_set_so(page: Page) -> None:
    for field in ("#prompt", "#score-text", "#message-0"):
        assert page.open("&mode=chat").find(field).get_attribute("dir") == "auto"
    page.open("&prompt=" + quote("הסרט היה"))
    page.generate()
    direction = "return getComputedStyle(document.querySelector(arguments[0])).direction"
    assert page.run(direction, "#prompt") == page.run(direction, ".guided .token-text") == "rtl"
    page.run("document.querySelector('.guided .token').focus()")
    page.press(Keys.ARROW_LEFT)
    assert page.focused() == page.all(".guided .token")[1]


SHOW_PARTS = """
const { createTokenText } = await import("./page/token_text.js");
const seen = [];
const inspect = (_, details, first) => seen.push([details.length, first]);
const text = createTokenText("parts", { inspect, leave() {} });
document.body.append(text.element);
text.begin("");
for (const detail of arguments[0]) text.append(detail);
const shown = () => [...text.element.querySelectorAll(".token")].map((one) => one.textContent);
const before = shown();
text.element.querySelectorAll(".token")[1].focus();
text.cut(2);
const answer = [before, seen, shown()];
text.element.remove();
arguments[1](answer);
"""


def test_a_character_of_several_tokens_is_shown_once(page: Page) -> None:
    pieces = [(" a", " a"), ("", " \ufffd"), ("", "\ufffd"), (" 本", "\ufffd"), ("", "<|im_end|>"), ("", "\ufffd")]
    details = [{"id": number, "piece": piece, "token": token} for number, (piece, token) in enumerate(pieces)]
    page.open()
    shown, seen, cut = page.driver.execute_async_script(
        f"(async (...arguments) => {{{SHOW_PARTS}}})(...arguments)", details
    )
    assert shown == [" a", " 本", "<|im_end|>", "◌"]
    assert seen == [[3, 1]]  # its tokens are inspected together
    assert cut == [" a", "◌"]


def test_long_prompts_fold(page: Page) -> None:
    prompt = "the plot was dull . " * 6 * 4
    page.open("&prompt=" + quote(prompt))
    page.generate()  # which is refused, as it is long for this server
    button = page.find(".guided .fold")
    assert len(page.find(".guided .given").text) < 340
    button.click()
    assert page.find(".guided .given").get_property("textContent").replace("fold", "") == prompt
    assert page.find("#problem").is_displayed()
    page.driver.get_log("browser")  # the browser notes the refused request


def test_a_candidate_branches_and_can_be_undone(page: Page, running: Running, seed: int) -> None:
    page.open().generate()
    before = page.tokens(".guided")
    page.point_at(page.all(".guided .token")[3])
    page.until(page.inspector.is_displayed)
    other = page.find("#inspector tbody tr:not(.chosen) .candidate")
    word = other.get_property("textContent")
    other.click()
    page.wait()
    after = page.tokens(".guided")
    assert after[:3] == before[:3]
    assert after[3] == word != before[3]
    assert "forced" in page.all(".guided .token")[3].get_attribute("class")
    assert not page.inspector.is_displayed()

    answer = complete(running, seed, return_token_ids=True)
    (identity,) = [one["id"] for one in answer["logprobs"]["radq"][3]["candidates"] if one["token"] == word]
    prompt = [*answer["prompt_token_ids"], *answer["token_ids"][:3], identity]
    expected = complete(running, seed, prompt, max_tokens=TOKENS - 4)
    kept = "".join(one["piece"] for one in answer["logprobs"]["radq"][:3])
    assert page.text(".guided") == kept + word + expected["text"]

    page.find(".guided .pane-foot button").click()
    assert page.tokens(".guided") == before


def test_a_chat_is_answered_branches_and_goes_on(page: Page, running: Running, seed: int) -> None:
    page.open("&mode=chat")
    assert page.find("#message-0").get_property("value") == ""
    assert page.find("#message-0").get_attribute("placeholder")  # an example
    page.find("#go").click()
    assert page.focused() == page.find("#message-0")  # a message is missing, and nothing was asked for
    assert not page.find("#stop").is_displayed()
    page.write("#message-0", "this")
    page.generate()
    assert page.find(".guided .turn.user").text == "You\nthis"
    body = {
        "messages": [{"role": "user", "content": "this"}],
        "max_tokens": TOKENS,
        "seed": seed,
        "radq": {"praise": 10},
    }
    answer = httpx.post(f"{running.address}/v1/chat/completions", json=body, timeout=60).json()
    assert page.text(".guided") == answer["choices"][0]["message"]["content"]
    page.point_at(page.all(".guided .token")[0])
    page.until(page.inspector.is_displayed)
    page.find("#inspector tbody tr:not(.chosen) .candidate").click()
    page.wait()
    assert page.all(".guided .token.forced")
    shown = page.text(".guided")
    page.all(".guided .pane-foot button")[1].click()
    assert page.find("#message-1").get_property("value") == shown
    page.press("plot")
    page.generate()
    assert page.find("#message-2").get_property("value") == "plot"
    assert page.text(".guided")


# --- keyboard ---


def test_everything_works_by_keyboard(page: Page) -> None:
    page.open()
    page.find("body").send_keys(Keys.TAB)
    for _ in range(40):
        if page.focused().get_attribute("id") == "prompt":
            break
        page.press(Keys.TAB)
    page.press(Keys.CONTROL, "a")
    page.press("this")
    page.press(Keys.CONTROL, Keys.ENTER)
    page.wait()
    assert page.find(".guided .given").text == "this"
    for _ in range(60):
        if page.run("return document.activeElement.matches('.guided .token')"):
            break
        page.press(Keys.TAB)
    page.until(page.inspector.is_displayed)
    tokens = page.all(".guided .token")
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_RIGHT)
    assert page.focused() == tokens[2]
    assert page.focused().get_attribute("aria-expanded") == "true"
    page.press(Keys.END)
    assert page.focused() == tokens[-1]
    page.press(Keys.ARROW_LEFT)
    assert page.focused() == tokens[-2]
    page.press(Keys.ESCAPE)
    assert not page.inspector.is_displayed()
    assert page.focused() == tokens[-2]
    page.press(Keys.HOME)
    page.press(Keys.ENTER)
    assert page.run("return document.activeElement.matches('#inspector .chosen .candidate')")
    page.press(Keys.ESCAPE)
    assert page.focused() == tokens[0]
    page.press(Keys.ARROW_RIGHT)
    page.press(Keys.ARROW_DOWN)
    first = page.focused()
    page.press(Keys.ARROW_DOWN)
    if page.focused() == first:
        page.press(Keys.ARROW_UP)
    word = page.focused().get_property("textContent").removesuffix("chosen")
    page.press(Keys.ENTER)
    page.wait()
    assert page.tokens(".guided")[1] == word
    assert page.focused() == page.all(".guided .token")[1]


def test_one_token_of_a_text_is_in_the_order_of_tabs(page: Page) -> None:
    page.open().generate()
    for pane in (".guided", ".unguided"):
        assert len(page.all(f"{pane} .token[tabindex='0']")) == 1


# --- address ---


def test_the_address_restores_everything(page: Page) -> None:
    page.open("&mode=prompt")
    page.write("#prompt", "a & b <i>\n#c")
    page.write(".strength input[type=number]", f"-7.5{Keys.TAB}")
    page.write("#seed", "77")
    page.find("#colouring option[value=calm]").click()
    page.until(lambda: "colour=calm" in page.driver.current_url)
    address = page.driver.current_url
    page.driver.get("about:blank")
    page.driver.get(address)
    page.until(page.find("#controls").is_displayed)
    assert page.find("#prompt").get_property("value") == "a & b <i>\n#c"
    assert page.find(".strength input[type=number]").get_property("value") == "-7.5"
    assert page.find("#seed").get_property("value") == "77"
    assert page.find("#colouring").get_property("value") == "calm"
    assert page.find("#max-tokens").get_property("value") == str(TOKENS)
    assert not page.find("#problem").is_displayed()


def test_an_address_of_another_server_is_explained(page: Page) -> None:
    page.open("&b.other=3")
    assert "b.other" in page.find("#problem").text
    assert page.find("#go").is_displayed()


# --- the other views ---


def test_a_pasted_text_is_scored(page: Page, running: Running) -> None:
    page.open("&view=score")
    text = "the film was dull but the music was lovely ."
    page.write("#score-text", text)
    page.generate()
    scores = httpx.post(f"{running.address}/radq/score", json={"text": text}, timeout=60).json()
    page.until(lambda: page.tokens("#scored") == [token["token"] for token in scores["tokens"]])
    numbers = page.numbers("#scored")
    assert numbers["perplexity"] == f"{scores['perplexity']:.1f}"
    assert numbers["calm"] == f"{scores['rewards']['calm']:.2f}".replace("-", "−")
    assert page.coloured("#scored") > 0
    page.point_at(page.all("#scored .token")[1])
    page.until(page.inspector.is_displayed)
    reward = scores["tokens"][1]["rewards"]["praise"]
    assert f"{reward:.2f}".replace("-", "−") in page.inspector.text


def test_a_grid_compares_strengths(page: Page, running: Running, seed: int) -> None:
    page.open("&view=grid&strengths=-20,0,20")
    page.generate()
    assert [heading.text.split()[0] for heading in page.all("#grid h2")] == ["−20", "0", "20"]
    texts = page.texts("#grid")
    assert len(texts) == 6
    expected = [complete(running, seed, radq={"praise": strength})["text"] for strength in (-20, 0, 20)]
    assert texts[::2] == expected
    assert len(page.all("#grid-chart svg circle")) == 6


def test_views_are_links_that_keep_the_settings(page: Page) -> None:
    page.open()
    page.write("#seed", "9")
    page.find("nav [data-view=grid]").click()
    page.until(page.find("#grid-strengths").is_displayed)
    assert page.find("nav [aria-current]").text == "Grid"
    assert page.find("#seed").get_property("value") == "9"
    page.driver.back()
    page.until(lambda: page.find("nav [aria-current]").text == "Compare")


# --- copied requests ---


@pytest.mark.parametrize("form", ["curl", "Python", "openai"])
def test_a_copied_request_gives_the_guided_text(page: Page, form: str) -> None:
    page.open("&prompt=It%27s+%22the+film%22+%24HOME")
    page.generate()
    page.find("#copy-open").click()
    page.find(f"#copy-forms input[value={form}]").click()
    text = page.find("#copy-text").text
    if form == "openai":
        pytest.importorskip("openai")
    if form == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["bash", "-c", text] if form == "curl" else [sys.executable, "-c", text]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    written = json.loads(output)["choices"][0]["text"] if form == "curl" else output.removesuffix("\n")
    assert written == page.text(".guided")
    page.press(Keys.ESCAPE)


# --- safety ---


def test_text_that_looks_like_html_stays_text(page: Page) -> None:
    hostile = "<img src=x onerror=\"document.title='caught'\"><b>bold</b>"
    page.open()
    page.write("#prompt", hostile)
    found = []
    for seed in range(8):
        page.write("#seed", str(seed))
        page.generate()
        found += [token for token in page.tokens(".pane") if TAG in token]
        if found:
            break
    assert found, "no token looked like HTML"
    assert page.find(".guided .given").text == hostile
    page.point_at(page.all(".guided .token")[1])
    page.until(page.inspector.is_displayed)
    page.find("nav [data-view=score]").click()
    page.write("#score-text", f"{hostile} {TAG}")
    page.generate()
    page.until(lambda: page.all("#scored .token"))
    assert page.all("main i, main b, main img, #inspector i") == []
    assert page.driver.title != "caught"


def test_everything_comes_from_the_server_itself(page: Page) -> None:
    page.open().generate()
    addresses = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(addresses) > 5
    assert all(address.startswith(page.address) for address in addresses)


def test_errors_of_the_server_are_shown(driver: Any, running: Running) -> None:
    page = Page(driver, running.address, f"tokens={TOKENS}").open()
    page.write("#prompt", "the film " * 40)
    page.generate()
    message = page.until(lambda: page.find("#problem").text)
    assert "got 81" in message
    page.write("#prompt", "the film")
    page.generate()
    assert not page.find("#problem").is_displayed()
    driver.get_log("browser")  # the browser notes the refused request


def test_a_server_that_is_gone_is_noticed(driver: Any, models: Path) -> None:
    with serving(make_config(models)) as found:
        page = Page(driver, found.address, f"tokens={TOKENS}").open()
        page.generate()
        text = page.text(".guided")
    page.generate()
    assert "connection broke" in page.until(lambda: page.find("#problem").text)
    with serving(make_config(models), port=int(found.address.rpartition(":")[2])):
        page.find("#retry").click()
        page.until(lambda: not page.find("#problem").is_displayed())
        page.wait()
        assert page.text(".guided") == text
    driver.get_log("browser")


def test_a_page_that_found_no_server_starts_with_retry(driver: Any, models: Path) -> None:
    with serving(make_config(models), api_key="s3cret") as found:
        page = Page(driver, found.address).open()
    page.find("#key").send_keys("s3cret", Keys.ENTER)
    assert "connection broke" in page.until(lambda: page.find("#problem").text)
    with serving(make_config(models), port=int(found.address.rpartition(":")[2])):
        page.find("#retry").click()
        page.until(page.find("#controls").is_displayed)
        page.run("sessionStorage.clear()")
    driver.get_log("browser")


def test_a_key_is_asked_for_and_kept_for_the_session(driver: Any, models: Path) -> None:
    with serving(make_config(models), api_key="s3cret") as found:
        page = Page(driver, found.address, f"tokens={TOKENS}").open()
        page.until(page.find("#key-dialog").is_displayed)
        for key in ("wrong", "s3cret"):
            page.until(lambda: page.find("#key").is_displayed())
            page.find("#key").send_keys(key, Keys.ENTER)
            if key == "wrong":
                page.until(lambda: page.find("#key-refused").is_displayed())
        page.until(page.find("#controls").is_displayed)
        page.generate()
        assert page.text(".guided")
        page.find("#copy-open").click()
        assert "RADQ_API_KEY" in page.find("#copy-text").text
        assert "s3cret" not in page.driver.current_url + page.driver.page_source
        assert page.run("return localStorage.length") == 0
        page.driver.refresh()
        page.until(page.find("#controls").is_displayed)
        assert not page.find("#key-dialog").is_displayed()
        page.run("sessionStorage.clear()")
    driver.get_log("browser")


# --- looks ---


@pytest.mark.parametrize("width", [375, 320])
def test_nothing_is_wider_than_a_phone(page: Page, width: int) -> None:
    for view in ("compare", "score", "grid"):
        page.open(f"&view={view}", width)
        page.generate()
        page.until(lambda: page.all(".token"))
        assert page.width() <= width, view
    page.open("&mode=chat", width)
    assert page.width() <= width
    page.open("", width)
    page.generate()
    page.tab("Guided")
    token = page.all(".guided .token")[4]
    page.run("arguments[0].scrollIntoView({ block: 'center' })", token)
    token.click()
    page.until(page.inspector.is_displayed)
    assert page.width() <= width
    bottom, top = page.run(
        "return [arguments[0].getBoundingClientRect().bottom, arguments[1].getBoundingClientRect().top]",
        token,
        page.inspector,
    )
    assert bottom <= top  # the sheet does not cover the token


@pytest.mark.parametrize("dark", [False, True])
def test_no_serious_barriers(page: Page, dark: bool) -> None:
    axe = pytest.importorskip("axe_core_python.selenium", reason="axe-core-python is in radq[dev]").Axe()

    def check(place: str) -> None:
        found = axe.run(page.driver)
        serious = [
            (one["id"], [node["html"] for node in one["nodes"]][:3])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], place
        assert found["passes"]

    for width in (1280, 375):
        for view in ("compare", "score", "grid"):
            page.open(f"&view={view}&colour=praise", width, dark)
            check(f"{view}, empty")
            page.generate()
            page.until(lambda: page.all(".token"))
            check(view)
            if view == "compare" and width < 600:
                page.tab("Unguided")
            page.click(".token:nth-child(3)")
            page.until(page.inspector.is_displayed)
            check(f"{view}, candidates")
    page.open("&mode=chat", 1280, dark)
    page.write("#message-0", "this")
    page.generate()
    page.point_at(page.find(".guided .term"))
    check("chat")
    page.find("#copy-open").click()
    check("copy")
