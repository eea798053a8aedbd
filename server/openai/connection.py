"""Between an answer and its client: server-sent events, and noticing that the client has gone.

A client that closes its connection ends whatever was being done for it, within a turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from server.errors import as_api_error

WRITE_TIMEOUT = 60.0
"""Seconds for a client to take what was sent; one that does not is taken for gone."""

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; once the body is read. Cancels it, and raises ClientDisconnect, if the client goes first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """Server-sent events, one write for each `bytes` that `events` yields."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    @classmethod
    async def open(cls, request: Request, events: AsyncGenerator[bytes]) -> EventStream:
        """Wait for the first event, so that a failure before it is an HTTP status and not an event."""
        return cls(await while_connected(request, _first(events)), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(writer, gone)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await _send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send(send, _part(self._first))
        try:
            async for event in self._events:
                await _send(send, _part(event))
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 – whatever it was, a stream that just ended would look complete
            await _send(send, _part(b"data: %b\n\n" % orjson.dumps(as_api_error(error).envelope())))
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _send(send: Send, message: Message) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await send(message)
    except TimeoutError:
        raise ClientDisconnect from None


async def _first(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
