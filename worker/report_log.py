"""What a worker has to tell, kept until the daemon has it: a bounded log with indexed reads.

Any thread appends. One reader polls with the first index it has not seen, which acknowledges everything before it;
what is not acknowledged stays, so a repeated poll gets the same reports again and none is lost or doubled.

The log is bounded: when `limit` reports are unacknowledged, `append` waits. So a daemon that stops polling stops its
workers' engines, a few thousand tokens later, instead of growing their memory; once it polls again they go on with
nothing lost. Polling takes no lock that an appending thread holds while it waits, so the wait ends with the next
acknowledgement, or when the log is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

from swapper.errors import WorkerError
from worker.protocol import Report

LIMIT = 16_384
"""Unacknowledged reports at which appending waits: seconds of tokens of a full batch, a few megabytes."""

BATCH = 512
"""Reports of one answer: small enough to travel inside Ray's reply instead of through its object store."""


class ReportLog:
    def __init__(self, limit: int = LIMIT, batch: int = BATCH) -> None:
        self._limit = limit
        self._batch = batch
        self._first = 0  # index of the oldest report kept
        self._reports: deque[Report] = deque()
        self._closed = False
        self._failure: str | None = None
        lock = threading.Lock()
        self._filled = threading.Condition(lock)  # there is something to read, or the log ended
        self._drained = threading.Condition(lock)  # there is room, or the log ended

    def append(self, reports: Sequence[Report]) -> None:
        """Add reports, all together and in order. Waits while the log is full; drops them once it is closed."""
        with self._drained:
            self._drained.wait_for(lambda: len(self._reports) < self._limit or self._ended)
            if not self._ended:
                self._reports.extend(reports)
                self._filled.notify_all()

    def read(self, cursor: int, timeout: float) -> tuple[Report, ...]:
        """Reports from index `cursor` on; acknowledges those before it.

        Waits up to `timeout` seconds for the first one. Raises WorkerError when the worker has failed, and ValueError
        for a cursor that was acknowledged before or was never reached.
        """
        with self._filled:
            if not self._first <= cursor <= self._first + len(self._reports):
                raise ValueError(
                    f"cursor {cursor} is not in [{self._first}, {self._first + len(self._reports)}]: "
                    "the reader and this log have lost each other"
                )
            for _ in range(cursor - self._first):
                self._reports.popleft()
            self._first = cursor
            self._drained.notify_all()
            self._filled.wait_for(lambda: bool(self._reports) or self._ended, timeout)
            if self._failure is not None:
                raise WorkerError(self._failure)
            return tuple(islice(self._reports, self._batch))

    def fail(self, message: str) -> None:
        """The worker cannot go on: every read from now on raises WorkerError with this message."""
        with self._filled:
            self._failure = self._failure or message
            self._wake()

    def close(self) -> None:
        """Nothing more will be told: waiting readers and writers return."""
        with self._filled:
            self._closed = True
            self._wake()

    @property
    def _ended(self) -> bool:
        return self._closed or self._failure is not None

    def _wake(self) -> None:
        self._filled.notify_all()
        self._drained.notify_all()
