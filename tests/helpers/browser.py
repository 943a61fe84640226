"""The page of `radq serve` in a headless browser."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in radq[dev]")
Service = pytest.importorskip("selenium.webdriver.chrome.service").Service
By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
OPTIONS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage"
PATIENCE = 60.0


@contextmanager
def start_browser() -> Iterator[Any]:
    """Start a browser, which is controlled by its driver; skip the test if none is installed."""
    if BROWSER is None or DRIVER is None:
        pytest.skip("no chromium with its driver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in OPTIONS.split():
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield found
    finally:
        found.quit()


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, address: str, start: str = ""):
        self.driver, self.address, self.start = driver, address, start

    def open(self, state: str = "", width: int = 1280, dark: bool = False) -> "Page":
        command = self.driver.execute_cdp_cmd
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        command("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")  # another fragment alone would not load the page again
        self.driver.get(f"{self.address}/#{self.start}{state}")
        self.until(
            lambda: self.find("#controls").is_displayed() or self.driver.find_elements(By.CSS_SELECTOR, "[open]")
        )
        return self

    def find(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)
        return found

    def generate(self) -> None:
        self.find("#go").click()
        self.wait()

    def wait(self) -> None:
        """Wait until no request is on its way and its end is shown."""
        self.until(lambda: not self.find("#stop").is_displayed())

    def tab(self, name: str) -> None:
        """Open a tab, which only narrow windows have."""
        (found,) = [tab for tab in self.all("#tabs button") if tab.text == name]
        found.click()

    def write(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)

    def tokens(self, pane: str) -> list[str]:
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", pane + " .token"
        )

    def text(self, pane: str) -> str:
        return self.texts(pane)[0]

    def texts(self, pane: str) -> list[str]:
        """The texts in a place, without the names of tokens that add no text."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((text) =>"
            "[...text.children].filter((one) => !one.matches('.ghost')).map((one) => one.textContent).join(''))",
            pane + " .tokens",
        )

    def click(self, selector: str) -> None:
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
        element.click()

    def coloured(self, pane: str) -> int:
        return len(self.all(f"{pane} .token.low, {pane} .token.high"))

    def numbers(self, pane: str) -> dict[str, str]:
        names, values = self.all(f"{pane} .numbers dt"), self.all(f"{pane} .numbers dd")
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    def focused(self) -> Any:
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        self.focused().send_keys(*keys)

    def point_at(self, element: Any) -> None:
        webdriver.ActionChains(self.driver).scroll_to_element(element).move_to_element(element).perform()

    @property
    def inspector(self) -> Any:
        return self.find("#inspector")

    def width(self) -> int:
        return self.run("return document.documentElement.scrollWidth")
