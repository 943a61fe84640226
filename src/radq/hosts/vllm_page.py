"""The page of `radq serve` in vLLM's server, with the routes that it needs beside OpenAI's."""

import asyncio
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from radq.hosts.vllm_server import VllmServer, WorkerError
from radq.serving.bodies import ScoreBody, check_content_type
from radq.serving.gate import Gate
from radq.serving.info import VERSION, describe_server
from radq.serving.keys import check_key
from radq.serving.page_files import add_page
from radq.serving.problems import ERRORS, add_handlers, answer_problem, check_unicode
from radq.serving.scores import check_scored, describe_scores


def is_page_path(path: str) -> bool:
    return path == "/" or path.startswith(("/page/", "/radq/"))


async def _on_worker_error(_: Request, error: Exception) -> Response:
    return answer_problem(503, str(error))


def make_page_app(server: VllmServer) -> FastAPI:
    """Make the application that answers requests for these routes."""
    app = FastAPI(title="radq", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, limit=server.config.limits.body_bytes)
    add_handlers(app)
    app.add_exception_handler(WorkerError, _on_worker_error)
    add_page(app)

    def check(request: Request) -> None:
        check_key(request, server.keys)

    guarded: dict[str, Any] = {"dependencies": [Depends(check)], "responses": ERRORS}

    @app.get("/radq/info", **guarded)
    async def info() -> dict[str, Any]:
        facts = await server.find_facts()
        return describe_server(
            server.config,
            server.base,
            facts["ranges"],
            server.context,
            chat=await asyncio.to_thread(lambda: server.has_chat),
            needs_key=bool(server.keys),
        )

    @app.post("/radq/score", dependencies=[Depends(check), Depends(check_content_type)], responses=ERRORS)
    async def score(body: ScoreBody) -> dict[str, Any]:
        check_unicode(body.text)
        await server.find_facts()  # which refuses if workers cannot score
        ids = await asyncio.to_thread(server.encode, body.text)
        check_scored(body.text, ids, min(server.config.limits.prompt_tokens, server.context - 1))
        rewards, likelihoods = await asyncio.gather(server.find_rewards(ids), server.find_likelihoods(ids))
        return describe_scores(ids, likelihoods, rewards, server.texts.show_each)

    return app
