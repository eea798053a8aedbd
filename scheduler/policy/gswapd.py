"""Ours: the most waiting requests a second of link time first, the pages that will be missed least.

- Each extent is a new decision; what has arrived stays. Who comes first is who has most requests waiting, and longest,
  for each second that it takes to bring it in and run it; who has waited past its bound comes before all others.
- Pages are taken from whom no request waits for, least value first (`history.py`). A model that is worth keeping goes
  only when those who wait have together waited for longer than its return would cost, and not while it would cost less
  to wait for one that is about to end what it runs.
- A complete model with requests waiting is never taken, except for one past its bound.
- An idle link brings in the model that is expected soonest, if it is worth more than what goes for it.

Times are counted in loads: what a reload costs is what all of this is about.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy.base import Policy
from scheduler.policy.view import Holder, Prefetch, Rank, Want

PATIENCE = 2.0
"""Loads. A next use that is so far away counts for 1/e of one that is now."""

COST_PATIENCE = 0.5
"""Loads. The same, for whether a reload would be waited for: what is needed later can be brought in ahead."""

MEANWHILE = 0.35
"""Of its load, that each who comes during a reload waits for: less than half, as they are answered as one batch."""

SHORTEST_PATIENCE = 0.05
"""Seconds."""

STAY = 1.5
"""How much more another must be wanted for the link to turn to it in the middle of a page-in."""

AGEING = 0.4
"""Seconds that, waited all together, count as one more who waits; else who is alone and takes long waits for all."""

INSTANT = 0.005
"""Seconds that make no difference. Nothing is asked again sooner: costs rise while they are waited for, and looks that
come ever closer to each other would end at a moment that is not later than the one before."""

PREFETCH_HORIZON = 1.5
"""Loads. What is expected later is not brought in ahead."""

PREFETCH_MARGIN = 0.35
"""Of value, by which what comes in ahead must exceed what goes for it."""


class Gswapd(Policy):
    keeps_to_it = False
    due_first = True

    def rank(self, want: Want, now: float) -> Rank:
        if now >= want.due:
            return Rank((0,), want.due)
        until, cost = want.due, want.load + want.run
        if want.best_by is not None and now < want.best_by:
            if now >= want.best_by - cost:
                return Rank((1, -want.priority), want.best_by, until=min(until, want.best_by))
            until = min(until, want.best_by - cost)
        # Urgency is how many wait, and how long, a second of what it takes; it grows as they wait.
        share = (STAY if want.is_next else 1.0) / (cost + INSTANT)
        base = share * (want.arrived / AGEING - want.queue)
        return Rank((2, -want.priority), base, -share * want.waiting / AGEING, until)

    def victims(self, want: Want, holders: Sequence[Holder], now: float, busy: Sequence[Holder] = ()) -> list[Holder]:
        if now < want.due:
            instead = [self._return_cost(other, want, now) + want.waiting * other.run for other in busy]
            most = min([want.waited(now), *instead])
            holders = [h for h in holders if (h.missing if h.is_wanted else self._return_cost(h, want, now) <= most)]
        if len(holders) < 2:
            return list(holders)
        return sorted(holders, key=lambda holder: (holder.is_wanted, *self._order_to_go(holder, now)))

    def worth_at(self, want: Want, holders: Sequence[Holder], now: float) -> float | None:
        costs = [self._return_cost(holder, want, now) for holder in holders if not holder.is_wanted]
        waited = want.waited(now)
        later = [cost for cost in costs if cost > waited]
        return now + max(INSTANT, (min(later) - waited) / want.queue) if later else None

    def prefetch(self, candidates: Sequence[Holder], holders: Sequence[Holder], now: float) -> Prefetch | None:
        soon, ask_at = [], []
        for candidate in candidates:
            expected = candidate.history.next_use(now) if candidate.history is not None else None
            if expected is None:
                continue
            begin = expected - PREFETCH_HORIZON * candidate.load
            if begin <= now:
                soon.append(candidate)
            ask_at.append(max(begin, now + candidate.load / 2))
        if not soon:
            return Prefetch(None, (), min(ask_at, default=None))
        best = max(soon, key=lambda candidate: self._worth(candidate, now))
        enough = self._worth(best, now) - PREFETCH_MARGIN
        victims = [h for h in holders if h.model != best.model and not h.is_wanted and self._worth(h, now) < enough]
        return Prefetch(best.model, sorted(victims, key=lambda h: self._order_to_go(h, now)), min(ask_at))

    def _order_to_go(self, holder: Holder, now: float) -> tuple[float, float, int]:
        return self._worth(holder, now), holder.used, holder.number

    def _worth(self, holder: Holder, now: float) -> float:
        """Of keeping it: its value, more for what goes first, and half for a copy."""
        if holder.is_wanted:
            return 1.0
        if holder.history is None:
            return 0.0
        value = holder.history.value(now, max(SHORTEST_PATIENCE, PATIENCE * holder.load))
        return value * 2.0**holder.priority / (2 if holder.is_copy else 1)

    def _return_cost(self, holder: Holder, want: Want, now: float) -> float:
        """Seconds that will be waited for it if it goes for `want`: for its load, and by those who come meanwhile for
        that and for the loads of those who wait for the link already."""
        history = holder.history
        if history is None:
            return 0.0
        value = history.value(now, max(SHORTEST_PATIENCE, COST_PATIENCE * holder.load))
        return value * holder.load * (1.0 + holder.load * history.rate(now) * (MEANWHILE + want.rivals))
