"""The routes of the server.

    app = make_app(Served(ServeConfig.embedded()))      # an ASGI application

/v1/models, /v1/completions and /v1/chat/completions are OpenAI's; /radq/info and /radq/score are radq's own; /health
and /metrics are for operators; / is the page.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from radq.errors import ContextLengthError, OptionError, RadqError
from radq.serving.answers import Answer
from radq.serving.bodies import ChatBody, CompletionBody, ErrorBody, Kind, ScoreBody
from radq.serving.config import GuideEntry
from radq.serving.metrics import Metrics
from radq.serving.orders import Order, UnknownModelError, read_order
from radq.serving.scheduler import BusyError, ClosingError, Scheduler
from radq.serving.served import Served
from radq.serving.texts import Delivery, Text

LOGGER = logging.getLogger(__name__)
VERSION = version("radq")
PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
STATUS = {BusyError: 429, ClosingError: 503, UnknownModelError: 404}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 405, 413, 429, 500, 503)
}
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Server:
    """The models and the scheduler behind the routes."""

    def __init__(self, served: Served, api_key: str | None = None):
        self.served, self.config, self.api_key = served, served.config, api_key
        self.metrics = Metrics()
        self.scheduler = Scheduler(served, self.metrics)

    # --- texts ---

    async def complete(self, kind: Kind, body: CompletionBody | ChatBody, request: Request) -> Response:
        _check_unicode(body.model_dump())
        order = await asyncio.to_thread(read_order, body, self.served)
        stream = TextStream(order, self)
        answer = Answer(kind, order, self.served, stream.texts)
        self.scheduler.submit(stream.texts)
        if order.stream:
            return StreamingResponse(
                _events(stream, answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        ends = await _unless_gone(request, stream.collect())
        if ends is None:
            stream.cancel()
            return Response(status_code=499)  # nobody reads this
        errors = [end.error for end in ends.values() if end.error is not None]
        if errors and self.scheduler.closing:
            return _error_response(503, errors[0])
        return JSONResponse(answer.whole(ends))

    async def score(self, body: ScoreBody) -> dict[str, Any]:
        _check_unicode(body.text)
        ids = await asyncio.to_thread(self.served.encode, body.text)
        limit = min(self.config.limits.prompt_tokens, self.served.context)
        if not ids or not body.text.strip():
            raise OptionError("text must not be empty.", "give a text with at least one token.")
        if len(ids) > limit:
            raise ContextLengthError(f"a text may have at most {limit} tokens, got {len(ids)}.", "shorten it.")
        return await asyncio.wrap_future(self.scheduler.call(lambda: self.served.score(ids)))

    # --- descriptions ---

    def models(self) -> dict[str, Any]:
        names = [self.config.base_id, *self.config.models]
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> dict[str, Any]:
        if name != self.config.base_id and name not in self.config.models:
            known = ", ".join([self.config.base_id, *self.config.models])
            raise UnknownModelError(f"there is no model {ascii(name)[:80]}.", f"there are {known}.")
        strengths = self.config.models.get(name, {})
        return {"id": name, "object": "model", "created": 0, "owned_by": "radq", "radq": strengths}

    def info(self) -> dict[str, Any]:
        """What the page shows and offers."""
        config = self.config
        return {
            "version": VERSION,
            "base": config.base_id,
            "chat": self.served.has_chat,
            "context": self.served.context,
            "needs_key": self.api_key is not None,
            "attributes": {name: self._attribute(name, entry) for name, entry in config.guides.items()},
            "models": [{"id": config.base_id, "radq": {}}]
            + [{"id": name, "radq": strengths} for name, strengths in config.models.items()],
            "defaults": vars(config.defaults),
            "limits": vars(config.limits),
        }

    def _attribute(self, name: str, entry: GuideEntry) -> dict[str, Any]:
        return {
            "range": entry.limits,
            "default": entry.default,
            "suggested": entry.suggested,
            "safe": entry.safe,
            "rewards": self.served.reward_range(name),
            "description": entry.description,
        }

    def check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.api_key.encode()):
            raise HTTPException(401, "the API key is wrong or missing. hint: send Authorization: Bearer KEY.")


class TextStream:
    """The texts of an order, and what the scheduler's thread says about them, in the thread of the event loop."""

    def __init__(self, order: Order, server: Server):
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[Delivery] = asyncio.Queue()
        self._server = server
        self.texts: list[Text] = order.texts(server.served, self._deliver)
        self._left = len(self.texts)

    def _deliver(self, delivery: Delivery) -> None:
        """Hand news over to the event loop, which may have ended."""
        try:
            self._loop.call_soon_threadsafe(self._news.put_nowait, delivery)
        except RuntimeError:
            delivery.text.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while self._left:
            delivery = await self._news.get()
            self._left -= delivery.finish_reason is not None
            yield delivery

    async def collect(self) -> dict[int, Delivery]:
        """Wait for all texts; return their last deliveries by their numbers."""
        return {one.text.index: one async for one in self if one.finish_reason is not None}

    def cancel(self) -> None:
        if self._left:
            self._server.scheduler.cancel(self.texts)
            self._server.metrics.cancelled.inc(self._left)


