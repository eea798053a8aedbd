"""What the status page lives on: the state of things and what happened, as server-sent events.

    event: state    the whole state, once, at the beginning of a stream
    event: change   what changed in it since, as a JSON merge patch (null: it is gone)
    event: swap     a load or a page-out that ended; event: suspension; event: worker, a restart. These have an id.

A client that comes back says the last id it has seen (`Last-Event-ID`) and gets what it missed, as far as it is
remembered. Everything is bounded: the memory of what happened, the clients, and what waits for each of them. A client
that is too slow is dropped; it comes back when it can. The state is looked at only while somebody watches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any
from uuid import uuid4

import orjson

from scheduler.interface import LoadRecord
from server.errors import ApiError

REMEMBERED = 256  # things that happened
MAX_CLIENTS = 64
MAX_BEHIND = 128  # events that wait for one client
LOOK_INTERVAL = 0.25  # seconds
MAX_DIGITS = 18  # of an id
COMMENT_INTERVAL = 15.0  # seconds of silence after which a comment keeps proxies from closing a stream

logger = logging.getLogger(__name__)

State = Mapping[str, Mapping[str, Any]]


class _Client:
    def __init__(self) -> None:
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue(MAX_BEHIND)
        self.dropped = asyncio.Event()

    def send(self, event: bytes) -> None:
        try:
            self.waiting.put_nowait(event)
        except asyncio.QueueFull:
            self.dropped.set()

    async def next(self) -> bytes | None:
        """None when it was dropped."""
        getting = asyncio.ensure_future(self.waiting.get())
        dropped = asyncio.ensure_future(self.dropped.wait())
        try:
            await asyncio.wait((getting, dropped), timeout=COMMENT_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            if self.dropped.is_set():
                return None
            return getting.result() if getting.done() else b": still here\n\n"
        finally:
            for task in (getting, dropped):
                task.cancel()


class Events:
    """Implements `scheduler.interface.Observer`. Belongs to the event loop."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._run = uuid4().hex[:8]  # ids of another daemon mean nothing here
        self._count = 0
        self._happened: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)
        self._clients: set[_Client] = set()
        self._state: State = {}
        self._looking: asyncio.Task[None] | None = None

    # ---- who watches

    async def stream(self, look: Callable[[], State], last_id: str = "") -> AsyncGenerator[bytes]:
        """The events for one client, from now on and what it missed. Raises ApiError where too many watch already."""
        if len(self._clients) >= MAX_CLIENTS:
            raise ApiError(503, f"{MAX_CLIENTS} clients watch already.", "too_many_watchers")
        client = _Client()
        if self._looking is None:
            self._state = look()
            self._looking = asyncio.create_task(self._watch(look), name="events")
            self._looking.add_done_callback(self._ended)
        self._clients.add(client)
        try:
            missed = b"".join(event for number, event in self._happened if number > self._number(last_id))
            yield _event("state", self._state) + missed
            while (event := await client.next()) is not None:
                yield event
        finally:
            self._clients.discard(client)
            if not self._clients:
                await self.close()

    async def close(self) -> None:
        """End every stream."""
        self._drop_all()
        if self._looking is not None:
            looking, self._looking = self._looking, None
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def _watch(self, look: Callable[[], State]) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            before, self._state = self._state, look()
            if patch := _patch(before, self._state):
                self._send(_event("change", patch))

    def _ended(self, looking: asyncio.Task[None]) -> None:
        """It ends when nobody watches, or by a defect, of which whoever watches must not hear mere silence."""
        if not looking.cancelled():
            logger.error("The state could not be looked at", exc_info=looking.exception())
            self._looking = None
            self._drop_all()

    def _drop_all(self) -> None:
        for client in self._clients:
            client.dropped.set()

    def _number(self, last_id: str) -> int:
        run, _, number = last_id.partition("-")
        return int(number) if run == self._run and number.isdecimal() and len(number) <= MAX_DIGITS else 0

    # ---- what happens

    def loaded(self, record: LoadRecord) -> None:
        sources = {name: part.nbytes for name, part in record.sources.items()}
        self._swap("in", record.model, record.at, record.seconds, record.pages, group=record.group, sources=sources,
                   stages=dict(record.stages), error=record.error)  # fmt: skip

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        self._swap("out", model, self._wall() - seconds, seconds, pages, reason=reason, idle=age)

    def suspended(self, model: str, kept_bytes: int, lost_tokens: int, seconds: float) -> None:
        data = {"model": model, "at": self._wall(), "seconds": seconds, "kept": kept_bytes, "lost": lost_tokens}
        self._happen("suspension", data)

    def request_started(self, model: str, waited: float, cold: bool) -> None:
        """Too many to show; the state has their counts."""

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        """Likewise."""

    def worker_restarted(self, group: str) -> None:
        self._happen("worker", {"group": group, "at": self._wall(), "what": "restarted"})

    def _swap(self, way: str, model: str, at: float, seconds: float, pages: int, **more: Any) -> None:
        self._happen("swap", {"way": way, "model": model, "at": at, "seconds": seconds, "pages": pages, **more})

    def _happen(self, kind: str, data: Mapping[str, Any]) -> None:
        self._count += 1
        event = b"id: %b-%d\n" % (self._run.encode(), self._count) + _event(kind, data)
        self._happened.append((self._count, event))
        self._send(event)

    def _send(self, event: bytes) -> None:
        for client in self._clients:
            client.send(event)


def _event(kind: str, data: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(data))


def _patch(before: State, now: State) -> dict[str, dict[str, Any]]:
    """What makes `now` of `before`: entries that changed, whole, and null for those that went."""
    patch = {}
    for section in now:
        was, is_ = before.get(section, {}), now[section]
        entries = {key: value for key, value in is_.items() if was.get(key) != value}
        entries |= dict.fromkeys(was.keys() - is_.keys())
        if entries:
            patch[section] = entries
    return patch
