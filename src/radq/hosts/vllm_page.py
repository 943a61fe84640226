"""The page of `radq serve` in vLLM's server, with the routes that it needs beside OpenAI's."""

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from radq.hosts.vllm_server import VllmServer
from radq.registry.details import check_scored, describe_scores
from radq.registry.gate import Gate
from radq.registry.problems import add_handlers, check_unicode
from radq.registry.web_page import VERSION, ScoreBody, add_page, describe_server


def is_page_path(path: str) -> bool:
    return path == "/" or path.startswith(("/page/", "/radq/"))


def make_page_app(server: VllmServer) -> FastAPI:
    """Make the application that answers requests for these routes."""

    async def describe() -> dict[str, Any]:
        facts = await server.find_facts()
        return describe_server(
            server.config,
            server.base,
            facts["ranges"],
            server.context,
            chat=await asyncio.to_thread(lambda: server.has_chat),
            needs_key=bool(server.keys),
        )

    async def score(body: ScoreBody, _: Request) -> Response:
        check_unicode(body.text)
        await server.find_facts()  # which refuses if workers cannot score
        ids = await asyncio.to_thread(server.encode, body.text)
        check_scored(body.text, ids, min(server.config.limits.prompt_tokens, server.context - 1))
        rewards, likelihoods = await asyncio.gather(server.find_rewards(ids), server.find_likelihoods(ids))
        return JSONResponse(describe_scores(ids, likelihoods, rewards, server.texts.show_each))

    app = FastAPI(title="radq", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, limit=server.config.limits.body_bytes, keys=server.keys)
    add_handlers(app)
    add_page(app, describe, score)
    return app
