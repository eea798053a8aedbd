"""What a policy is: pure choices over frozen views, and how much of the mechanism it uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from scheduler.policy.view import Holder, Prefetch, Rank, Want


class Policy(ABC):
    """Which model next, whose pages go. The core asks; it never looks inside."""

    keeps_to_it: ClassVar[bool] = True
    """A page-in that began is seen through: all frames are taken first. Otherwise each extent is a new decision."""

    whole: ClassVar[bool] = False
    """Models come and go whole, and run only once they are in, one batch at a time."""

    tick: ClassVar[float] = 0.0
    """Every so many seconds the first is looked at, and nobody else. 0: at every event, all."""

    due_first: ClassVar[bool] = False
    """Who is due comes before all who are not."""

    @abstractmethod
    def rank(self, want: Want, now: float) -> Rank:
        """Its place among others: who is considered first."""

    @abstractmethod
    def victims(self, want: Want, holders: Sequence[Holder], now: float, busy: Sequence[Holder] = ()) -> list[Holder]:
        """Idle models whose pages may be taken for `want`, in order. Those that are `busy` may be idle before long."""

    def worth_at(self, want: Want, holders: Sequence[Holder], now: float) -> float | None:
        """When to ask again for victims that were not given; None: time alone changes nothing."""
        return None

    def prefetch(self, candidates: Sequence[Holder], holders: Sequence[Holder], now: float) -> Prefetch | None:
        """What to bring in though nobody waits for it, when the link is idle. `holders` could give pages for it."""
        return None
