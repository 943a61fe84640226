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
from radq.registry.loaded_guides import Served
from radq.registry.problems import ERRORS, add_handlers, answer_problem, check_unicode, reading
from radq.registry.web import VERSION, Gate, ScoreBody, add_page, check_content_type, describe_server, name_client
from radq.serving.answers import Answer, TextStream, unless_gone, write_events
from radq.serving.bodies import ChatBody, CompletionBody
from radq.serving.metrics import Metrics
from radq.serving.parsed_request import parse_request
from radq.serving.scheduler import Scheduler

SCORED_TOKENS = 128  # of prompts, between two steps of running texts
LONG_BODY = 2**15  # bytes; larger bodies take a while to tokenise, and wait for each other


class Server:
    """The models and the scheduler behind the routes, which are methods."""

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

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        return await self._complete(body, request)

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        return await self._complete(body, request)

    async def _complete(self, body: CompletionBody | ChatBody, request: Request) -> Response:
        parsed = await self._read(request, parse_request, body, self.served)
        scores = parsed.prompt_scores(self.served)
        if scores is not None and not await unless_gone(request, self._read_scores(scores)):
            return Response(status_code=499)  # nobody reads this
        stream = TextStream(parsed, self.served, self.scheduler, name_client(request))
        answer = Answer(parsed, self.served, stream.texts, scores)
        stream.start()
        if body.stream:
            headers = {"Cache-Control": "no-cache"}
            return StreamingResponse(write_events(stream, answer), media_type="text/event-stream", headers=headers)
        ends = await unless_gone(request, stream.collect())
        if ends is None:
            stream.cancel()
            return Response(status_code=499)  # nobody reads this
        errors = [end.error for end in ends.values() if end.error is not None]
        if errors and self.scheduler.closing:
            return answer_problem(503, errors[0])
        return JSONResponse(answer.whole(ends))

    async def _read(self, request: Request, work: Callable[..., Any], *arguments: Any) -> Any:
        """Tokenise and check a request in a thread. Long bodies have one of their own, so that no short one waits."""
        pool = self._readers[len(await request.body()) > LONG_BODY]
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    async def _read_scores(self, scores: PromptScores) -> bool:
        """Let prompts be scored in parts, between which texts go on."""
        while not await asyncio.wrap_future(self.scheduler.call(lambda: scores.go_on(SCORED_TOKENS))):
            pass
        return True

    async def score(self, body: ScoreBody, request: Request) -> Response:
        with reading("text"):
            check_unicode(body.text)
            ids = await self._read(request, self.served.encode, body.text)
        work = asyncio.wrap_future(self.scheduler.call_in_turns(lambda turn: self.served.score(ids, turn)))
        scores = await unless_gone(request, work)
        return Response(status_code=499) if scores is None else JSONResponse(scores)

    # --- descriptions ---

    async def models(self) -> dict[str, Any]:
        names = [self.config.base_id, *self.config.models]
        return {"object": "list", "data": [await self.model(name) for name in names]}

    async def model(self, name: str) -> dict[str, Any]:
        strengths = self.config.model_strengths(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "radq", "radq": strengths}

    async def info(self) -> dict[str, Any]:
        """Describe the server; the page is made from this description."""
        return describe_server(
            self.config,
            self.config.base_id,
            self.served.loaded.reward_ranges(),
            self.served.context,
            chat=self.served.has_chat,
            needs_key=self.api_key is not None,
        )

    async def health(self) -> Response:
        if self.scheduler.closing or not self.scheduler.alive:
            self.told_end = True
            return answer_problem(503, "the server is about to end.")
        return JSONResponse({"status": "ok"})

    async def figures(self) -> Response:
        return PlainTextResponse(self.metrics.write(), media_type="text/plain; version=0.0.4")


def make_app(served: Served, api_key: str | None = None, address: str = "127.0.0.1") -> FastAPI:
    """Make the application with all routes, which ends its scheduler when it shuts down.

    Args:
        api_key: the key that clients must have; None if they need none.
        address: the address that the server listens at, one of the names by which clients may address it.
    """
    server = Server(served, api_key)
    hosts, keys = AllowedHosts(address, server.config.hosts), [] if api_key is None else [api_key]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await server.close()

    app = FastAPI(title="radq", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    limit, count = server.config.limits.body_bytes, server.metrics.count_request
    app.add_middleware(Gate, limit=limit, count=count, hosts=hosts, keys=keys)
    add_handlers(app)
    takes_json: dict[str, Any] = {"methods": ["POST"], "dependencies": [Depends(check_content_type)]}
    app.add_api_route("/v1/completions", server.completions, **takes_json, responses=ERRORS)
    app.add_api_route("/v1/chat/completions", server.chat_completions, **takes_json, responses=ERRORS)
    app.add_api_route("/v1/models", server.models, responses=ERRORS)
    app.add_api_route("/v1/models/{name:path}", server.model, responses=ERRORS)
    app.add_api_route("/health", server.health, responses=ERRORS)
    app.add_api_route("/metrics", server.figures)
    add_page(app, server.info, server.score)
    return app
