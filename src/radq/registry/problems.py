"""Errors as answers in OpenAI's shape, each with its status."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from radq.errors import ContextLengthError, OptionError, RadqError
from radq.registry.config import UnknownModelError

LOGGER = logging.getLogger(__name__)
WORDS = {  # of errors whose own words speak of Python
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "Input should be an object"),
    **dict.fromkeys(("int_parsing", "int_from_float", "int_type"), "Input should be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "Input should be a number"),
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
HEADERS = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}


class UnavailableError(RadqError):
    """An error that is not the client's, with the status of its answer."""

    def __init__(self, message: str, hint: str | None = None, status: int = 503):
        super().__init__(message, hint)
        self.status = status


class FieldError(OptionError):
    """An error in a field of a request."""

    def __init__(self, field: str, message: str, hint: str | None = None):
        super().__init__(message, hint)
        self.field = field


@contextmanager
def reading(field: str) -> Iterator[None]:
    """Let errors of options name the field of the request that they are about."""
    try:
        yield
    except OptionError as error:
        if type(error) is not OptionError:  # others name a field, or have a status of their own
            raise
        raise FieldError(field, error.message, error.hint) from error


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """An error in OpenAI's form."""

    error: ErrorDetail


STATUSES = (400, 401, 403, 404, 405, 413, 415, 429, 500, 503)
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in STATUSES}


def describe_problem(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    shown = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "param": param, "code": code}}


def answer_problem(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    return JSONResponse(describe_problem(status, message, param, code), status, headers=HEADERS.get(status))


def check_unicode(value: Any) -> None:
    """Refuse texts with halves of characters, which cannot be written as UTF-8, however deeply they are nested."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise OptionError("a text in the request is not valid Unicode.", "send whole characters.") from error
        elif isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            left += [item for item in part if type(item) is not int]  # token ids may be very many


async def _on_radq_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RadqError)
    if isinstance(error, UnknownModelError):
        return answer_problem(404, str(error), "model", "model_not_found")
    if isinstance(error, ContextLengthError):
        return answer_problem(400, str(error), code="context_length_exceeded")
    if isinstance(error, FieldError):
        return answer_problem(400, str(error), error.field)
    return answer_problem(error.status if isinstance(error, UnavailableError) else 400, str(error))


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors[0].get("type") == "json_invalid":
        return answer_problem(400, "the body is no JSON. hint: send an object of JSON.")
    of_field = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]  # one for each type that it may have
    paths = [_find_path(one["loc"][1:], error.body, one["type"] == "missing") for one in of_field]
    path, first = max(zip(paths, of_field, strict=True), key=lambda pair: len(pair[0]))
    field, message = ".".join(path), WORDS.get(first["type"], str(first.get("msg", "the request is not valid")))
    shown = f"{field or 'the body'}: {message}"[:500]
    return answer_problem(400, f"{shown}. hint: /openapi.json tells what a field may be.", param=field[:100] or None)


def _find_path(names: Sequence[str | int], body: Any, missing: bool) -> list[str]:
    """Find where an error is in the body. Its location also names types, which a client has not written."""
    path: list[str] = []
    for name in names:
        if isinstance(body, dict) and (name in body or missing):
            path, body = [*path, str(name)], body.get(name)
        elif isinstance(body, list) and isinstance(name, int) and name < len(body):
            path, body = [*path, str(name)], body[name]
    return path


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = answer_problem(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})  # such as Allow
    return answer


async def _on_bug(_: Request, error: Exception) -> Response:
    LOGGER.error("a request failed", exc_info=error)
    return answer_problem(500, "the server failed; its log says why.")


def add_handlers(app: FastAPI) -> None:
    """Let an application answer every error in this shape."""
    app.add_exception_handler(RadqError, _on_radq_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_bug)
