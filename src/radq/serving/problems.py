"""Errors as answers in OpenAI's shape, each with its status."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from radq.errors import ContextLengthError, OptionError, RadqError
from radq.serving.bodies import ErrorBody
from radq.serving.config import UnknownModelError
from radq.serving.fields import FieldError
from radq.serving.scheduler import BusyError, ClosingError

LOGGER = logging.getLogger(__name__)
STATUS = {BusyError: 429, ClosingError: 503, UnknownModelError: 404}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 405, 413, 415, 429, 500, 503)
}


def describe_problem(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Describe an error as a document."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    shown = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}


def answer_problem(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Answer with an error."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(status, {})
    return JSONResponse(describe_problem(status, message, param, code), status, headers=headers)


def check_unicode(value: Any) -> None:
    """Refuse texts with halves of characters, which cannot be written as UTF-8, however deeply they are nested."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError as error:
                raise OptionError("a text in the request is not valid Unicode.", "send whole characters.") from error
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one


async def _on_radq_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RadqError)
    status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 400)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    code = "model_not_found" if isinstance(error, UnknownModelError) else code
    param = error.field if isinstance(error, FieldError) else "model" if isinstance(error, UnknownModelError) else None
    return answer_problem(status, str(error), param, code)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first.get("type") == "json_invalid":
        return answer_problem(400, "the body is no JSON. hint: send an object of JSON.")
    place = ".".join(str(part) for part in first.get("loc", ())[1:]) or None
    message = str(first.get("msg", "the request is not valid"))
    return answer_problem(400, f"{place or 'the body'}: {message}"[:500], param=place and place[:100])


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer_problem(error.status_code, str(error.detail))


async def _on_bug(_: Request, error: Exception) -> Response:
    LOGGER.error("a request failed", exc_info=error)
    return answer_problem(500, "the server failed; its log says why.")


def add_handlers(app: FastAPI) -> None:
    """Let an application answer every error in this shape."""
    app.add_exception_handler(RadqError, _on_radq_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
