"""One model on one group: which of its pages are in, asked for, and reserved; its KV; what runs there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from mypy_extensions import mypyc_attr

from scheduler.core.kv import KvAccount
from scheduler.core.transitions import TRANSITIONS, Phase, Signal, impossible

EXTENTS_AHEAD: Final = 2
"""Extents that are outstanding at a time: one is read, the next is queued behind it."""

PAGE_OUT_TRIES: Final = 5
"""A page-out that failed so often in a row is not tried again: unmapping does not fail on a sound worker."""


# Members of an enum are looked up slowly; these are asked for in every pass.
_HERE: Final = (Phase.LOADING, Phase.RESIDENT)
_SETTLED = (Phase.PARTIAL, Phase.RESIDENT)


class Activity(Enum):
    """What the requests of a model on a group do."""

    RUNNING = auto()  # or nothing, when there are none
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()


_SUSPENDED: Final = Activity.SUSPENDED  # as above


@mypyc_attr(allow_interpreted_subclasses=True)
class Extent:
    """An outstanding PageIn."""

    __slots__ = ("at", "epoch", "last")

    def __init__(self, last: int, epoch: int, at: float) -> None:
        self.last = last
        self.epoch = epoch
        self.at = at


@mypyc_attr(allow_interpreted_subclasses=True)
class Leaving:
    """The outstanding PageOut."""

    __slots__ = ("epoch", "keep")

    def __init__(self, keep: int, epoch: int) -> None:
        self.keep = keep
        self.epoch = epoch


@dataclass(slots=True)
class Placement:
    """Invariant: `resident ≤ issued ≤ reserved ≤ pages`, all equal unless a page-in is under way.

    What runs or is about to has all its pages reserved, so that it can end: it is committed.
    """

    model: str
    group: str
    pages: int  # of the whole model
    number: int  # the order in which models came to this group
    phase: Phase = Phase.ABSENT
    resident: int = 0  # pages [0, resident) are in
    issued: int = 0  # pages [resident, issued) were asked for
    reserved: int = 0  # frames are reserved for pages [0, reserved)
    extents: deque[Extent] = field(default_factory=deque)  # oldest first
    leaving: Leaving | None = None
    kv: KvAccount = field(default_factory=KvAccount)
    running: dict[str, int] = field(default_factory=dict)  # request → its KV frames, in the order they were served
    activity: Activity = Activity.RUNNING
    activity_epoch: int = 0  # of the last Suspend or Resume
    kv_suspended: int = 0  # KV frames that bring its suspended requests back
    turn_began: float = 0.0  # when it began to run after it had not
    suspended_at: float = 0.0
    number_suspended: int = 0  # its place among the demands while it is suspended
    whole_at: float = 0.0  # when its last page came in
    used: float = 0.0  # when it last finished a request or a load
    out_failures: int = 0  # page-outs that failed in a row
    out_retry_at: float = 0.0
    out_message: str = ""

    def follow(self, signal: Signal) -> None:
        after = TRANSITIONS.get((self.phase, signal))
        if after is None:
            raise impossible(self.phase, signal, f"model {self.model} on group {self.group}")
        self.phase = after

    def awaits(self, epoch: int) -> bool:
        """Whether an outstanding PageIn has this epoch."""
        for extent in self.extents:  # noqa: SIM110  a generator takes longer than there are extents to look at
            if extent.epoch == epoch:
                return True
        return False

    @property
    def is_held(self) -> bool:
        """Whether it keeps frames of its group."""
        return self.reserved > 0 or self.kv.reserved > 0

    @property
    def is_busy(self) -> bool:
        """Whether something runs or is being read: the model stays on this group until that has ended."""
        return (bool(self.running) and not self.is_suspended) or self.phase is Phase.LOADING

    @property
    def is_committed(self) -> bool:
        """Whether the whole model is in, or on its way with its frames reserved."""
        return self.reserved == self.pages and self.phase in _HERE

    @property
    def is_suspended(self) -> bool:
        """Whether requests wait here to go on. They hold no frame; the model's pages may go."""
        return self.activity is _SUSPENDED

    @property
    def gives_way(self) -> bool:
        """Whether its requests are suspended, or about to be."""
        return self.activity in (Activity.SUSPENDING, Activity.SUSPENDED)

    @property
    def is_stuck(self) -> bool:
        return self.out_failures >= PAGE_OUT_TRIES

    @property
    def least_kv(self) -> int:
        """KV frames without which the longest running request could not finish."""
        return max(self.running.values(), default=0)

    def can_page_out(self, now: float) -> bool:
        if self.phase not in _SETTLED or (self.running and not self.is_suspended):
            return False
        return not self.out_failures or (not self.is_stuck and now >= self.out_retry_at)
