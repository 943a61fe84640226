"""A middleware for vLLM's server: `--middleware radq.hosts.vllm_http.GuideMiddleware`.

It refuses requests that look guided and would not be, takes `radq` also where `radq serve` takes it, beside `model` and
`prompt`, and the virtual models of the operator's file as models, confirms in each answer what was applied, and adds
radq's figures to vLLM's `/metrics`. The figures come from vLLM's workers, so they need
`--worker-extension-cls radq.hosts.vllm_worker.GuideWorker`, too.
"""

import json
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from radq.errors import OptionError, RadqError
from radq.hosts.figures import NAMES
from radq.hosts.guidance import TICKET, Guidance, Registry
from radq.hosts.vllm import find_registry
from radq.serving.strengths import read_strengths, write_strengths

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

LOGGER = logging.getLogger("vllm.radq")
ROUTES = ("/completions", "/responses", "/messages")
MISSPELLED = ("vllm_args", "xargs", "extra_args", "extra_body")  # fields that vLLM would ignore
HINT = 'write "vllm_xargs": {"radq": "sentiment=20,toxicity=-50"}.'
HEADER = b"x-radq"


class GuideMiddleware:
    """Stands between a client and vLLM."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == "/metrics":
            await self.app(scope, receive, _Tail(send, lambda: self._write_totals(scope)))
        elif scope["method"] == "GET" and scope["path"].endswith("/v1/models"):
            await self.app(scope, receive, _ListModels(send, _find_registry()))
        elif scope["method"] == "POST" and scope["path"].endswith(ROUTES):
            await self._answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await _read_body(receive)
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):  # vLLM says what is wrong
            await self.app(scope, _replay(content, receive), send)
            return
        try:
            guidance = self._prepare(body, scope)
        except OptionError as error:
            await _refuse(send, str(error))
            return
        if guidance is None:
            await self.app(scope, _replay(content, receive), send)
            return
        content = json.dumps(body).encode()
        head = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope = {**scope, "headers": [*head, (b"content-length", str(len(content)).encode())]}
        ticket = body["vllm_xargs"][TICKET]
        await self.app(scope, _replay(content, receive), _Confirm(send, guidance, lambda: self._take(scope, ticket)))

    def _prepare(self, body: dict[str, Any], scope: Scope) -> Guidance | None:
        """Check a request, and give it a ticket if it is guided."""
        registry = _find_registry()
        _refuse_ignored(body, registry)
        _put_strengths_together(body, registry, scope)
        arguments = body.get("vllm_xargs")
        temperature = body.get("temperature")
        known = arguments if isinstance(arguments, dict) else {}
        guidance = registry.guidance(known, temperature if isinstance(temperature, int | float) else 1.0)
        if guidance is not None:
            if body.get("use_beam_search"):
                raise OptionError("beam search cannot be guided.", "leave use_beam_search out, or the guides.")
            body["vllm_xargs"] = {**known, TICKET: uuid.uuid4().hex}
        return guidance

    async def _take(self, scope: Scope, ticket: str) -> Mapping[str, float] | None:
        return next((sums for sums in await _call(scope, "radq_take", ticket) if sums), None)

    async def _write_totals(self, scope: Scope) -> bytes:
        """The figures of all workers that draw tokens, in the format of Prometheus."""
        sums = [totals for totals in await _call(scope, "radq_totals") if totals]
        lines = []
        for name, text in NAMES.items():
            lines += [f"# HELP radq_{name}_total {text}", f"# TYPE radq_{name}_total counter"]
            lines.append(f"radq_{name}_total {sum(totals[name] for totals in sums)}")
        lines += ["# HELP radq_cache_bytes keys and values of the guides", "# TYPE radq_cache_bytes gauge"]
        lines.append(f"radq_cache_bytes {sum(await _call(scope, 'radq_bytes'))}")
        return ("\n".join(lines) + "\n").encode() if sums else b""


def _refuse_ignored(body: Mapping[str, Any], registry: Registry) -> None:
    """Refuse fields that look like guidance, and that vLLM would ignore."""
    for name in body:
        looks = name.lower().startswith("radq") or name in (*MISSPELLED, *registry.entries, "kl_budget")
        if looks and name != "radq":
            raise OptionError(f"{ascii(name)[:60]} is no field of a request.", HINT)


def _put_strengths_together(body: dict[str, Any], registry: Registry, scope: Scope) -> None:
    """Put the strengths of a virtual model, and those beside `model`, where vLLM hands them on, as a text."""
    virtual = registry.config.models.get(body["model"]) if isinstance(body.get("model"), str) else None
    if virtual is None and "radq" not in body:
        return
    arguments = body.get("vllm_xargs") or {}
    if not isinstance(arguments, dict) or ("radq" in body and "radq" in arguments):
        raise OptionError("radq stands twice in the request.", HINT)
    given = body.pop("radq", None) or arguments.get("radq", {})
    if virtual is not None:
        if "radq_guide" in arguments:
            raise OptionError("a virtual model is given another guide.", "name guides by radq, or the base model.")
        body["model"] = scope["app"].state.openai_serving_models.base_model_paths[0].name
    together = {**(virtual or {}), **read_strengths(given)}
    body["vllm_xargs"] = {**arguments, "radq": write_strengths(together)}


def _find_registry() -> Registry:
    try:
        return find_registry()
    except RadqError as error:
        LOGGER.error("radq: %s", error)
        raise OptionError("the server cannot read its guides.", "tell its operator.") from None


async def _call(scope: Scope, method: str, *arguments: Any) -> list[Any]:
    """Call a method of all workers; nothing if they do not have it."""
    client = getattr(scope["app"].state, "engine_client", None)
    if client is None:
        return []
    try:
        return await client.collective_rpc(method, args=arguments)
    except Exception as error:
        LOGGER.warning("radq has no figures of vLLM's workers; is --worker-extension-cls set? %s", error)
        return []


async def _read_body(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body"):
            return content


def _replay(content: bytes, receive: Receive) -> Receive:
    """Give the body again, and then whatever comes, such as a client that goes away."""
    given = False

    async def replay() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replay


async def _refuse(send: Send, reason: str) -> None:
    error = {"message": reason, "type": "BadRequestError", "param": "radq", "code": 400}
    content = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class _Tail:
    """Sends a response with something at its end."""

    def __init__(self, send: Send, write: Callable[[], Awaitable[bytes]]):
        self._send, self._write = send, write

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message["headers"] if pair[0].lower() != b"content-length"]
            message = {**message, "headers": kept}
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            message = {**message, "body": message.get("body", b"") + await self._write()}
        await self._send(message)


class _Rewrite(ABC):
    """Sends a response whose JSON document is changed on its way; streams and errors pass as they are."""

    def __init__(self, send: Send):
        self._send = send
        self._start: dict[str, Any] = {}
        self._whole = False
        self._content = b""

    @abstractmethod
    async def change(self, document: dict[str, Any]) -> None:
        """Change the document in place."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers to add."""
        return []

    async def __call__(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.lower(), value) for name, value in message["headers"]]
            kind = dict(headers).get(b"content-type", b"")
            self._whole = message["status"] == 200 and kind.startswith(b"application/json")
            kept = [pair for pair in headers if not self._whole or pair[0] != b"content-length"]
            self._start = {**message, "headers": [*kept, *self.headers()]}
            if not self._whole:
                await self._send(self._start)
        elif message["type"] != "http.response.body" or not self._whole:
            await self._send(message)
        else:
            self._content += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()

    async def _finish(self) -> None:
        document = json.loads(self._content)
        await self.change(document)
        content = json.dumps(document).encode()
        self._start["headers"].append((b"content-length", str(len(content)).encode()))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": content})


