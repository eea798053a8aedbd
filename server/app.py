"""The HTTP application: routes, keys, errors, and a bound on how much is taken on at once."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from server import admin, board, errors
from server.auth import client_key, operator_key
from server.ollama import routes as ollama
from server.openai import chat, completions, embeddings, models
from server.request_id import RequestIds
from server.service import Service


def create_app(service: Service) -> FastAPI:
    # No generated documentation: bodies are read by our own code, of which FastAPI knows no schema.
    # Nor redirections, whose address would be made of the Host header.
    app = FastAPI(title="gswapd", openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in (models, chat, completions, embeddings):
        app.include_router(routes.router, prefix="/v1", dependencies=[Depends(client_key)])
    app.include_router(ollama.router, prefix="/api", dependencies=[Depends(client_key)])
    for operating in (admin, board):
        app.include_router(operating.router, dependencies=[Depends(operator_key)])
    app.include_router(admin.health)
    app.include_router(board.page)
    app.add_middleware(Admission, limit=service.config.server.max_requests, turned_away=service.metrics.turned_away)
    errors.register(app)
    if service.tracing is not None:
        from server.tracing import RequestSpans

        app.add_middleware(RequestSpans, tracing=service.tracing)
    app.add_middleware(RequestIds)  # last: the middleware that is added last is outermost
    return app


class Admission:
    """Counts the API requests in the house, from their first byte to their last, and turns away those over the limit.

    It bounds what the queues of the scheduler do not: reading bodies and tokenizing.
    """

    def __init__(self, app: ASGIApp, limit: int, turned_away: Callable[[], None]) -> None:
        self._app = app
        self._limit = limit
        self._turned_away = turned_away
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/v1/", "/api/")):
            await self._app(scope, receive, send)
            return
        if self._inside >= self._limit:
            self._turned_away()
            message = f"The server is answering {self._limit} requests already; try again shortly."
            refusal = errors.ApiError(429, message, "queue_full", headers={"Retry-After": "1"})
            await refusal.response(scope)(scope, receive, send)
            return
        self._inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= 1
