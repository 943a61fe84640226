"""The keys by which a server knows its clients."""

import hmac
from collections.abc import Sequence

from fastapi import HTTPException, Request

MISSING_KEY = "the API key is wrong or missing. hint: send Authorization: Bearer KEY."


def has_key(request: Request, keys: Sequence[str]) -> bool:
    """Whether a request has one of the keys, or needs none. Clients send keys that are not ASCII in two encodings."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    sent = given.strip(" \t").encode("latin-1")  # the bytes that came
    matches = [hmac.compare_digest(sent, form) for key in keys for form in _encode(key)]
    return not keys or (scheme.lower() == "bearer" and any(matches))


def _encode(key: str) -> list[bytes]:
    """Encode a key as UTF-8, and as Latin-1 where that has all its characters."""
    return [key.encode(), *([key.encode("latin-1")] if all(ord(one) < 256 for one in key) else [])]


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Refuse a request without one of the keys, if there are any."""
    if not has_key(request, keys):
        raise HTTPException(401, MISSING_KEY)


def name_client(request: Request) -> str:
    """Name the client of a request: by its address and by its key, if it sends one, since clients may share either."""
    host = "" if request.client is None else request.client.host
    return f"{host} {request.headers.get('authorization', '')}"
