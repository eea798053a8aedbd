"""Reading the body of a request: no larger than is allowed, in no more time than is allowed, and never in the way of a
shutdown.
"""

from __future__ import annotations

import asyncio

from fastapi import Request

from server.errors import ApiError

BODY_TIMEOUT = 30.0
"""Seconds for a body to arrive. A request holds its place in the house meanwhile."""


class Bodies:
    """The bodies that are being read."""

    def __init__(self) -> None:
        self._deadlines: set[asyncio.Timeout] = set()
        self._draining = False

    def drain(self) -> None:
        """Give up on those that have not arrived, and take no more."""
        self._draining = True
        for deadline in self._deadlines:
            deadline.reschedule(asyncio.get_running_loop().time())

    async def read(self, request: Request, limit: int) -> bytes:
        """The body, of at most `limit` bytes. Raises ApiError, or ClientDisconnect."""
        body = bytearray()
        deadline = asyncio.timeout(0 if self._draining else BODY_TIMEOUT)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise ApiError(413, f"The request's body is larger than {limit} bytes.", "request_too_large")
        except TimeoutError:
            raise self._too_late() from None
        finally:
            self._deadlines.discard(deadline)
        return bytes(body)

    def _too_late(self) -> ApiError:
        # What is still to come of the body has no reader: the connection ends with the answer.
        close = {"Connection": "close"}
        if self._draining:
            return ApiError(503, "The server is shutting down.", "draining", headers=close)
        message = f"The request's body did not arrive within {BODY_TIMEOUT:g} seconds."
        return ApiError(408, message, "request_timeout", headers=close)
