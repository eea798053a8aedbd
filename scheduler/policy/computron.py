"""Computron's policy, as a baseline (arXiv 2306.13835).

The model with the oldest request goes first. If it is absent, the least recently used model that is idle goes out,
whole. If none can go, nothing at all is done until the next tick of 10 ms. A model runs once all of it is in."""

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