class _Confirm(_Rewrite):
    """Says what was applied: in a header, and in the answer unless it is a stream."""

    def __init__(self, send: Send, guidance: Guidance, take: Callable[[], Awaitable[Mapping[str, float] | None]]):
        super().__init__(send)
        self._applied, self._take = guidance.describe(), take

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(HEADER, json.dumps(self._applied).encode())]

    async def change(self, document: dict[str, Any]) -> None:
        document["radq"] = self._applied | _describe(await self._take())


class _ListModels(_Rewrite):
    """Adds the virtual models of the operator's file to vLLM's list of models."""

    def __init__(self, send: Send, registry: Registry):
        super().__init__(send)
        self._registry = registry

    async def change(self, document: dict[str, Any]) -> None:
        like = document["data"][0]
        for name, strengths in self._registry.config.models.items():
            document["data"].append({**like, "id": name, "owned_by": "radq", "radq": strengths})


def _describe(sums: Mapping[str, float] | None) -> dict[str, Any]:
    """The mean figures of the tokens of an answer."""
    if sums is None:
        return {}
    count = max(1.0, sums["tokens"])
    found: dict[str, Any] = {name: sums[name] / count for name in ("kl", "clipped")}
    if sums["failed"]:
        found["error"] = "a guide could not score the text, which ends early."
    return found
