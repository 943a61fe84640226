"""vLLM's server, as radq's middleware sees it: its model, its clients' keys, its workers, and the page.

The page is that of `radq serve`, with the routes that it needs beside OpenAI's.
"""

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from radq.errors import require_package
from radq.hosts.guidance import LOGGER, find_config
from radq.registry.details import TokenTexts, describe_scores, encode_scored
from radq.registry.problems import UnavailableError, add_handlers, check_unicode
from radq.registry.web import VERSION, Gate, ScoreBody, add_page, describe_server
from radq.sources.model_source import ModelSource


class VllmServer:
    """vLLM's server, as seen through the state that it keeps of its application."""

    def __init__(self, state: Any):
        self.state = state
        self._facts: dict[str, Any] | None = None

    # --- the model and its clients ---

    @property
    def base(self) -> str:
        """The name of the base model for clients."""
        return self.state.openai_serving_models.base_model_paths[0].name

    @property
    def context(self) -> int:
        return self.state.engine_client.model_config.max_model_len

    @property
    def keys(self) -> list[str]:
        """The keys, one of which a client must have; an empty list if clients need none."""
        given = getattr(getattr(self.state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
        return [key for key in given if key]

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(ModelSource.find(self.state.engine_client.model_config.tokenizer).tokenizer)

    @property
    def has_chat(self) -> bool:
        own = getattr(self.texts.tokenizer, "chat_template", None)
        return (getattr(self.state.args, "chat_template", None) or own) is not None

    def encode(self, text: str) -> list[int]:
        """Tokenise a text to be scored, unless it is too long."""
        config = self.state.engine_client.model_config.hf_config
        limit = min(find_config().limits.prompt_tokens, self.context - 1)
        return encode_scored(self.texts.tokenizer, config, text, limit)

    async def find_likelihoods(self, token_ids: Sequence[int]) -> list[float]:
        """Find the log-probability of each token but the first under the base model."""
        params = require_package("vllm", "vllm").SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        scores: Sequence[Any] = ()
        prompt, name = {"prompt_token_ids": list(token_ids)}, f"radq-score-{uuid.uuid4().hex}"
        async for output in self.state.engine_client.generate(prompt, params, name):
            scores = output.prompt_logprobs or scores
        return [entry[token].logprob for entry, token in zip(scores[1:], token_ids[1:], strict=True)]

    # --- its workers ---

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has stopped, after which no text comes any more."""
        return bool(getattr(getattr(self.state, "engine_client", None), "errored", False))

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers, and return their results: none if workers do not have this method."""
        client = getattr(self.state, "engine_client", None)
        if client is None:
            return []
        call_engines = getattr(getattr(client, "engine_core", None), "call_utility_all_async", None)
        try:
            if call_engines is None:
                return await client.collective_rpc(method, args=arguments)
            engines = await call_engines("collective_rpc", method, None, arguments, None)
        except Exception as error:
            LOGGER.warning("radq has no figures of vLLM's workers; is --worker-extension-cls set? %s", error)
            return []
        return [result for results in engines for result in results]

    async def find_facts(self) -> Mapping[str, Any]:
        """Ask the workers for the ranges of the guides' rewards, and whether they can tell details of tokens."""
        if self._facts is None:
            self._facts = next((facts for facts in await self.call("radq_facts") if facts), None)
        if self._facts is None:
            raise UnavailableError(
                "vLLM's workers tell nothing about tokens.",
                "let the operator add --worker-extension-cls radq.hosts.vllm_worker.GuideWorker.",
            )
        return self._facts

    async def find_rewards(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """Ask the workers for the reward of each token of a text, by the name of each guide."""
        return next((rewards for rewards in await self.call("radq_score", list(token_ids)) if rewards is not None), {})


def is_page_path(path: str) -> bool:
    return path == "/" or path.startswith(("/page/", "/radq/"))


def make_page_app(server: VllmServer) -> FastAPI:

    async def describe() -> dict[str, Any]:
        facts = await server.find_facts()
        return describe_server(
            find_config(),
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
        rewards, likelihoods = await asyncio.gather(server.find_rewards(ids), server.find_likelihoods(ids))
        return JSONResponse(describe_scores(ids, likelihoods, rewards, server.texts.show_each))

    app = FastAPI(title="radq", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, limit=find_config().limits.body_bytes, keys=server.keys)
    add_handlers(app)
    add_page(app, describe, score)
    return app
