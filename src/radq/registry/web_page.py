"""The page at `/`, and the routes that it needs: the description of a server, and scores of texts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.registry.config import ServeConfig
from radq.registry.problems import ERRORS
from radq.sources.embedded import EMBEDDED, HUB_NAME

PAGE = Path(__file__).parent / "page"
VERSION = version("radq")
Ranges = Mapping[str, Sequence[float] | None]  # lowest and highest reward of each guide


def describe_server(
    config: ServeConfig, base: str, ranges: Ranges, context: int, *, chat: bool, needs_key: bool
) -> dict[str, Any]:
    """Describe a server: its models, guides, defaults and limits.

    Args:
        base: the name of the base model for clients.
        ranges: the lowest and highest reward of each guide; None for one without a reward model.
        context: the most tokens of a text.
        chat: whether the base model has a chat template.
    """
    attributes = {
        name: {
            "range": entry.limits,
            "default": entry.default,
            "suggested": entry.suggested,
            "safe": entry.safe,
            "strengths": config.calibrations[name].named if name in config.calibrations else {},
            "rewards": ranges[name],
            "description": entry.description,
        }
        for name, entry in config.guides.items()
    }
    virtual = [{"id": name, "radq": strengths} for name, strengths in config.models.items()]
    return {
        "version": VERSION,
        "base": base,
        "title": HUB_NAME.rpartition("/")[2] if base == EMBEDDED else base,
        "chat": chat,
        "context": context,
        "needs_key": needs_key,
        "attributes": attributes,
        "models": [{"id": base, "radq": {}}, *virtual],
        "defaults": vars(config.defaults),
        "usual_kl_budget": DEFAULT_KL_BUDGET,  # where a client turns the budget on that the operator has turned off
        "limits": vars(config.limits),
    }


class ScoreBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="The text whose tokens are scored.")


def check_content_type(request: Request) -> None:
    """Refuse a body that does not call itself JSON.

    A browser lets a page of any site send bodies of other types, and asks the server first only for JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, "the body does not call itself JSON. hint: send Content-Type: application/json.")


def add_page(
    app: FastAPI,
    describe: Callable[[], Awaitable[dict[str, Any]]],
    find_scores: Callable[[ScoreBody, Request], Awaitable[Response]],
) -> None:
    """Add the page, and the routes beside OpenAI's that it needs."""
    files = {file.name: file for file in PAGE.iterdir() if file.is_file()}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(files["index.html"], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return FileResponse(files[name], headers={"Cache-Control": "no-cache"})

    @app.get("/radq/info", responses=ERRORS)
    async def info() -> dict[str, Any]:
        return await describe()

    @app.post("/radq/score", dependencies=[Depends(check_content_type)], responses=ERRORS)
    async def score(body: ScoreBody, request: Request) -> Response:
        return await find_scores(body, request)
