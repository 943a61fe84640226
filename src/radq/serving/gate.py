"""A middleware before all routes.

It refuses names that are not the server's, limits bodies, counts answers, and tells browsers in headers what to trust.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from radq.serving.allowed_hosts import AllowedHosts
from radq.serving.problems import answer_problem

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
    """

    def __init__(
        self,
        app: Any,
        limit: int,
        count: Callable[[str, int], None] | None = None,
        hosts: AllowedHosts | None = None,
    ):
        self.app, self.limit, self.count, self.hosts = app, limit, count, hosts

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
                raise HTTPException(413, f"a body may have at most {self.limit} bytes. hint: send less.")
            return message

        async def counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
                if self.count is not None:
                    self.count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        refused = self._find_refused(scope)
        if refused is None:
            await self.app(scope, limited, counted)
        else:
            message = f"this server is not called {refused[:100]!a}. hint: let its operator add this name to hosts."
            await answer_problem(403, message, code="host_not_allowed")(scope, receive, counted)

    def _find_refused(self, scope: Scope) -> str | None:
        """Find a Host header that is not allowed. Browsers always send one, so a request without any may pass."""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return next((host for host in given if self.hosts is not None and not self.hosts.allow(host)), None)
