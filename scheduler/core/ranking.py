"""Who comes first among many whose claims grow while they wait: a kinetic tournament.

A demand's rank is a line in time (`policy.view.Rank`). Two lines cross at most once, so of two neighbours it is known
until when the first stays first; a tree of such matches knows it of all. A change plays one match a level anew, and
as time passes only those are played whose lines have crossed: the cost grows with the logarithm of how many wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from mypy_extensions import mypyc_attr

from scheduler.policy.view import Rank, Want


@dataclass(slots=True, eq=False)
class Demand:
    """A model that is wanted on a group, and where it stands among the others."""

    want: Want
    rank: Rank
    leaf: int = 0  # its place in the tree; 0: it has none
    again_at: float = inf  # when to look whether time has changed its rank
    load: int = 0  # nanoseconds of the link that it counts for, in sums that have to come out exactly

    def key(self, now: float) -> tuple[tuple[int, ...], float, int]:
        rank = self.rank
        return rank.tier, rank.base + rank.slope * now, self.want.number


@mypyc_attr(allow_interpreted_subclasses=True)
class Ranking:
    """Node `i` is above nodes `2i` and `2i + 1`; demands are at the leaves."""

    def __init__(self) -> None:
        self._leaves = 1
        self._first: list[Demand | None] = [None, None]  # node → who comes first below it
        self._until: list[float] = [inf, inf]  # node → when that may change
        self._free = [1]  # leaves without a demand

    def put(self, demand: Demand, now: float) -> None:
        """Enter a demand, or look anew at one whose rank has changed."""
        if not demand.leaf:
            if not self._free:
                self._grow(now)
            demand.leaf = self._free.pop()
            self._first[demand.leaf] = demand
        self._climb(demand.leaf, now)

    def remove(self, demand: Demand, now: float) -> None:
        if demand.leaf:
            self._first[demand.leaf] = None
            self._free.append(demand.leaf)
            self._climb(demand.leaf, now)
            demand.leaf = 0

    def ordered(self, now: float) -> Iterator[Demand]:
        """The first, then the next, as far as somebody asks. Nothing may be entered or removed meanwhile."""
        first = self._first
        if self._until[1] <= now:
            self._advance(1, now)
        top = first[1]
        heap = [(top.key(now), 1)] if top is not None else []
        while heap:
            _, node = heappop(heap)
            winner = first[node]
            assert winner is not None
            yield winner
            while node < self._leaves:
                node *= 2
                beaten = node + 1
                if first[node] is not winner:
                    node, beaten = beaten, node
                other = first[beaten]
                if other is not None:
                    heappush(heap, (other.key(now), beaten))

    def _climb(self, leaf: int, now: float) -> None:
        node = leaf // 2
        while node:
            self._play(node, now)
            node //= 2

    def _advance(self, node: int, now: float) -> None:
        """Play what may have come out otherwise since."""
        if self._until[node] <= now:
            self._advance(2 * node, now)
            self._advance(2 * node + 1, now)
            self._play(node, now)

    def _play(self, node: int, now: float) -> None:
        left, right = self._first[2 * node], self._first[2 * node + 1]
        until, other = self._until[2 * node], self._until[2 * node + 1]
        if other < until:
            until = other
        if left is None or right is None:
            self._first[node] = left or right
        else:
            winner, loser = (left, right) if left.key(now) < right.key(now) else (right, left)
            self._first[node] = winner
            until = min(until, _crossing(winner.rank, loser.rank))
        self._until[node] = until

    def _grow(self, now: float) -> None:
        demands = self._first[self._leaves :]
        self._leaves *= 2
        self._first = [None] * self._leaves + demands + [None] * len(demands)
        self._until = [inf] * (2 * self._leaves)
        self._free = list(range(2 * self._leaves - 1, self._leaves + len(demands) - 1, -1))
        for leaf, demand in enumerate(demands, self._leaves):
            if demand is not None:
                demand.leaf = leaf
        for node in range(self._leaves - 1, 0, -1):
            self._play(node, now)


def _crossing(winner: Rank, loser: Rank) -> float:
    """When the loser will come first."""
    if winner.tier != loser.tier or loser.slope >= winner.slope:
        return inf
    return (loser.base - winner.base) / (winner.slope - loser.slope)
