"""How soon a model may be used again, told from the gaps between its requests.

The value of keeping a model's pages is the mean of exp(−time until its next request / patience), taken over those of
its last gaps that are longer than the time since its last request: the next request has not come yet, so it comes
after one of those. A model that is asked for regularly is worth little right after a request and more and more
towards the next one; one that comes in bursts is worth most right after one; one that was seen once (a scan) is worth
next to nothing."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from math import exp, log2

from mypy_extensions import mypyc_attr

GAPS = 60
"""Gaps that are remembered: enough to tell regular from bursty, few enough to follow a change."""

DOUBT = 2.0
"""Gaps that are guessed beside those that are remembered, so that the last few of them are not believed too much.

The guess falls with the time since the last request, so that of models of which little is known, the least recently
used is worth least. """

BELIEVED = 8
"""Gaps that must still be possible for a next use to be told from them."""


@mypyc_attr(allow_interpreted_subclasses=True)
class History:
    """The requests of one model, as far as policy needs them."""

    __slots__ = ("_gaps", "_since", "_sorted", "_tails", "last")

    def __init__(self) -> None:
        self._since = 0.0  # the request before the first gap that is remembered
        self.last: float | None = None
        self._gaps: deque[float] = deque()
        self._sorted: list[float] = []
        self._tails: dict[float, list[float]] = {}  # patience → sums of exp(−gap / patience), from each gap on

    def arrived(self, now: float) -> None:
        if self.last is None:
            self._since = now
        else:
            gap = now - self.last
            self._gaps.append(gap)
            insort(self._sorted, gap)
            if len(self._gaps) > GAPS:
                oldest = self._gaps.popleft()
                self._since += oldest
                del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._tails = {}
        self.last = now

    def value(self, now: float, patience: float) -> float:
        """Between 0 (will not be missed) and 1 (is wanted now)."""
        if self.last is None:
            return 0.0
        elapsed = now - self.last
        patience = 2.0 ** (round(4.0 * log2(patience)) / 4.0)  # measured times vary; few sums are kept
        known = len(self._sorted)
        begin = bisect_right(self._sorted, elapsed)
        guess = known / (known + DOUBT) / (1.0 + elapsed / patience)
        if begin == known:
            return guess
        tails = self._tails.get(patience)
        if tails is None:
            tails, total = [0.0] * known, 0.0
            for index in range(known - 1, -1, -1):
                total += exp(-self._sorted[index] / patience)
                tails[index] = total
            self._tails[patience] = tails
        loads = elapsed / patience
        seen = exp(loads if loads < 50.0 else 50.0) * tails[begin]
        value = (seen + DOUBT * guess) / (known - begin + DOUBT)
        return value if value < 1.0 else 1.0

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
        return len(self._gaps) / max(1e-6, now - self._since) if self._gaps else 0.0
