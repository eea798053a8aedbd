"""Errors as HTTP answers: one table, and OpenAI's envelope for nearly all of them.

    {"error": {"message": "…", "type": "…", "param": null, "code": "…"}}

`message` is a sentence for a person, `code` a word for a program. The envelope is the same before an answer has begun
and within a stream. Under `/api` stands Ollama's instead: {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.tokens import ChatTemplateError, UnknownToken
from server.wording import in_plain_words
from swapper.errors import ConfigError, CorruptImage, GswapdError, ModelNotFound, Refused, StoreBusy, StoreError

logger = logging.getLogger(__name__)

REASONS: dict[str, tuple[int, str]] = {
    "model_not_found": (404, "model_not_found"),
    "removed": (404, "model_not_found"),
    "queue_full": (429, "queue_full"),
    "no_memory": (503, "no_memory"),
    "pinned": (409, "pinned"),
    "load_failed": (503, "load_failed"),
    "timeout": (503, "timeout"),
    "draining": (503, "draining"),
    "engine_failed": (500, "engine_failed"),
}
"""Status and code for each reason of the scheduler's (`scheduler/core/actions.py`)."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(GswapdError):
    """An error that knows its HTTP answer."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        """As the dialect of the request's path has it."""
        said = {"error": str(self)} if scope["path"].startswith("/api/") else self.envelope()
        return Response(orjson.dumps(said), self.status, dict(self.headers or {}), media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The HTTP answer to any exception. What was not raised on purpose is logged, and not shown to clients."""
    match error:
        case ApiError():
            return error
        case Refused():
            status, code = REASONS.get(error.reason, (503, error.reason))
            headers = {} if error.retry_after is None else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(status, str(error), code, "model" if status == 404 else None, headers)
        case ModelNotFound():
            return ApiError(404, str(error), "model_not_found", "model")
        case UnknownToken():
            return ApiError(400, str(error), "invalid_value", error.param)
        case ChatTemplateError():
            return ApiError(400, str(error), "invalid_messages", "messages")
        case StoreBusy():
            return ApiError(409, str(error), "store_busy")
        case ConfigError():
            return ApiError(400, f"{str(error).rstrip('.')}.", "invalid_configuration")
        case StoreError() if not isinstance(error, CorruptImage):
            return ApiError(400, str(error), "invalid_name", "name")
        case CorruptImage():
            return ApiError(503, str(error), "load_failed", "model")
        case ClientDisconnect():
            return ApiError(499, "The client closed the connection.", "client_gone")
        case HTTPException():
            code = _CODES.get(error.status_code, "http_error")
            return ApiError(error.status_code, f"{error.detail}.", code, headers=error.headers)
        case GswapdError():
            return ApiError(500, str(error), "internal_error")
        case _:
            logger.error("A request failed on a defect", exc_info=error)
            return ApiError(500, "The server met an internal error, which its log tells of.", "internal_error")


def invalid_request(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The answer to a body that does not validate: one problem, by the parameter's name.

    What is not supported comes first, for it explains the others: a message of tool calls has no content.
    """
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    param = _parameter(problem["loc"])
    match problem["type"]:
        case "json_invalid":
            return ApiError(400, f"The request's body is not JSON: {problem['ctx']['error']}.", "invalid_json")
        case "missing":
            return ApiError(400, f"Parameter '{param}' is missing.", "missing_required_parameter", param)
        case "extra_forbidden":
            message = f"Parameter '{param}' is not supported, or not with this value."
            return ApiError(400, message, "unsupported_parameter", param)
        case _:
            detail = in_plain_words(problem)
            if detail.startswith("must "):
                message = f"Parameter '{param}' {detail}." if param else f"The request's body {detail}."
            else:
                message = f"Parameter '{param}' is invalid: {detail}."
            return ApiError(400, message, "invalid_value", param or None)


def _parameter(location: Sequence[int | str]) -> str:
    """`messages[0].content`; what pydantic adds to tell the members of a union apart is no part of it."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part != "str":
            name += f".{part}" if name else part
    return name


def register(app: FastAPI) -> None:
    """Have every error of an application answered from here."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response(request.scope)

    async def no_route(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        api_error = as_api_error(error)
        message = f"There is no {path} here." if api_error.status == 404 else f"{path} takes no {request.method}."
        return ApiError(api_error.status, message, api_error.code, headers=api_error.headers).response(request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        """Of a path or query: bodies are validated by `server/openai/schemas.py`."""
        assert isinstance(error, RequestValidationError)
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        return invalid_request(problems).response(request.scope)

    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (GswapdError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, answer)
    for status in _CODES:
        app.add_exception_handler(status, no_route)
    app.add_middleware(LastResort)


class LastResort:
    """Answers what nothing else has answered. Nothing is left to the HTTP server, which would log it a second time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def watched(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
            return
        except asyncio.CancelledError:
            # The HTTP server ends so whatever outlives the grace that a shutdown has.
            error = ApiError(503, "The server is shutting down.", "draining")
        except Exception as defect:  # noqa: BLE001 – logged there
            error = as_api_error(defect)
        if not began:
            await error.response(scope)(scope, receive, send)
