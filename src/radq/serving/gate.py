"""A middleware before all routes, which limits bodies, counts answers, and tells browsers in headers what to trust."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

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
    """

    def __init__(self, app: Any, limit: int, count: Callable[[str, int], None] | None = None):
        self.app, self.limit, self.count = app, limit, count

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

        await self.app(scope, limited, counted)
