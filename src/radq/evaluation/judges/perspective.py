"""Google's Perspective API as a judge. Legacy: the service closes at the end of 2026; take an open classifier.

The key comes from the environment variable PERSPECTIVE_API_KEY and nowhere else. PERSPECTIVE_QPS says how many queries
a second your quota allows (1 by default), PERSPECTIVE_URL another address.
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from radq.errors import ModelError, OptionError, require_package
from radq.evaluation.judges.base import Judge, Scored

URL = "https://commentanalyzer.googleapis.com"
MAX_BYTES = 20_480  # of a text, as the service has it
MAX_WAIT = 60.0  # seconds between two attempts at most


@final
class PerspectiveJudge(Judge):
    """One attribute of the service, such as TOXICITY; a text per query, never faster than the quota.

    A query that fails for a passing reason (429, 5xx, no connection, no answer in time) is repeated `attempts` times in
    all, after `backoff`, twice that, four times that … seconds, or as long as the service asks for.
    """

    def __init__(
        self,
        attribute: str = "TOXICITY",
        url: str | None = None,
        queries_per_second: float | None = None,
        attempts: int = 6,
        backoff: float = 1.0,
        timeout: float = 30.0,
    ):
        self.http = require_package("httpx", "eval")
        self.key = os.environ.get("PERSPECTIVE_API_KEY", "")
        if not self.key:
            raise OptionError("Perspective needs a key.", "put it into the environment as PERSPECTIVE_API_KEY.")
        self.attribute = attribute.upper()
        self.name = f"perspective:{self.attribute}"
        self.url = (url or os.environ.get("PERSPECTIVE_URL") or URL).rstrip("/")
        self.pause = 1 / (queries_per_second or _queries_per_second())
        self.attempts, self.backoff, self.timeout = attempts, backoff, timeout
        self.too_long = 0
        self.next_query = 0.0

    @property
    def truncated(self) -> int:
        return self.too_long

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        with self.http.Client(timeout=self.timeout, headers={"X-Goog-Api-Key": self.key}) as client:
            for n, text in enumerate(texts):
                yield [n], np.array([self._ask(client, self._cut(text))])

    def _cut(self, text: str) -> str:
        data = text.encode("utf-8", "replace")
        self.too_long += len(data) > MAX_BYTES
        return data[:MAX_BYTES].decode("utf-8", "ignore")

    def _ask(self, client: Any, text: str) -> float:
        query = {
            "comment": {"text": text},
            "requestedAttributes": {self.attribute: {}},
            "languages": ["en"],
            "doNotStore": True,
        }
        problem = ""
        for attempt in range(self.attempts):
            self._wait()
            asked = 0.0
            try:
                response = client.post(f"{self.url}/v1alpha1/comments:analyze", json=query)
            except self.http.TransportError as error:
                problem = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code == 200:
                    return self._read(response)
                problem = f"status {response.status_code}, {_message(response)}"
                if response.status_code != 429 and response.status_code < 500:
                    raise ModelError(f"Perspective refused {text[:60]!r}: {problem}.", _hint(response.status_code))
                asked = _retry_after(response)
            if attempt + 1 < self.attempts:
                time.sleep(min(max(asked, self.backoff * 2**attempt), MAX_WAIT))
        raise ModelError(
            f"Perspective at {self.url} did not answer in {self.attempts} attempts: {problem}.",
            "what is scored is kept; try again later, or judge by a classifier: the service closes at the end of 2026.",
        )

    def _wait(self) -> None:
        """Until the quota allows another query."""
        time.sleep(max(0.0, self.next_query - time.monotonic()))
        self.next_query = time.monotonic() + self.pause

    def _read(self, response: Any) -> float:
        try:
            return float(response.json()["attributeScores"][self.attribute]["summaryScore"]["value"])
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"Perspective answered without a score for {self.attribute}: {response.text[:200]!r}.",
                "does the attribute exist, and is the address right?",
            ) from error


def _queries_per_second() -> float:
    given = os.environ.get("PERSPECTIVE_QPS", "1")
    try:
        rate = float(given)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise OptionError(f"PERSPECTIVE_QPS is {given!r}.", "give a positive number of queries a second.")
    return rate


def _message(response: Any) -> str:
    """What the service says about a failure."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "no message"


def _retry_after(response: Any) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0


def _hint(status: int) -> str:
    return "check PERSPECTIVE_API_KEY." if status in (401, 403) else "check the attribute's name, and the text."
