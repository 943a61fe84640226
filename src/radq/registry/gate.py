"""A middleware before all routes.

Before a body is read, it refuses names that are not the server's and requests without a key. It limits bodies, answers
HEAD as GET, counts answers, and tells browsers in headers what to trust.
"""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response

from radq.registry.config import AllowedHosts
from radq.registry.problems import answer_problem

MISSING_KEY = "the API key is wrong or missing. hint: send Authorization: Bearer KEY."
GUARDED = ("/v1/", "/radq/")  # the beginnings of routes that need a key
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, self._too_long)
            return message

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
                if self.count is not None:
                    self.count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        if scope["method"] == "HEAD":  # the server leaves the body of its answer out
            scope = {**scope, "method": "GET"}
        refusal = self._refuse(scope)
        await (self.app(scope, limited, counted) if refusal is None else refusal(scope, receive, counted))

    def _refuse(self, scope: Scope) -> Response | None:
        """Refuse a request by its headers alone."""
        host, path = self._find_refused(scope), scope["path"].removeprefix(scope.get("root_path", ""))
        if host is not None:
            message = f"this server is not called {host[:100]!a}. hint: let its operator add this name to hosts."
            return answer_problem(403, message, code="host_not_allowed")
        if path.startswith(GUARDED) and not has_key(Request(scope), self.keys):
            return answer_problem(401, MISSING_KEY)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        return answer_problem(413, self._too_long) if length.isdigit() and int(length) > self.limit else None

    @property
    def _too_long(self) -> str:
        return f"a body may have at most {self.limit} bytes. hint: send less."

    def _find_refused(self, scope: Scope) -> str | None:
        """Find a Host header that is not allowed. Browsers always send one, so a request without any may pass."""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return next((host for host in given if self.hosts is not None and not self.hosts.allow(host)), None)


# --- keys ---


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
