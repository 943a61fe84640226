"""The routes of the server.

    app = make_app(Served(ServeConfig.embedded()))      # an ASGI application

/v1/models, /v1/completions and /v1/chat/completions are OpenAI's; /radq/info and /radq/score are radq's own; /health
and /metrics are for operators; / is the page.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from radq.errors import ContextLengthError, OptionError
from radq.serving.answers import Answer
from radq.serving.bodies import ChatBody, CompletionBody, Kind, ScoreBody
from radq.serving.config import GuideEntry
from radq.serving.metrics import Metrics
from radq.serving.orders import read_order
from radq.serving.problems import ERRORS, add_handlers, answer_problem, check_unicode
from radq.serving.scheduler import Scheduler
from radq.serving.served import Served
from radq.serving.streams import TextStream, unless_gone, write_events

VERSION = version("radq")
PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
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
        check_unicode(body.model_dump())
        order = await asyncio.to_thread(read_order, body, self.served)
        stream = TextStream(order, self.served, self.scheduler)
        answer = Answer(kind, order, self.served, stream.texts)
        self.scheduler.submit(stream.texts)
        if order.stream:
            return StreamingResponse(
                write_events(stream, answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
            )
        ends = await unless_gone(request, stream.collect())
        if ends is None:
            stream.cancel()
            return Response(status_code=499)  # nobody reads this
        errors = [end.error for end in ends.values() if end.error is not None]
        if errors and self.scheduler.closing:
            return answer_problem(503, errors[0])
        return JSONResponse(answer.whole(ends))

    async def score(self, body: ScoreBody) -> dict[str, Any]:
        check_unicode(body.text)
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
        strengths = self.config.model_strengths(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "radq", "radq": strengths}

    def info(self) -> dict[str, Any]:
        """A description of the server, from which the page is made."""
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
    add_handlers(app)
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
            return answer_problem(503, "the server is about to end.")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.write(), media_type="text/plain; version=0.0.4")


def _add_page(app: FastAPI) -> None:
    files = {file.name: file for file in PAGE.iterdir() if file.is_file()}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(files["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return FileResponse(files[name], headers={"Cache-Control": "no-cache"})
