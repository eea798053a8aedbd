"""Whose forward pass runs: one turn at the processor, handed from model to model in the order they asked.

A plain lock lets whoever runs take it again before a waiter has woken, so that one busy model could keep the others
out. Here the holder hands the turn to the longest waiter: of two busy models each gets every other pass.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turn:
    """A first-come, first-served lock. How long it is held is for the holder to bound: one forward pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()  # one locked lock a waiter; unlocking it hands the turn over

    @property
    def held(self) -> bool:
        return self._held

    def acquire(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def release(self) -> None:
        """Hand the turn to the longest waiter. Raises RuntimeError if nobody holds it."""
        with self._lock:
            if not self._held:
                raise RuntimeError("The turn was released, but nobody holds it.")
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def __enter__(self) -> Turn:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
