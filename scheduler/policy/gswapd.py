"""Ours: the most waiting requests a second of link time first, the pages that will be missed least.

- Each extent is a new decision; what has arrived stays. Who comes first is who has most requests waiting for each second that it
  takes to bring it in and run it; who has waited past its bound comes before all others.
- Pages are taken from whom no request waits for, least value first (`history.py`). A model that is worth keeping goes
  only when those who wait have together waited for longer than its return would cost.
- A complete model with requests waiting is never taken, except for one past its bound.
- An idle link brings in the model that is expected soonest, if it is worth more than what goes for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy.base import Policy
from scheduler.policy.view import Holder, Want

PATIENCE = 2.4
"""A next use that is so many loads away counts for 1/e of one that is now."""

SHORTEST_PATIENCE = 0.05

STAY = 2.0
"""How much more another must be wanted for the link to turn to it in the middle of a page-in."""

RETURN_WEIGHT = 1.0
"""Seconds that must have been waited for each second of an expected reload."""

PREFETCH_HORIZON = 1.5
"""Loads. What is expected later is not brought in ahead."""

PREFETCH_MARGIN = 0.15


class Gswapd(Policy):
    keeps_to_it = False

    def order(self, wants: Sequence[Want], now: float) -> list[Want]:
        if len(wants) == 1:
            return list(wants)
        return sorted(wants, key=lambda want: self._rank(want, now))

    def victims(self, want: Want, holders: Sequence[Holder], now: float) -> list[Holder]:
        overdue = now >= want.due
        chosen = []
        for holder in holders:
            if holder.is_wanted and holder.is_whole and not overdue:
                continue
            value = self._value(holder, now)
            if not overdue and not holder.is_wanted and want.waited < RETURN_WEIGHT * value * holder.load:
                continue
            chosen.append((holder.is_wanted, value * 2.0**holder.priority, holder.used, holder.number, holder))
        chosen.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in chosen]

    def worth_at(self, want: Want, holders: Sequence[Holder], now: float) -> float | None:
        costs = [RETURN_WEIGHT * self._value(holder, now) * holder.load for holder in holders if not holder.is_wanted]
        later = [cost for cost in costs if cost > want.waited]
        return now + (min(later) - want.waited) / want.queue if later else None

    def _rank(self, want: Want, now: float) -> tuple[float, ...]:
        if now >= want.due:
            return 0, want.due, want.number
        urgent = want.slack is not None and 0 <= want.slack <= want.load + want.run
        if urgent:
            return 1, -want.priority, want.slack or 0.0, want.number
        stay = STAY if want.is_next else 1.0
        return 2, -want.priority, -stay * want.queue / (want.load + want.run + 1e-6), want.number

    def _value(self, holder: Holder, now: float) -> float:
        if holder.is_wanted:
            return 1.0
        if holder.history is None:
            return 0.0
        value = holder.history.value(now, max(SHORTEST_PATIENCE, PATIENCE * holder.load))
        return value / 2 if holder.is_copy else value
