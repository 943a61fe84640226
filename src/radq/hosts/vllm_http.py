"""A middleware for vLLM's server: `--middleware radq.hosts.vllm_http.GuideMiddleware`.

It refuses requests that look guided and would not be. It takes `radq` beside `model` and `prompt`, as `radq serve`
does, and the virtual models of the operator's file as models. Each answer confirms what was applied, and has details of
tokens where they are asked for. The page of `radq serve` is served as well, and radq's figures stand in vLLM's
`/metrics`. Figures and details come from vLLM's workers, so they also need
`--worker-extension-cls radq.hosts.vllm_worker.GuideWorker`.

vLLM's server, asked to end, stops its engine in the middle of answers and then waits for its clients, whose texts will
never come. So `answer_while_running` ends these answers: with status 503, or in a stream by an event with an error.
"""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from radq.errors import OptionError, RadqError
from radq.hosts.batching import FIGURE_NAMES
from radq.hosts.details import AnswerDetails, prepare_details
from radq.hosts.guidance import OWN_ARGUMENTS, TICKET, describe_guidance, find_config_for_client, read_guidance
from radq.hosts.vllm_server import VllmServer, is_page_path, make_page_app
from radq.registry.config import ServeConfig
from radq.registry.strengths import MISSPELLED, Guidance, write_strengths
from radq.registry.web import has_key

ROUTES = ("/completions", "/responses", "/messages")
HINT = 'write "vllm_xargs": {"radq": "sentiment=20,toxicity=-50"}.'
HEADER = "x-radq"
ENDS = b'"finish_reason":"'  # stands in an event that ends a text
EVENT_END = b"\n\n"
DATA = b"data: "


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
            return
        self._found = server = self._found or VllmServer(scope["app"].state)
        if scope["method"] == "GET" and scope["path"] == "/metrics":
            await self.app(scope, receive, Rewrite(send, partial(_add_totals, server)))
        elif scope["method"] == "GET" and scope["path"].endswith("/v1/models"):
            await self.app(scope, receive, Rewrite(send, _add_models))
        elif scope["method"] == "POST" and scope["path"].endswith(ROUTES):
            answer = partial(self._answer, server, scope, receive)
            await answer_while_running(answer, send, lambda: server.is_stopped)
        elif is_page_path(scope["path"].removeprefix(scope.get("root_path", ""))):
            self._page = self._page or make_page_app(server)
            await self._page({**scope}, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, server: VllmServer, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if not has_key(request, server.keys):  # vLLM refuses it, and nothing is told before
            await self.app(scope, receive, send)
            return
        try:
            content = await request.body()
        except ClientDisconnect:
            return
        body: Any = None
        with suppress(ValueError):
            body = json.loads(content)
        guidance = details = None
        try:
            if isinstance(body, dict):  # else vLLM says what is wrong
                guidance = _prepare(body, server)
                details = await _prepare_details(body, guidance, server, scope["path"])
        except RadqError as error:
            document = {"message": str(error), "type": "BadRequestError", "param": "radq", "code": 400}
            await JSONResponse({"error": document}, 400)(scope, receive, send)
            return
        if guidance is None:
            await self.app(scope, _replay(content, receive), send)
            return
        content = json.dumps(body).encode()
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["content-length"] = str(len(content))
        confirmation = _Confirmation(send, server, guidance, body["vllm_xargs"][TICKET], details)
        try:
            await self.app(scope, _replay(content, receive), confirmation)
        finally:
            if details is not None:  # the client may have gone away; workers forget, and nobody waits for them
                task = asyncio.ensure_future(details.fetch())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)


def _replay(content: bytes, receive: Receive) -> Receive:
    """Make a function that receives a body, and then the next messages, such as that the client has gone."""
    bodies = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay_once() -> Message:
        return bodies.pop() if bodies else await receive()

    return replay_once


# --- requests ---


