"""The routes of the server.

    app = make_app(Served(ServeConfig.embedded()))      # an ASGI application

/v1/models, /v1/completions and /v1/chat/completions are OpenAI's; /radq/info and /radq/score are radq's own; /health
and /metrics are for operators; / is the page.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from radq.decoding.prompt_scores import PromptScores
from radq.registry.config import AllowedHosts
from radq.registry.gate import Gate, name_client
from radq.registry.problems import ERRORS, add_handlers, answer_problem, check_unicode, reading
from radq.registry.web_page import VERSION, ScoreBody, add_page, check_content_type, describe_server
from radq.serving.answers import Answer, TextStream, unless_gone, write_events
from radq.serving.bodies import ChatBody, CompletionBody, Kind
from radq.serving.metrics import Metrics
from radq.serving.parsed_request import parse_request
from radq.serving.scheduler import Scheduler
from radq.serving.served import Served

SCORED_TOKENS = 128  # of prompts, between two steps of running texts
LONG_BODY = 2**15  # bytes; larger bodies take a while to tokenise, and wait for each other


class Server:
    """The models and the scheduler behind the routes."""

    def __init__(self, served: Served, api_key: str | None = None):
        self.served, self.config, self.api_key = served, served.config, api_key
        self.metrics = Metrics()
        self.told_end = False  # whether /health has said that the server ends
        self.scheduler = Scheduler(served, self.metrics)
        self._readers = ThreadPoolExecutor(4, "radq-reader"), ThreadPoolExecutor(1, "radq-long-reader")

    async def close(self) -> None:
        self.scheduler.close()
        await asyncio.to_thread(self.scheduler.join)
        for pool in self._readers:
            pool.shutdown(wait=False, cancel_futures=True)

    # --- texts ---

    async def read(self, request: Request, work: Callable[..., Any], *arguments: Any) -> Any:
        """Tokenise and check a request in a thread. Long bodies have one of their own, so that no short one waits."""
        pool = self._readers[len(await request.body()) > LONG_BODY]
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    async def complete(self, kind: Kind, body: CompletionBody | ChatBody, request: Request) -> Response:
        parsed = await self.read(request, parse_request, body, self.served)
        scores = parsed.prompt_scores(self.served)
        if scores is not None and not await unless_gone(request, self._read_scores(scores)):
            return Response(status_code=499)  # nobody reads this
        stream = TextStream(parsed, self.served, self.scheduler, name_client(request))
        answer = Answer(kind, parsed, self.served, stream.texts, scores)
        stream.start()
        if parsed.stream:
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

    async def _read_scores(self, scores: PromptScores) -> bool:
        """Let prompts be scored in parts, between which texts go on."""
        while not await asyncio.wrap_future(self.scheduler.call(lambda: scores.go_on(SCORED_TOKENS))):
            pass
        return True

    async def score(self, body: ScoreBody, request: Request) -> Response:
        with reading("text"):
            check_unicode(body.text)
            ids = await self.read(request, self.served.encode, body.text)
        work = asyncio.wrap_future(self.scheduler.call_in_turns(lambda turn: self.served.score(ids, turn)))
        scores = await unless_gone(request, work)
        return Response(status_code=499) if scores is None else JSONResponse(scores)

    # --- descriptions ---

    def models(self) -> dict[str, Any]:
        names = [self.config.base_id, *self.config.models]
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> dict[str, Any]:
        strengths = self.config.model_strengths(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "radq", "radq": strengths}

    async def info(self) -> dict[str, Any]:
        """Describe the server; the page is made from this description."""
        served = self.served
        return describe_server(
            self.config,
            self.config.base_id,
            served.loaded.reward_ranges(),
            served.context,
            chat=served.has_chat,
            needs_key=self.api_key is not None,
        )

    def count(self, route: str, status: int) -> None:
        self.metrics.requests.labels(route, str(status)).inc()


# --- routes ---


def make_app(served: Served, api_key: str | None = None, address: str = "127.0.0.1") -> FastAPI:
    """Make the application with all routes, which ends its scheduler when it shuts down.

    Args:
        api_key: the key that clients must have; None if they need none.
        address: the address that the server listens at, one of the names by which clients may address it.
    """
    server = Server(served, api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.close()

    app = FastAPI(title="radq", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    hosts = AllowedHosts(address, server.config.hosts)
    keys = [] if api_key is None else [api_key]
    app.add_middleware(Gate, limit=server.config.limits.body_bytes, count=server.count, hosts=hosts, keys=keys)
    add_handlers(app)
    _add_texts(app, server)
    _add_descriptions(app, server)
    add_page(app, server.info, server.score)
    return app


def _add_texts(app: FastAPI, server: Server) -> None:
    guarded: dict[str, Any] = {"dependencies": [Depends(check_content_type)], "responses": ERRORS}

    @app.post("/v1/completions", **guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await server.complete("completion", body, request)

    @app.post("/v1/chat/completions", **guarded)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await server.complete("chat", body, request)


def _add_descriptions(app: FastAPI, server: Server) -> None:
    guarded: dict[str, Any] = {"responses": ERRORS}

    @app.get("/v1/models", **guarded)
    async def models() -> dict[str, Any]:
        return server.models()

    @app.get("/v1/models/{name:path}", **guarded)
    async def model(name: str) -> dict[str, Any]:
        return server.model(name)

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        if server.scheduler.closing or not server.scheduler.alive:
            server.told_end = True
            return answer_problem(503, "the server is about to end.")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(server.metrics.write(), media_type="text/plain; version=0.0.4")
