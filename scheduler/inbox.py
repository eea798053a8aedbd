"""The live driver's one inbox: events in the order in which they happened, for one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator

from scheduler.core.events import Event


class Inbox:
    """`put` always accepts; whoever brings new work asks `is_full` first. See `scheduler/live.py` for the bound."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._events) >= self._limit

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    async def wait(self) -> None:
        """Return once there is an event to take."""
        await self._news.wait()

    def take_all(self) -> Iterator[Event]:
        """Every event, also those that are put while the earlier ones are handled."""
        while self._events:
            yield self._events.popleft()
        self._news.clear()
