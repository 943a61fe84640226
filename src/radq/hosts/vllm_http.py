"""A middleware for vLLM's server: `--middleware radq.hosts.vllm_http.GuideMiddleware`.

It refuses requests that look guided and would not be. It takes `radq` beside `model` and `prompt`, as `radq serve`
does, and the virtual models of the operator's file as models. Each answer confirms what was applied, and has details of
tokens where they are asked for. The page of `radq serve` is served as well, and radq's figures stand in vLLM's
`/metrics`. Figures and details come from vLLM's workers, so they also need
`--worker-extension-cls radq.hosts.vllm_worker.GuideWorker`.
"""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from radq.errors import OptionError, RadqError
from radq.hosts.asgi import (
    Receive,
    Rewrite,
    Scope,
    Send,
    Tail,
    answer_while_running,
    read_body,
    replay,
    send_json,
    with_length,
)
from radq.hosts.batching import FIGURE_NAMES
from radq.hosts.guidance import OWN_ARGUMENTS, TICKET, Registry, describe_guidance, find_registry_for_client
from radq.hosts.vllm_details import AnswerDetails, prepare_details
from radq.hosts.vllm_server import VllmServer, is_page_path, make_page_app
from radq.registry.gate import has_key
from radq.registry.strengths import MISSPELLED, Guidance, write_strengths

ROUTES = ("/completions", "/responses", "/messages")
HINT = 'write "vllm_xargs": {"radq": "sentiment=20,toxicity=-50"}.'
HEADER = b"x-radq"
ENDS = b'"finish_reason":"'  # stands in an event that ends a text