def _prepare(body: dict[str, Any], server: VllmServer) -> Guidance | None:
    """Check a request, and give it a ticket if it is guided."""
    config = find_config_for_client()
    for name in body:
        looks_guided = name.lower().startswith("radq") or name in (*MISSPELLED, *config.guides, "kl_budget")
        if looks_guided and name != "radq":  # vLLM would ignore it
            raise OptionError(f"{ascii(name)[:60]} is no field of a request.", HINT)
    strengths = _move_strengths(body, config, server)
    arguments = body.get("vllm_xargs")
    known = arguments if isinstance(arguments, dict) else {}
    known = {name: value for name, value in known.items() if name not in OWN_ARGUMENTS} | {TICKET: uuid.uuid4().hex}
    temperature = body.get("temperature")
    guidance = read_guidance(config, known, temperature if isinstance(temperature, int | float) else 1.0)
    if guidance is None:
        return None
    if body.get("use_beam_search"):
        raise OptionError("beam search cannot be guided.", "leave use_beam_search out, or the guides.")
    body["vllm_xargs"] = known
    return replace(guidance, notes=tuple(config.note_shares(strengths)))


def _move_strengths(body: dict[str, Any], config: ServeConfig, server: VllmServer) -> Any:
    """Move the strengths of a virtual model, and those beside `model`, into the arguments that vLLM hands on.

    Returns those that the client has written.
    """
    arguments = body.get("vllm_xargs") or {}
    known = arguments if isinstance(arguments, dict) else {}
    virtual = config.models.get(body["model"]) if isinstance(body.get("model"), str) else None
    if virtual is None and "radq" not in body:
        return known.get("radq") or {}
    if known is not arguments or ("radq" in body and "radq" in arguments):
        raise OptionError("radq stands twice in the request.", HINT)
    given = body.pop("radq", None) or arguments.get("radq") or {}
    if virtual is not None:
        if "radq_guide" in arguments:
            raise OptionError("a virtual model is given another guide.", "name guides by radq, or the base model.")
        body["model"] = server.base
    together = {**(virtual or {}), **config.read_strengths(given)}
    body["vllm_xargs"] = {**arguments, "radq": write_strengths(together)}
    return given


async def _prepare_details(
    body: dict[str, Any], guidance: Guidance | None, server: VllmServer, path: str
) -> AnswerDetails | None:
    if guidance is None or not guidance.details:
        return None
    wants_ids, ticket = prepare_details(body, path), body["vllm_xargs"][TICKET]
    if not (await server.find_facts())["details"]:
        raise OptionError("there are no details where tokens are speculated.", "leave the details out.")

    async def fetch() -> list[Any]:
        return [row for rows in await server.call("radq_details", ticket) for row in rows]

    return AnswerDetails(guidance, await asyncio.to_thread(lambda: server.texts), fetch, wants_ids)


# --- answers ---


class Rewrite:
    """Sends a response, and changes its whole body, or the events of a stream, on their way. Errors pass unchanged."""

    def __init__(
        self, send: Send, change: Callable[[bytes], Awaitable[bytes]], headers: Mapping[str, str] | None = None
    ):
        self._send, self._change, self._headers = send, change, headers or {}
        self._start: Message = {}
        self._pass: Send = send  # what the parts of the body go through
        self._content = b""  # that was not sent yet

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        else:
            await (self._pass if message["type"] == "http.response.body" else self._send)(message)

    async def _begin(self, message: Message) -> None:
        headers = MutableHeaders(raw=list(message["headers"]))
        headers.update(self._headers)
        self._start = {**message, "headers": headers.raw}
        if message["status"] == 200:
            self._pass = self._pass_events if is_stream(message) else self._pass_whole
        if self._pass != self._pass_whole:
            await self._send(self._start)

    async def _pass_whole(self, message: Message) -> None:
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return
        content = await self._change(self._content)
        MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(content))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": content})

    async def _pass_events(self, message: Message) -> None:
        *events, self._content = (self._content + message.get("body", b"")).split(EVENT_END)
        changed = [await self._change_event(event) + EVENT_END for event in events]
        rest = b"" if message.get("more_body") else self._content
        await self._send({**message, "body": b"".join([*changed, rest])})

    async def _change_event(self, event: bytes) -> bytes:
        return event


