"""The keys by which a server knows its clients."""

import hmac
from collections.abc import Sequence

from fastapi import HTTPException, Request


def has_key(request: Request, keys: Sequence[str]) -> bool:
    """Whether a request has one of the keys, or needs none."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode("utf-8", "replace")
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return not keys or any(matches)


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Refuse a request without one of the keys, if there are any."""
    if not has_key(request, keys):
        raise HTTPException(401, "the API key is wrong or missing. hint: send Authorization: Bearer KEY.")
