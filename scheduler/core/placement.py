"""One model on one group: which of its pages are in, asked for, and reserved; its KV; what runs there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.core.kv import KvAccount
from scheduler.core.transitions import Phase, Signal, follow

EXTENTS_AHEAD = 2
"""Extents of one page-in that are outstanding at a time: one is read, the next is queued behind it."""

PAGE_OUT_TRIES = 5
"""A page-out that failed so often in a row is not tried again: unmapping does not fail on a sound worker."""


class Extent(NamedTuple):
    """An outstanding PageIn."""

    last: int
    epoch: int


class Leaving(NamedTuple):
    """The outstanding PageOut."""

    keep: int
    epoch: int


@dataclass(slots=True)
class Placement:
    """Invariant: `resident ≤ issued ≤ reserved ≤ pages`, all equal unless a page-in is under way."""

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
    used: float = 0.0  # when it last finished a request or a load
    out_failures: int = 0  # page-outs that failed in a row
    out_retry_at: float = 0.0
    out_message: str = ""

    def follow(self, signal: Signal) -> None:
        self.phase = follow(self.phase, signal, f"model {self.model} on group {self.group}")

    def awaits(self, epoch: int) -> bool:
        """Whether an outstanding PageIn has this epoch."""
        return any(extent.epoch == epoch for extent in self.extents)

    @property
    def is_held(self) -> bool:
        """Whether it keeps frames of its group."""
        return self.reserved > 0 or self.kv.reserved > 0

    @property
    def is_busy(self) -> bool:
        """Whether something runs or is being read: the model stays on this group until that has ended."""
        return bool(self.running) or self.phase is Phase.LOADING

    @property
    def is_stuck(self) -> bool:
        return self.out_failures >= PAGE_OUT_TRIES

    @property
    def least_kv(self) -> int:
        """KV frames without which the longest running request could not finish."""
        return max(self.running.values(), default=0)

    def can_page_out(self, now: float) -> bool:
        settled = self.phase in (Phase.PARTIAL, Phase.RESIDENT)
        return settled and not self.running and not self.is_stuck and now >= self.out_retry_at
