"""The live driver's clock hand: it rings when the core asked to be woken, and at least once a period.

The regular ring is the scheduler's own heartbeat: `/readyz` tells by it whether the loop turns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """One timer for any number of wishes: the earliest counts, later ones are asked for again by whoever has them."""

    def __init__(self, clock: Callable[[], float], ring: Callable[[], None], period: float) -> None:
        self._clock = clock
        self._ring = ring
        self._period = period
        self._wake = math.inf
        self._beat = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._beat = self._clock() + self._period
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake_at(self, at: float) -> None:
        if at < self._wake:
            self._wake = at
            if at < self._beat:
                self._arm()

    def _arm(self) -> None:
        self.stop()
        # The loop keeps a time of its own: only differences carry over from an injected clock.
        delay = min(self._wake, self._beat) - self._clock()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._fire)

    def _fire(self) -> None:
        now = self._clock()
        due = now >= min(self._wake, self._beat)  # a loop may fire a clock tick early
        if now >= self._wake:
            self._wake = math.inf
        if due:
            self._beat = now + self._period
        self._arm()
        if due:
            self._ring()
