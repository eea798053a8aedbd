"""Least recently used: the oldest request first, the pages of whoever was used longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy.base import Policy
from scheduler.policy.view import Holder, Rank, Want


class Lru(Policy):
    """Tails, streaming start and free page-outs as everywhere; a page-in that began is seen through."""

    def rank(self, want: Want, now: float) -> Rank:
        return Rank((0,), want.number)

    def victims(self, want: Want, holders: Sequence[Holder], now: float, busy: Sequence[Holder] = ()) -> list[Holder]:
        idle = [holder for holder in holders if not holder.is_wanted or now >= want.due]
        return sorted(idle, key=lambda holder: (holder.used, holder.number))