async def _events(stream: TextStream, answer: Answer) -> AsyncIterator[bytes]:
    """The events of a stream. It is closed when the client goes away, and its texts are then cancelled."""
    try:
        async for delivery in stream:
            yield _event(answer.chunk(delivery))
            if delivery.error is not None:
                yield _event(_error(503, delivery.error))
        if answer.order.usage:
            yield _event(answer.last_chunk())
        yield b"data: [DONE]\n\n"
    finally:
        stream.cancel()


def _event(document: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of `work`; None if the client goes away before."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


# --- errors ---


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    shown = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}


def _error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status, {})
    return JSONResponse(_error(status, message, param, code), status, headers=headers)


def _check_unicode(value: Any) -> None:
    """Refuse texts with halves of characters, which cannot be written as UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise OptionError("a text in the request is not valid Unicode.", "send whole characters.") from error
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_unicode(name)
            _check_unicode(item)
    elif isinstance(value, list):
        for item in value:
            _check_unicode(item)


async def _on_radq_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RadqError)
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 400)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    code = "model_not_found" if isinstance(error, UnknownModelError) else code
    return _error_response(status, str(error), code=code)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first.get("loc", ())[1:]) or None
    message = str(first.get("msg", "the request is not valid"))
    return _error_response(400, f"{place or 'the body'}: {message}"[:500], param=place and place[:100])


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHTTPException)
    return _error_response(error.status_code, str(error.detail))


async def _on_bug(_: Request, error: Exception) -> Response:
    LOGGER.error("a request failed", exc_info=error)
    return _error_response(500, "the server failed; its log says why.")


class Gate:
    """Middleware that limits bodies, counts answers, and adds headers that tell browsers what to trust."""

    def __init__(self, app: Any, server: Server):
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit, read = self.server.config.limits.body_bytes, 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, f"a body may have at most {limit} bytes. hint: send less.")
            return message

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
                route = getattr(scope.get("route"), "path", "other")
                self.server.metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self.app(scope, limited, counted)


HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


# --- routes ---


def make_app(served: Served, api_key: str | None = None) -> FastAPI:
    """The application with all routes, which ends its scheduler when it shuts down."""
    server = Server(served, api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        server.scheduler.close()
        await asyncio.to_thread(server.scheduler.join)

    app = FastAPI(title="radq", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(Gate, server=server)
    app.add_exception_handler(RadqError, _on_radq_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(AnyHTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
    _add_texts(app, server)
    _add_descriptions(app, server)
    _add_page(app)
    return app


def _add_texts(app: FastAPI, server: Server) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(server.check_key)], "responses": ERRORS}

    @app.post("/v1/completions", **guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await server.complete("completion", body, request)

    @app.post("/v1/chat/completions", **guarded)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await server.complete("chat", body, request)

    @app.post("/radq/score", **guarded)
    async def score(body: ScoreBody) -> dict[str, Any]:
        return await server.score(body)


def _add_descriptions(app: FastAPI, server: Server) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(server.check_key)], "responses": ERRORS}

    @app.get("/v1/models", **guarded)
    async def models() -> dict[str, Any]:
        return server.models()

    @app.get("/v1/models/{name:path}", **guarded)
    async def model(name: str) -> dict[str, Any]:
        return server.model(name)

    @app.get("/radq/info", **guarded)
    async def info() -> dict[str, Any]:
        return server.info()

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        if server.scheduler.closing or not server.scheduler.alive:
            return _error_response(503, "the server is about to end.")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.write(), media_type="text/plain; version=0.0.4")


def _add_page(app: FastAPI) -> None:
    files = {file.name: file for file in PAGE.iterdir() if file.is_file()} if PAGE.is_dir() else {}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(files["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return FileResponse(files[name], headers={"Cache-Control": "no-cache"})
