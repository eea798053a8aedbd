"""Every request has an id: the client's own `x-request-id`, or a new one. It is in the answer's headers, in whatever is
logged for the request, and in its trace. A request's end is one line of the log.
"""

from __future__ import annotations

import logging
import re
import time
from contextvars import ContextVar
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
USABLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
LOGGED = 256  # characters of a path
UNTOLD = ("/healthz", "/readyz", "/metrics", "/page/", "/admin/")
"""What is asked for again and again, by GET, gets no line in the log."""

current: ContextVar[str] = ContextVar("request id", default="")

logger = logging.getLogger(__name__)


class RequestIds:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER.decode(), "")
        identity = given if USABLE.fullmatch(given) else uuid4().hex
        began, status = time.perf_counter(), 0

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, identity.encode())]
            await send(message)

        token = current.set(identity)
        try:
            await self._app(scope, receive, labelled)
        finally:
            if scope["method"] != "GET" or not scope["path"].startswith(UNTOLD):
                spent = time.perf_counter() - began
                path = scope["path"][:LOGGED]
                logger.info("%s %s %s in %.3f s", scope["method"], path, status or "unanswered", spent)
            current.reset(token)