def is_stream(start: Message) -> bool:
    return MutableHeaders(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


async def _add_models(content: bytes) -> bytes:
    document = json.loads(content)
    like = document["data"][0]
    for name, strengths in find_config_for_client().models.items():
        document["data"].append({**like, "id": name, "owned_by": "radq", "radq": strengths})
    return json.dumps(document).encode()


async def _add_totals(server: VllmServer, content: bytes) -> bytes:
    """Add the figures of all workers that draw tokens in the format of Prometheus."""
    sums = [totals for totals in await server.call("radq_totals") if totals]
    if not sums:
        return content
    lines = []
    for name, text in FIGURE_NAMES.items():
        lines += [f"# HELP radq_{name}_total {text}", f"# TYPE radq_{name}_total counter"]
        lines.append(f"radq_{name}_total {sum(totals[name] for totals in sums)}")
    lines += ["# HELP radq_cache_bytes keys and values of the guides", "# TYPE radq_cache_bytes gauge"]
    lines.append(f"radq_cache_bytes {sum(await server.call('radq_bytes'))}")
    return content + ("\n".join(lines) + "\n").encode()


class _Confirmation(Rewrite):
    """Says what was applied: in a header, in a whole answer, and in each chunk of a stream that ends a text."""

    def __init__(self, send: Send, server: VllmServer, guidance: Guidance, ticket: str, details: AnswerDetails | None):
        self._server, self._ticket, self._details = server, ticket, details
        self._applied = describe_guidance(guidance)
        self._sums: Counter[str] = Counter()  # figures of the tokens that have come
        super().__init__(send, self._confirm, {HEADER: json.dumps(self._applied)})

    async def _confirm(self, content: bytes) -> bytes:
        document = json.loads(content)
        if isinstance(document, dict):  # vLLM answers with null when the client has gone away
            await self._add(document, ends=True)
        return json.dumps(document).encode()

    async def _change_event(self, event: bytes) -> bytes:
        if not event.startswith(DATA + b"{") or not (self._details is not None or ENDS in event):
            return event
        document = json.loads(event[len(DATA) :])
        await self._add(document, any(choice.get("finish_reason") for choice in document.get("choices") or []))
        return DATA + json.dumps(document).encode()

    async def _add(self, document: dict[str, Any], ends: bool) -> None:
        if self._details is not None:
            await self._details.add(document)
        if ends:
            for sums in await self._server.call("radq_take", self._ticket):  # of all workers that have drawn tokens
                self._sums.update(sums or {})
            document["radq"] = self._applied | _describe(self._sums)


def _describe(sums: Mapping[str, float]) -> dict[str, Any]:
    if not sums:
        return {}
    count = max(1.0, sums["tokens"])
    means: dict[str, Any] = {name: sums[name] / count for name in ("kl", "clipped")}
    return means | ({"error": "a guide could not score the text, which ends early."} if sums["failed"] else {})


# --- ends ---

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 2.0  # for what an application sends by itself when its engine has stopped
REASON = {"message": "the server is about to end.", "type": "server_error", "param": None, "code": 503}


async def answer_while_running(
    answer: Callable[[Send], Awaitable[None]], send: Send, is_stopped: Callable[[], bool]
) -> None:
    """Let an application answer a request, until its engine has stopped."""
    start: Message | None = None
    has_ended = False

    async def send_noted(message: Message) -> None:
        nonlocal start, has_ended
        if message["type"] == "http.response.start":
            start = message
        elif message["type"] == "http.response.body":
            has_ended = not message.get("more_body")
        await send(message)

    task = asyncio.ensure_future(answer(send_noted))
    try:
        while not task.done() and not is_stopped():
            await asyncio.wait([task], timeout=POLL_SECONDS)
        await asyncio.wait([task], timeout=PATIENCE_SECONDS)
    finally:
        unfinished = task.cancel()  # also if the server has given up this request
    if not unfinished:
        task.result()
        return
    await asyncio.wait([task], timeout=PATIENCE_SECONDS)
    if not has_ended:
        await _end(start, send)


async def _end(start: Message | None, send: Send) -> None:
    """End a response that has begun with this message, or not at all, with an error."""
    content = json.dumps({"error": REASON}).encode()
    if start is None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
    elif is_stream(start):
        content = b"".join(DATA + event + EVENT_END for event in (content, b"[DONE]"))
    else:
        content = b""
    await send({"type": "http.response.body", "body": content})
