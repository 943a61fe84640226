"""Chats with an OpenAI-compatible server, which is asked again while it fails: vLLM, llama.cpp, radq serve, OpenAI.

    server = find_server("my-model")  # OPENAI_BASE_URL and OPENAI_API_KEY are read from the environment
    server.ask([{"role": "user", "content": "hello"}], stop)
    server.usage.prompt_tokens

The key is sent to this server alone: it follows no redirection, and no message or file holds the key. Several threads
may ask one server at the same time. Importing this module imports no torch.
"""

import http.client
import json
import os
import random
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event, Lock
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from radq.errors import OptionError, ServerError, first_line

OPENAI = "https://api.openai.com/v1"
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before the second call, and before any later one
RETRIES, FIRST_RETRIES = 8, 2  # after a failure, and after one of a server that has never answered
PASSING = (408, 409, 425, 429)  # statuses that pass, beside those from 500 on
AGAIN = "run the same command again: it goes on with what is missing."
Messages = list[dict[str, str]]


@dataclass
class ChatUsage:
    """The calls and tokens that the answers of a server have cost."""

    calls: int = 0  # that were answered
    failures: int = 0  # that were not, and were repeated
    prompt_tokens: int = 0
    completion_tokens: int = 0


class RefusedError(Exception):
    """A server that refuses one request for good, such as a text that is too long for it."""


class _PassingError(Exception):
    """A failure that may pass; `wait` is the number of seconds that the server asks for, or 0."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class ChatServer:
    """A model of an OpenAI-compatible server."""

    def __init__(self, model: str, address: str, key: str = "", timeout: float = 120.0, max_tokens: int = 64):
        self.model, self.address, self.timeout = model, address.rstrip("/"), timeout
        self.usage = ChatUsage()
        self._key = key
        self._settings: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}
        self._has_answered = False
        self._lock = Lock()
        self._opener = urllib.request.build_opener(_NoRedirection)

    def ask(self, messages: Messages, stop: Event) -> str:
        """The answer to a chat. Failures that may pass are waited for, unless `stop` is set."""
        failures = 0
        while True:
            try:
                return self._read_answer(self._post(messages))
            except _PassingError as error:
                failures += 1
                with self._lock:
                    self.usage.failures += 1
                if stop.is_set() or failures > (RETRIES if self._has_answered else FIRST_RETRIES):
                    raise ServerError(f"the server {self.address} fails: {error}.", AGAIN) from error
                stop.wait(_choose_wait(failures, error.wait))

    def _post(self, messages: Messages) -> Any:
        settings = dict(self._settings)
        body = json.dumps({"model": self.model, "messages": messages, **settings}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "radq"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(f"{self.address}/chat/completions", body, headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                self._has_answered = True
                return json.load(response)
        except HTTPError as error:
            self._has_answered = True
            self._explain(error, settings)
        except (URLError, http.client.HTTPException, OSError, ValueError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            shown = first_line(reason) if isinstance(reason, Exception) else str(reason)
            raise _PassingError(self._hide_key(shown)) from error
        return self._post(messages)  # with the settings that the server wants

    def _explain(self, error: HTTPError, settings: dict[str, Any]) -> None:
        """Raise an error that says what to do, unless other settings help."""
        with error:
            details = _read_details(error)
        reason = self._hide_key(str(details.get("message") or error.reason or error.code))[:300].rstrip(".")
        if error.code in PASSING or error.code >= 500:
            raise _PassingError(f"{error.code}, {reason}", _read_wait(error.headers.get("Retry-After")))
        if error.code in (401, 403):
            raise ServerError(f"the server {self.address} refuses the key: {reason}.", "set OPENAI_API_KEY.")
        if error.code == 404:
            raise ServerError(
                f"the server {self.address} has no model {self.model!r}, or no chats: {reason}.",
                "name one of its models, and give the address with /v1 in OPENAI_BASE_URL.",
            )
        if error.code < 400:
            raise ServerError(f"the server {self.address} redirects.", "set OPENAI_BASE_URL to its new address.")
        name = details.get("param")
        if name not in settings or "unsupported" not in f"{details.get('code')} {details.get('message')}".lower():
            raise RefusedError(reason)
        with self._lock:  # some models of OpenAI lack a setting, or have another name for it
            value = self._settings.pop(name, None)
            if name == "max_tokens" and value is not None:
                self._settings["max_completion_tokens"] = value

    def _read_answer(self, document: Any) -> str:
        try:
            content = document["choices"][0]["message"].get("content")
            usage = document.get("usage") or {}
            counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _PassingError("its answer is no chat completion") from error
        with self._lock:
            self.usage.calls += 1
            self.usage.prompt_tokens += counts[0]
            self.usage.completion_tokens += counts[1]
        return content if isinstance(content, str) else ""  # None where thoughts have taken all tokens

    def _hide_key(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text


def find_server(model: str, timeout: float = 120.0, max_tokens: int = 64) -> ChatServer:
    """The server that the environment names: OPENAI_BASE_URL, or else OpenAI, with the key OPENAI_API_KEY."""
    address = os.environ.get("OPENAI_BASE_URL", "").strip() or OPENAI
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not _is_plain(address):
        raise OptionError(
            "OPENAI_BASE_URL must be an http address without a name, a password and a query.",
            "write it as http://127.0.0.1:8000/v1.",
        )
    if not model:
        raise OptionError("the judge 'openai:' names no model.", "name one, such as openai:MODEL.")
    if not key and address == OPENAI:
        raise OptionError(
            "neither OPENAI_BASE_URL nor OPENAI_API_KEY is set.",
            "set OPENAI_BASE_URL to a server such as http://127.0.0.1:8000/v1, or OPENAI_API_KEY to use OpenAI.",
        )
    if not key.isascii() or not key.isprintable():
        raise OptionError("OPENAI_API_KEY holds characters that no key has.", "set it again.")
    return ChatServer(model, address, key, timeout, max_tokens)


def _is_plain(address: str) -> bool:
    """Whether an address is one of http without a name, a password and a query, which may be secret."""
    try:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in address and "?" not in address
    except ValueError:
        return False


def _choose_wait(failures: int, asked: float) -> float:
    """Seconds to wait: twice as long after each failure, not the same in all threads, or as the server asks."""
    own = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT) * random.uniform(0.5, 1)
    return max(own, min(asked, LONGEST_WAIT))


def _read_wait(header: str | None) -> float:
    """The seconds of a header Retry-After, which holds a number or a date; 0 for anything else."""
    with suppress(ValueError):
        return max(0.0, float(header or 0))
    try:
        date = parsedate_to_datetime(header or "")
        return max(0.0, (date - datetime.now(UTC if date.tzinfo else None)).total_seconds())
    except (TypeError, ValueError):
        return 0.0


def _read_details(error: HTTPError) -> dict[str, Any]:
    """The error that a server describes in OpenAI's form; a message alone where it uses another form."""
    try:
        text = error.read(100_000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return {}
    try:
        document = json.loads(text)
    except ValueError:
        return {"message": " ".join(text.split())[:300]}
    details = document.get("error", document) if isinstance(document, dict) else document
    return details if isinstance(details, dict) else {"message": str(details)}
