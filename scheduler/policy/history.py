"""How soon a model may be used again, told from the gaps between its requests.

The value of keeping a model's pages is the mean of exp(−time until its next request / patience), taken over those of
its last gaps that are longer than the time since its last request: the next request has not come yet, so it comes
after one of those. A model that is asked for regularly is worth little right after a request and more and more
towards the next one; one that comes in bursts is worth most right after one; one that was seen once (a scan) is worth
next to nothing."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from math import exp

GAPS = 60
"""Gaps that are remembered: enough to tell regular from bursty, few enough to follow a change."""

BELIEVED = 8
PRIOR = 1.0
DOUBT = 3.0
"""Gaps that are taken to be endless beside those that are remembered, so that a few of them are not believed."""


class History:
    """The requests of one model, as far as policy needs them."""

    __slots__ = ("_gaps", "_sorted", "_tails", "first", "last")

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._gaps: deque[float] = deque()
        self._sorted: list[float] = []
        self._tails: dict[float, list[float]] = {}  # patience, sums of exp(−gap / patience) from each gap on

    def arrived(self, now: float) -> None:
        if self.last is None:
            self.first = now
        else:
            gap = now - self.last
            self._gaps.append(gap)
            insort(self._sorted, gap)
            if len(self._gaps) > GAPS:
                del self._sorted[bisect_right(self._sorted, self._gaps.popleft()) - 1]
            self._tails = {}
        self.last = now

    def value(self, now: float, patience: float) -> float:
        """Between 0 (will not be missed) and 1 (is wanted now)."""
        if self.last is None:
            return 0.0
        elapsed = now - self.last
        begin = bisect_right(self._sorted, elapsed)
        count = len(self._sorted) - begin
        seen = len(self._sorted)
        prior = DOUBT * PRIOR / (1.0 + elapsed / patience) * seen / (seen + DOUBT)
        if count == 0:
            return prior / DOUBT
        tails = self._tails.get(patience)
        if tails is None:
            sums, total = [0.0] * len(self._sorted), 0.0
            for index in range(len(self._sorted) - 1, -1, -1):
                total += exp(-self._sorted[index] / patience)
                sums[index] = total
            tails = self._tails[patience] = sums
        return min(1.0, (exp(min(50.0, elapsed / patience)) * tails[begin] + prior) / (count + DOUBT))

    def next_use(self, now: float) -> float | None:
        """When the next request may come: at the median of the gaps that are still possible. None: cannot be told."""
        if self.last is None:
            return None
        begin = bisect_right(self._sorted, now - self.last)
        if len(self._sorted) - begin < BELIEVED:
            return None
        return self.last + self._sorted[(begin + len(self._sorted)) // 2]

    def rate(self, now: float) -> float:
        """Requests a second, lately."""
        if not self._gaps or self.last is None:
            return 0.0
        return len(self._gaps) / max(1e-6, sum(self._gaps) + now - self.last)
