"""The one queue into a shard's thread: the daemon's commands and the ends of what the shard started itself.

Commands are bounded: a poster waits while `limit` items lie here. Completions never wait, because the shard may be
waiting for the very thread that brings one; there are no more of them than page-ins and binds under way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

LIMIT = 4096

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._items: deque[Item] = deque()
        self._closed = False
        self._busy = False
        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._drained = threading.Condition(lock)

    def post(self, items: Sequence[Item]) -> None:
        """Add the daemon's commands, in order; waits for room. Dropped once the inbox is closed."""
        with self._drained:
            self._drained.wait_for(lambda: len(self._items) < self._limit or self._closed)
            self._put(items)

    def complete(self, item: Item) -> None:
        """Add the end of something; never waits."""
        with self._filled:
            self._put([item])

    def take(self) -> Item | None:
        """The next item, once there is one; None when the inbox is closed. What was taken before is done with."""
        with self._filled:
            self._busy = False
            self._filled.wait_for(lambda: bool(self._items) or self._closed)
            if self._closed:
                return None
            self._busy = True
            self._drained.notify_all()
            return self._items.popleft()

    @property
    def busy(self) -> bool:
        """Whether something lies here or is being worked on."""
        return self._busy or bool(self._items)

    def close(self) -> None:
        """Drop everything and let everyone who waits return."""
        with self._filled:
            self._closed = True
            self._items.clear()
            self._filled.notify_all()
            self._drained.notify_all()

    def _put(self, items: Sequence[Item]) -> None:
        if not self._closed:
            self._items.extend(items)
            self._filled.notify()
