"""Ours: the most waiting requests a second of link time first, the pages that will be missed least.

- Each extent is a new decision; what has arrived stays. Who comes first is who has most requests waiting for each
  second that it takes to bring it in and run it; who has waited past its bound comes before all others.
- Pages are taken from whom no request waits for, least value first (`history.py`). A model that is worth keeping goes
  only when those who wait have together waited for longer than its return would cost.
- A complete model with requests waiting is never taken, except for one past its bound.
- An idle link brings in the model that is expected soonest, if it is worth more than what goes for it."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy.base import Policy
from scheduler.policy.view import Holder, Prefetch, Want

PATIENCE = 2.4
"""A next use that is so many loads away counts for 1/e of one that is now."""

SHORTEST_PATIENCE = 0.05

STAY = 2.0
"""How much more another must be wanted for the link to turn to it in the middle of a page-in."""

INSTANT = 0.005
"""Seconds that make no difference."""

RETURN_WEIGHT = 1.0
"""Seconds that must have been waited for each second of an expected reload."""

COST_PATIENCE = 0.3
RATE_WEIGHT = 0.5
SPREAD = 0.0
"""How much more the last page of a model is worth than the first that goes."""

PREFETCH_HORIZON = 1.5
"""Loads. What is expected later is not brought in ahead."""

PREFETCH_MARGIN = 0.3


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
            if holder.is_wanted and not holder.missing and not overdue:
                continue
            if not overdue and not holder.is_wanted and want.waited < self._return_cost(holder, now):
                continue
            chosen.append((holder.is_wanted, self._worth(holder, now), holder.used, holder.number, holder))
        chosen.sort(key=lambda entry: entry[:4])
        return [entry[4] for entry in chosen]

    def worth_at(self, want: Want, holders: Sequence[Holder], now: float) -> float | None:
        costs = [self._return_cost(holder, now) for holder in holders if not holder.is_wanted]
        later = [cost for cost in costs if cost > want.waited]
        return now + (min(later) - want.waited) / want.queue if later else None

    def prefetch(self, candidates: Sequence[Holder], holders: Sequence[Holder], now: float) -> Prefetch | None:
        ask_at, best, best_worth = None, None, 0.0
        for candidate in candidates:
            expected = candidate.history.next_use(now) if candidate.history is not None else None
            if expected is None:
                continue
            begin = expected - PREFETCH_HORIZON * candidate.load
            if begin > now:
                ask_at = begin if ask_at is None else min(begin, ask_at)
                continue
            worth = self._worth(candidate, now)
            if worth > best_worth:
                best, best_worth = candidate, worth
            later = now + candidate.load / 2
            ask_at = later if ask_at is None else min(later, ask_at)
        if best is None:
            return Prefetch(None, (), ask_at)
        worths = sorted(
            ((self._worth(h, now), h.used, h.number, h) for h in holders if h.model != best.model and not h.is_wanted),
            key=lambda entry: entry[:3],
        )
        victims = [entry[3] for entry in worths if entry[0] + PREFETCH_MARGIN < best_worth]
        return Prefetch(best.model, victims, ask_at)

    def _rank(self, want: Want, now: float) -> tuple[float, ...]:
        if now >= want.due:
            return 0, want.due, want.number
        urgent = want.slack is not None and 0 <= want.slack <= want.load + want.run
        if urgent:
            return 1, -want.priority, want.slack or 0.0, want.number
        stay = STAY if want.is_next else 1.0
        return 2, -want.priority, -stay * want.queue / (want.load + want.run + INSTANT), want.number

    def _return_cost(self, holder: Holder, now: float) -> float:
        """Seconds that will be waited for it if it goes: for its load, by all who come meanwhile."""
        history = holder.history
        if history is None:
            return 0.0
        value = history.value(now, max(SHORTEST_PATIENCE, COST_PATIENCE * holder.load))
        return RETURN_WEIGHT * value * holder.load * (1.0 + RATE_WEIGHT * holder.load * history.rate(now))

    def _worth(self, holder: Holder, now: float) -> float:
        """Of the next page of it that would go, or come: the more of it is missing, the more will wait for it."""
        return self._value(holder, now) * (1.0 + SPREAD * holder.missing) * 2.0**holder.priority

    def _value(self, holder: Holder, now: float) -> float:
        if holder.is_wanted:
            return 1.0
        if holder.history is None:
            return 0.0
        value = holder.history.value(now, max(SHORTEST_PATIENCE, PATIENCE * holder.load))
        return value / 2 if holder.is_copy else value
