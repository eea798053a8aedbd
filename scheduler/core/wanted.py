"""The models that are wanted on one group: ranked, and looked at anew only where something they depend on changed.

Whoever changes what a want is made of (`wants.py`) says so with `touch`. What time changes of a rank, it changes at a
moment that the rank itself tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Final

from mypy_extensions import mypyc_attr

from scheduler.core.ranking import Demand, Ranking
from scheduler.policy.view import Rank, Want

SLACK: Final = 16
"""Moments that may be out of date before they are swept, beside twice as many as there are demands."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Wanted:
    __slots__ = ("_again", "_demands", "_stale", "again_at", "ahead", "coming", "inside", "sharing", "untold")

    def __init__(self) -> None:
        self._demands: dict[str, Demand | None] = {}  # None: not looked at yet
        self._stale: dict[str, None] = {}
        self._again: list[tuple[float, str]] = []  # heap: when to look whether time has changed a rank
        self.again_at = inf  # the first of these
        self.inside: dict[str, Demand] = {}  # for whom only KV may lack
        self.coming = Ranking()  # all others
        self.ahead = 0  # nanoseconds of the link that the others take, all together
        self.sharing: dict[str, None] = {}  # of models that share pages: what others bring in changes their loads
        self.untold: dict[str, Demand] = {}  # changed, and not considered since

    def __len__(self) -> int:
        return len(self._demands)

    def __contains__(self, name: str) -> bool:
        return name in self._demands

    def __iter__(self) -> Iterator[str]:
        return iter(self._demands)

    @property
    def waiting_for_link(self) -> int:
        """How many are neither in nor coming for good."""
        return len(self._demands) - len(self.inside)

    def load(self, name: str) -> int:
        """Nanoseconds of the link that it counts for in `ahead`."""
        demand = self._demands.get(name)
        return demand.load if demand is not None else 0

    def add(self, name: str) -> None:
        self._demands.setdefault(name, None)
        self._stale[name] = None

    def touch(self, name: str) -> None:
        """Something that its want is made of has changed, if it is wanted here."""
        if name in self._demands:
            self._stale[name] = None

    def touch_sharing(self) -> None:
        self._stale |= self.sharing

    @property
    def only(self) -> Demand | None:
        """The one demand, if there is no other."""
        return next(iter(self._demands.values())) if len(self._demands) == 1 else None

    def stale(self, now: float) -> list[str]:
        """Those to be looked at anew, once."""
        while self.again_at <= now:
            at, name = heappop(self._again)
            self.again_at = self._again[0][0] if self._again else inf
            demand = self._demands.get(name)
            if demand is None or demand.again_at != at:
                continue  # another moment was noted since, or it is another demand
            demand.again_at = inf
            if demand.rank.until <= now:
                self._stale[name] = None
            else:
                self._look_again(demand)
        if not self._stale:
            return []
        names = list(self._stale)
        self._stale.clear()
        return names

    def put(self, name: str, want: Want, rank: Rank, shares: bool, now: float) -> None:
        demand = self._demands[name]
        if demand is None:
            demand = self._demands[name] = Demand(want, rank)
        else:
            self.ahead -= demand.load
            demand.want, demand.rank = want, rank
        if rank.until < demand.again_at:
            self._look_again(demand)
        if want.is_in:
            demand.load = 0
            self.inside[name] = demand
            self.coming.remove(demand, now)
            self.untold.pop(name, None)
            self.sharing.pop(name, None)
            return
        demand.load = round(want.load * 1e9)
        self.ahead += demand.load
        self.inside.pop(name, None)
        self.coming.put(demand, now)
        self.untold[name] = demand
        if shares:
            self.sharing[name] = None

    def pop(self, name: str, now: float) -> None:
        """It is not wanted any more."""
        self._stale.pop(name, None)
        demand = self._demands.pop(name, None)
        if demand is not None:
            demand.again_at = inf
            self.ahead -= demand.load
            self.coming.remove(demand, now)
            for index in (self.inside, self.untold, self.sharing):
                index.pop(name, None)

    def settled(self) -> list[tuple[str, Demand]]:
        """All that nothing has touched since they were looked at."""
        return [(name, demand) for name, demand in self._demands.items() if demand and name not in self._stale]

    def next_change(self) -> float | None:
        """When time may change a rank next. Early at times: moments that are out of date are among them."""
        return self.again_at if self.again_at < inf else None

    def _look_again(self, demand: Demand) -> None:
        """When its rank changes. One that was to change earlier, and does not, is looked at in vain once."""
        demand.again_at = demand.rank.until
        heappush(self._again, (demand.again_at, demand.want.model))
        if len(self._again) > 2 * len(self._demands) + SLACK:
            known = [demand for demand in self._demands.values() if demand is not None and demand.again_at < inf]
            self._again = [(demand.again_at, demand.want.model) for demand in known]
            heapify(self._again)
        self.again_at = self._again[0][0]
