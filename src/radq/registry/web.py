"""The web side that servers of guides share: a gate before all routes, and the page at `/` with the routes it needs.

Before a body is read, the gate refuses names that are not the server's and requests without a key. It limits bodies,
answers HEAD as GET, counts answers, and tells browsers in headers what to trust.
"""

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.registry.config import AllowedHosts, ServeConfig
from radq.registry.problems import ERRORS, answer_problem
from radq.sources.embedded import EMBEDDED, HUB_NAME

PAGE = Path(__file__).parent / "page"
VERSION = version("radq")
Ranges = Mapping[str, Sequence[float] | None]  # lowest and highest reward of each guide; None without a reward model
MISSING_KEY = "the API key is wrong or missing. hint: send Authorization: Bearer KEY."
GUARDED = ("/v1/", "/radq/")  # the beginnings of routes that need a key
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class Gate:
    """Stands before an application.

    Args:
        limit: the most bytes of a body.
        count: is told the route and the status of each answer.
        hosts: the names by which clients may address the server; None allows any.
        keys: one of them opens the routes below `GUARDED`; without any, all are open.
    """

    def __init__(
        self,
        app: Any,
        limit: int,
        count: Callable[[str, int], None] | None = None,
        hosts: AllowedHosts | None = None,
        keys: Sequence[str] = (),
    ):
        self.app, self.limit, self.count, self.hosts, self.keys = app, limit, count, hosts, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, self._too_long)
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
                if self.count is not None:
                    self.count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        if scope["method"] == "HEAD":  # the server leaves the body of its answer out
            scope = {**scope, "method": "GET"}
        await (self._refuse(scope) or self.app)(scope, limited, counted)

    def _refuse(self, scope: Scope) -> Response | None:
        """Refuse a request by its headers alone."""
        headers, path = Headers(scope=scope), scope["path"].removeprefix(scope.get("root_path", ""))
        for host in headers.getlist("host"):  # browsers always send one, so a request without any may pass
            if self.hosts is not None and not self.hosts.allow(host):
                message = f"this server is not called {host[:100]!a}. hint: let its operator add this name to hosts."
                return answer_problem(403, message, code="host_not_allowed")
        if path.startswith(GUARDED) and not has_key(Request(scope), self.keys):
            return answer_problem(401, MISSING_KEY)
        length = headers.get("content-length", "0")
        too_long = length.isascii() and length.isdigit() and int(length) > self.limit
        return answer_problem(413, self._too_long) if too_long else None

    @property
    def _too_long(self) -> str:
        return f"a body may have at most {self.limit} bytes. hint: send less."


def has_key(request: Request, keys: Sequence[str]) -> bool:
    """Whether a request has one of the keys, or needs none. Clients send keys that are not ASCII in two encodings."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip(" \t").encode("latin-1")  # the bytes that came
    matches = [hmac.compare_digest(sent, form) for key in keys for form in _encode(key)]
    return not keys or (scheme.lower() == "bearer" and any(matches))


def _encode(key: str) -> list[bytes]:
    """Encode a key as UTF-8, and as Latin-1 where that has all its characters."""
    return [key.encode(), *([key.encode("latin-1")] if all(ord(one) < 256 for one in key) else [])]


def name_client(request: Request) -> str:
    """Name the client of a request: by its address and by its key, if it sends one, since clients may share either."""
    host = "" if request.client is None else request.client.host
    return f"{host} {request.headers.get('authorization', '')}"


def check_content_type(request: Request) -> None:
    """Refuse a body that does not call itself JSON.

    A browser lets a page of any site send bodies of other types, and asks the server first only for JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, "the body does not call itself JSON. hint: send Content-Type: application/json.")


# --- the page ---


def describe_server(
    config: ServeConfig, base: str, ranges: Ranges, context: int, *, chat: bool, needs_key: bool
) -> dict[str, Any]:
    """Describe a server: its models, guides, defaults and limits. `base` is the base model's name for clients."""
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


def add_page(
    app: FastAPI,
    describe: Callable[[], Awaitable[dict[str, Any]]],
    find_scores: Callable[[ScoreBody, Request], Awaitable[Response]],
) -> None:
    """Add the page, and the routes beside OpenAI's that it needs."""
    files = {file.name: file for file in PAGE.iterdir() if file.is_file()}

    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return FileResponse(files[name], headers={"Cache-Control": "no-cache"})

    async def page() -> Response:
        return await page_file("index.html")

    app.add_api_route("/", page, include_in_schema=False)
    app.add_api_route("/page/{name}", page_file, include_in_schema=False)
    app.add_api_route("/radq/info", describe, responses=ERRORS)
    takes_json = [Depends(check_content_type)]
    app.add_api_route("/radq/score", find_scores, methods=["POST"], dependencies=takes_json, responses=ERRORS)
