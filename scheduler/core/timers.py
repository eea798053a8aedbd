"""When to look again: a heap of times, each with what to look at then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from mypy_extensions import mypyc_attr

SLACK: Final = 64
"""Timers that may be out of date before the heap is swept, beside as many as there are true ones."""


Timer = tuple[float, int, str, str]
"""When, its place in the order in which they were set, what kind it is, and whom it is for."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Timers:
    """Each may be out of date by the time it comes; `is_true` tells, and out of date ones never wake anybody."""

    def __init__(self, is_true: Callable[[Timer], bool]) -> None:
        self._is_true = is_true
        self._heap: list[Timer] = []
        self._number = 0
        self._sweep_at = SLACK
        self.earliest = inf  # none that is true comes before

    def set(self, at: float, kind: str, name: str) -> None:
        self._number += 1
        heappush(self._heap, (at, self._number, kind, name))
        if len(self._heap) > self._sweep_at:
            self._heap = [timer for timer in self._heap if self._is_true(timer)]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + SLACK
        self._note_earliest()

    def due(self, now: float) -> Iterator[Timer]:
        """Those whose time has come, each once."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            timer = heappop(heap)
            if self._is_true(timer):
                yield timer
            heap = self._heap
        self._note_earliest()

    def next(self) -> float | None:
        while self._heap and not self._is_true(self._heap[0]):
            heappop(self._heap)
        self._note_earliest()
        return self._heap[0][0] if self._heap else None

    def _note_earliest(self) -> None:
        self.earliest = self._heap[0][0] if self._heap else inf
