"""The staging ring: frames that a neighbour's pages pass through, on their way over this GPU's link to the neighbour's.

Staging is a favour: it goes on only while `is_idle()`, at most `STAGES_AT_ONCE` copies at a time, so that a page-in of
this worker's own has the link to itself after at most that many pages. What waits then is refused.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from swapper.copier import Copier
from swapper.errors import DeviceError
from swapper.frames import FramePool

STAGES_AT_ONCE = 2
"""Enough to keep a link busy: the next copy is queued when one ends."""


@dataclass(frozen=True, slots=True)
class _Order:
    source: int
    nbytes: int
    done: Callable[[int | None], None]


class Staging:
    """Any thread may call. Invariant: a frame of the ring is in `_free`, being copied to, or lent."""

    def __init__(self, ring: FramePool, copier: Copier, is_idle: Callable[[], bool]) -> None:
        """Takes all of the ring's frames. `is_idle` must not wait for anything."""
        self._ring = ring
        self._copier = copier
        self._is_idle = is_idle
        self._region = ring.reserve(ring.frames * ring.page_bytes)
        frames = [ring.take() for _ in range(ring.frames)]
        ring.map(self._region, 0, *frames)
        self._frames = {frame.index: frame for frame in frames}
        self._addresses = {
            frame.index: self._region.address + page * ring.page_bytes for page, frame in enumerate(frames)
        }
        self._lock = threading.Lock()
        self._free = [frame.index for frame in frames]
        self._waiting: deque[_Order] = deque()
        self._under_way = 0

    def stage(self, source: int, nbytes: int, done: Callable[[int | None], None]) -> None:
        """Copy from pinned memory, and tell which frame has the bytes; it is lent until `give_back`. None: refused."""
        order = _Order(source, nbytes, done)
        with self._lock:
            refused = len(self._waiting) >= self._ring.frames
            if not refused:
                self._waiting.append(order)
        if refused:
            done(None)
        self._go_on()

    def give_back(self, frame: int) -> None:
        with self._lock:
            self._free.append(frame)
        self._go_on()

    def close(self) -> None:
        """Nothing is under way or lent any more."""
        self._ring.unmap(self._region, 0, self._ring.frames)
        self._ring.unreserve(self._region)
        for frame in self._frames.values():
            self._ring.release(frame)

    def _go_on(self) -> None:
        while (order := self._next()) is not None:
            self._start(*order)

    def _next(self) -> tuple[_Order, int | None] | None:
        """The order to start now, and the frame it gets. None for a frame: it is refused."""
        with self._lock:
            if not self._waiting:
                return None
            if not self._is_idle():
                return self._waiting.popleft(), None
            if self._under_way == STAGES_AT_ONCE or not self._free:
                return None
            self._under_way += 1
            return self._waiting.popleft(), self._free.pop()

    def _start(self, order: _Order, frame: int | None) -> None:
        if frame is None:
            order.done(None)
            return
        try:
            copy = self._copier.put(order.source, self._addresses[frame], order.nbytes)
        except DeviceError as error:
            copy = Future()
            copy.set_exception(error)
        copy.add_done_callback(partial(self._staged, order, frame))

    def _staged(self, order: _Order, frame: int, copy: Future[float]) -> None:
        failed = copy.exception() is not None
        with self._lock:
            self._under_way -= 1
            if failed:
                self._free.append(frame)
        order.done(None if failed else frame)
        self._go_on()
