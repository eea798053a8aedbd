"""The clients' side of `bench.http`: 200 connections, each with one streaming answer after another, as a process.

    python -m bench.http_client HOST:PORT SECONDS TOKENS FILE

It does as little as can be done for a token: it takes the time of a read and counts the tokens in it. At the end it
writes to FILE when each token came of each answer that was complete, and from when until when all clients were at it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import sys
import time
from pathlib import Path
from typing import cast

import uvloop

STREAMS = 200
TOKEN = b'"text":" word"'
IDENTITY = re.compile(rb'"id":"(cmpl-[^"]+)"')
END = b"\r\n0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection. The next answer is asked for when the last one is complete."""

    def __init__(self, address: str, tokens: int, came: dict[str, list[float]], until: float) -> None:
        self._address = address
        self._tokens = tokens
        self._came = came
        self._until = until
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._identity = ""
        self._times: list[float] = []
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by type
        self._ask()

    def _ask(self) -> None:
        """For an answer about so long: as answers are of different lengths, they do not all end at once."""
        tokens = random.randint(self._tokens // 2, self._tokens * 3 // 2)
        body = json.dumps(
            {"model": "stub", "prompt": "Once upon a time", "max_tokens": tokens, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._identity and (found := IDENTITY.search(data)):
            self._identity = found[1].decode()
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.connection_lost(ConnectionError(data.decode()))
        self._times += [now] * data.count(TOKEN)
        self._rest = (self._rest + data)[-len(END) :]
        if self._rest == END:
            self._came[self._identity] = self._times
            self._identity, self._times, self._rest = "", [], b""
            if now < self._until:
                self._ask()
            else:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)


async def main(address: str, seconds: float, tokens: int) -> tuple[dict[str, list[float]], list[float]]:
    """When each answer's tokens came; and from when until when all clients were at it."""
    host, _, port = address.partition(":")
    came: dict[str, list[float]] = {}
    until = time.monotonic() + seconds
    loop, clients = asyncio.get_running_loop(), []
    for _ in range(STREAMS):  # not all at once, so that answers do not all end at once
        _, client = await loop.create_connection(lambda: Client(address, tokens, came, until), host, int(port))
        clients.append(client)
        await asyncio.sleep(random.uniform(0, 2 * min(5.0, seconds / 4) / STREAMS))
    began = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), 4 * seconds + 60)
    return came, [began, until]


if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answers, whole = uvloop.run(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
    spent = resource.getrusage(resource.RUSAGE_SELF)
    Path(sys.argv[4]).write_text(json.dumps({"came": answers, "whole": whole, "cpu": spent.ru_utime + spent.ru_stime}))