class GuideMiddleware:
    """Stands between a client and vLLM."""

    def __init__(self, app: Any):
        self.app = app
        self._page: Any = None
        self._found: VllmServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == "/metrics":
            await self.app(scope, receive, Tail(send, lambda: self._write_totals(scope)))
        elif scope["method"] == "GET" and scope["path"].endswith("/v1/models"):
            await self.app(scope, receive, _ListModels(send, find_registry_for_client()))
        elif scope["method"] == "POST" and scope["path"].endswith(ROUTES):
            server = self._server(scope)
            await answer_while_running(lambda sent: self._answer(scope, receive, sent), send, lambda: server.is_stopped)
        elif is_page_path(scope["path"].removeprefix(scope.get("root_path", ""))):
            self._page = self._page or make_page_app(self._server(scope))
            await self._page({**scope}, receive, send)
        else:
            await self.app(scope, receive, send)

    def _server(self, scope: Scope) -> VllmServer:
        self._found = self._found or VllmServer(scope["app"].state)
        return self._found

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not has_key(Request(scope), self._server(scope).keys):  # vLLM refuses it, and nothing is told before
            await self.app(scope, receive, send)
            return
        content = await read_body(receive)
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):  # vLLM says what is wrong
            await self.app(scope, replay(content, receive), send)
            return
        try:
            guidance = self._prepare(body, scope)
            details = None if guidance is None else await self._prepare_details(body, guidance, scope)
        except RadqError as error:
            await _refuse(send, str(error))
            return
        if guidance is None:
            await self.app(scope, replay(content, receive), send)
            return
        content = json.dumps(body).encode()
        ticket = body["vllm_xargs"][TICKET]
        confirm = _Confirm(send, guidance, lambda: self._take(scope, ticket), details)
        try:
            await self.app(with_length(scope, content), replay(content, receive), confirm)
        finally:
            if details is not None:  # the client may have gone away
                self._forget(scope, ticket)

    def _prepare(self, body: dict[str, Any], scope: Scope) -> Guidance | None:
        """Check a request, and give it a ticket if it is guided."""
        registry = find_registry_for_client()
        _refuse_ignored(body, registry)
        given = _find_strengths(body)
        _put_strengths_together(body, registry, lambda: self._server(scope).base)
        arguments = body.get("vllm_xargs")
        temperature = body.get("temperature")
        known = arguments if isinstance(arguments, dict) else {}
        known = {name: value for name, value in known.items() if name not in OWN_ARGUMENTS}
        known[TICKET] = uuid.uuid4().hex
        guidance = registry.guidance(known, temperature if isinstance(temperature, int | float) else 1.0)
        if guidance is not None:
            if body.get("use_beam_search"):
                raise OptionError("beam search cannot be guided.", "leave use_beam_search out, or the guides.")
            body["vllm_xargs"] = known
            guidance = replace(guidance, notes=tuple(registry.config.note_shares(given or {})))
        return guidance

    async def _prepare_details(self, body: dict[str, Any], guidance: Guidance, scope: Scope) -> AnswerDetails | None:
        """Prepare the details of the tokens of a request, if it asks for them."""
        if not guidance.details:
            return None
        wants_ids = prepare_details(body, scope["path"])
        server, ticket = self._server(scope), body["vllm_xargs"][TICKET]
        if not (await server.find_facts())["details"]:
            raise OptionError("there are no details where tokens are speculated.", "leave the details out.")
        texts = await asyncio.to_thread(lambda: server.texts)

        async def fetch() -> list[Any]:
            return [row for rows in await server.call("radq_details", ticket) for row in rows]

        return AnswerDetails(guidance, texts, fetch, wants_ids)

    async def _take(self, scope: Scope, ticket: str) -> Mapping[str, float]:
        """The figures of a request, whose tokens may have been drawn by several workers."""
        together: Counter[str] = Counter()
        for sums in await self._server(scope).call("radq_take", ticket):
            together.update(sums or {})
        return together

    def _forget(self, scope: Scope, ticket: str) -> None:
        """Let workers forget the details of a request, without waiting for them."""
        task = asyncio.ensure_future(self._server(scope).call("radq_details", ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_totals(self, scope: Scope) -> bytes:
        """Write the figures of all workers that draw tokens in the format of Prometheus."""
        server = self._server(scope)
        sums = [totals for totals in await server.call("radq_totals") if totals]
        lines = []
        for name, text in FIGURE_NAMES.items():
            lines += [f"# HELP radq_{name}_total {text}", f"# TYPE radq_{name}_total counter"]
            lines.append(f"radq_{name}_total {sum(totals[name] for totals in sums)}")
        lines += ["# HELP radq_cache_bytes keys and values of the guides", "# TYPE radq_cache_bytes gauge"]
        lines.append(f"radq_cache_bytes {sum(await server.call('radq_bytes'))}")
        return ("\n".join(lines) + "\n").encode() if sums else b""


def _refuse_ignored(body: Mapping[str, Any], registry: Registry) -> None:
    """Refuse fields that look like guidance, and that vLLM would ignore."""
    for name in body:
        looks = name.lower().startswith("radq") or name in (*MISSPELLED, *registry.entries, "kl_budget")
        if looks and name != "radq":
            raise OptionError(f"{ascii(name)[:60]} is no field of a request.", HINT)


def _find_strengths(body: Mapping[str, Any]) -> Any:
    """Find the strengths of a request, beside `model` or in the arguments that vLLM hands on."""
    arguments = body.get("vllm_xargs")
    return body.get("radq") or (arguments.get("radq") if isinstance(arguments, dict) else None)


def _put_strengths_together(body: dict[str, Any], registry: Registry, find_base: Callable[[], str]) -> None:
    """Move the strengths of a virtual model, and those beside `model`, into the arguments that vLLM hands on."""
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
        body["model"] = find_base()
    together = {**(virtual or {}), **registry.config.read_strengths(given)}
    body["vllm_xargs"] = {**arguments, "radq": write_strengths(together)}


async def _refuse(send: Send, reason: str) -> None:
    error = {"message": reason, "type": "BadRequestError", "param": "radq", "code": 400}
    await send_json(send, 400, {"error": error})


class _Confirm(Rewrite):
    """Says what was applied: in a header, in a whole answer, and in each chunk of a stream that ends a text."""

    def __init__(
        self,
        send: Send,
        guidance: Guidance,
        take: Callable[[], Awaitable[Mapping[str, float]]],
        details: AnswerDetails | None,
    ):
        """`take` returns the figures of the tokens since its last call."""
        super().__init__(send)
        self._applied, self._take, self._details = describe_guidance(guidance), take, details
        self._sums: Counter[str] = Counter()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(HEADER, json.dumps(self._applied).encode())]

    async def change(self, document: dict[str, Any]) -> None:
        if self._details is not None:
            await self._details.add(document)
        self._sums.update(await self._take())
        document["radq"] = self._applied | _describe(self._sums)

    def reads(self, event: bytes) -> bool:
        return self._details is not None or ENDS in event

    async def change_event(self, document: dict[str, Any]) -> None:
        if any(choice.get("finish_reason") for choice in document.get("choices") or []):
            await self.change(document)
        elif self._details is not None:
            await self._details.add(document)


class _ListModels(Rewrite):
    """Adds the virtual models of the operator's file to vLLM's list of models."""

    def __init__(self, send: Send, registry: Registry):
        super().__init__(send)
        self._registry = registry

    async def change(self, document: dict[str, Any]) -> None:
        like = document["data"][0]
        for name, strengths in self._registry.config.models.items():
            document["data"].append({**like, "id": name, "owned_by": "radq", "radq": strengths})


def _describe(sums: Mapping[str, float]) -> dict[str, Any]:
    """Compute the mean figures of the tokens of an answer."""
    if not sums:
        return {}
    count = max(1.0, sums["tokens"])
    found: dict[str, Any] = {name: sums[name] / count for name in ("kl", "clipped")}
    if sums["failed"]:
        found["error"] = "a guide could not score the text, which ends early."
    return found
