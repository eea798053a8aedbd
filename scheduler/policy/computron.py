"""Computron's policy, as a baseline (arXiv 2306.13835).

Every 10 ms the model with the oldest request is looked at, and no other. If all of it is in and nothing runs, its
requests go. If it is absent, the least recently used model that is idle goes out, whole, and it comes in, whole. If
none can go, or it is still coming in, nothing happens in this tick."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy.base import Policy
from scheduler.policy.view import Holder, Rank, Want


class Computron(Policy):
    whole = True
    tick = 0.01

    def rank(self, want: Want, now: float) -> Rank:
        return Rank((0,), want.number)

    def victims(self, want: Want, holders: Sequence[Holder], now: float, busy: Sequence[Holder] = ()) -> list[Holder]:
        return sorted(holders, key=lambda holder: (holder.used, holder.number))
