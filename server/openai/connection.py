"""Between an answer and its client: streams, and noticing that the client has gone.

A client that closes its connection ends whatever was being done for it, within a turn of the event loop. A stream that
has had nothing to say for a while says something that clients pass over, so that proxies do not take it for dead.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Silence:
    """What is said in a stream that has had nothing to say for `seconds`."""

    seconds: float
    comment: Callable[[], bytes]


class EventStream(Response):
    """Server-sent events, one write for each `bytes` that `events` yields."""

    media_type = "text/event-stream"

    def __init__(self, first: asyncio.Future[bytes], events: AsyncGenerator[bytes], silence: Silence | None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._silence = silence
        self._said_at = 0.0  # when something was sent last, on the event loop's clock

    @classmethod
    async def open(cls, request: Request, events: AsyncGenerator[bytes], silence: Silence | None = None) -> EventStream:
        """Wait for the first event, so that a failure before it is an HTTP status and not an event; with `silence`, not
        for longer than it may last.
        """
        first = asyncio.ensure_future(_first(events))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            patience = silence.seconds if silence is not None else None
            await asyncio.wait((first, gone), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not first.done():
                raise ClientDisconnect
            if first.done():
                first.result()
        except BaseException:
            await _cancel(first)
            raise
        finally:
            await _cancel(gone)
        return cls(first, events, silence)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        others = [asyncio.ensure_future(_disconnected(receive))]
        if self._silence is not None:
            others.append(asyncio.ensure_future(self._break_silence(self._silence, send)))
        try:
            await asyncio.wait((writer, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(writer, *others)
            await self._events.aclose()

    async def _break_silence(self, silence: Silence, send: Send) -> None:
        """Between two events, as every write is one: a comment never stands inside of one."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._said_at + silence.seconds - loop.time())
            if loop.time() >= self._said_at + silence.seconds:
                await self._say(send, silence.comment())

    async def _say(self, send: Send, event: bytes) -> None:
        self._said_at = asyncio.get_running_loop().time()
        await _send(send, _part(event))

    def failure(self, error: Exception) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(as_api_error(error).envelope())

    async def _write(self, send: Send) -> None:
        self._said_at = asyncio.get_running_loop().time()
        await _send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if self._silence is not None and not self._first.done():
                await self._say(send, self._silence.comment())
            await self._say(send, await self._first)
            async for event in self._events:
                await self._say(send, event)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 – whatever it was, a stream that just ended would look complete
            await _send(send, _part(self.failure(error)))
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _send(send: Send, message: Message) -> None:
    """A write that is done at once, as nearly all are, needs no timer, which would cost as much as the write."""
    sending = send(message).__await__()
    try:
        blocked_on = next(sending)
    except StopIteration:
        return
    try:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await _resume(sending, blocked_on)
    except TimeoutError:
        raise ClientDisconnect from None


@types.coroutine
def _resume(sending: Generator[Any, None, None], blocked_on: Any) -> Generator[Any, None, None]:
    """Go on with what has begun already and waits for a future."""
    yield blocked_on
    yield from sending


async def _first(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
