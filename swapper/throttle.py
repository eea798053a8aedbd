"""A bound on what is read from storage a second, so that page-ins leave some of a disk or a network to others.

Reads are begun when they are asked for, by the reader below; their results are held back until as many bytes may have
come. The pager has few reads in flight, so what it does not get it does not ask for either.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from swapper.readers import Reader, ReadResult, ShardFile


class _Held(NamedTuple):
    due: float
    read: Future[ReadResult]
    result: Future[ReadResult]


class ThrottledReader:
    """A `Reader` in front of another one, which it closes."""

    def __init__(self, reader: Reader, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._rate = bytes_per_second
        self._clock = clock
        self._free_at = clock()  # when all that was asked for has come
        self._changed = threading.Condition()  # guards all but the reader
        self._held: deque[_Held] = deque()  # in the order of `due`
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
        self._thread.start()

    def open(self, path: Path) -> _ThrottledFile:
        return _ThrottledFile(self._reader.open(path), self.hold)

    def hold(self, read: Future[ReadResult], nbytes: int) -> Future[ReadResult]:
        """The result of a read, when it may be known."""
        result: Future[ReadResult] = Future()
        with self._changed:
            self._free_at = max(self._free_at, self._clock()) + nbytes / self._rate
            self._held.append(_Held(self._free_at, read, result))
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """What is held back is let go."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        while (held := self._next()) is not None:
            error = held.read.exception()
            if error is not None:
                held.result.set_exception(error)
            else:
                held.result.set_result(held.read.result())

    def _next(self) -> _Held | None:
        """The next read, once it is due; None when there will be no more."""
        with self._changed:
            while True:
                early = self._held[0].due - self._clock() if self._held else None
                if self._held and (self._closing or (early is not None and early <= 0)):
                    return self._held.popleft()
                if self._closing:
                    return None
                self._changed.wait(early)


class _ThrottledFile:
    def __init__(self, file: ShardFile, hold: Callable[[Future[ReadResult], int], Future[ReadResult]]) -> None:
        self._file = file
        self._hold = hold

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        return self._hold(self._file.read(offset, address, nbytes), nbytes)

    def close(self) -> None:
        self._file.close()
