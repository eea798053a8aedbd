"""What waits or runs: requests and jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

JobKind = Literal["load", "evict"]


@dataclass(slots=True)
class Request:
    """A request from arrival to its last word. It waits while `group` is None, and runs on `group` otherwise."""

    id: str
    model: str
    kv_frames: int
    number: int  # of the arrival; never changes, so that a request that waits again keeps its place
    arrived: float
    patience: float  # how long it may wait, counted from its arrival, or anew from the loss of its worker
    deadline: float
    group: str | None = None
    served: float = 0.0
    losses: int = 0  # groups that were lost while it ran there
    started: bool = False  # a worker computed something of it; from then on its deadline is met
    cancelled: bool = False

    @property
    def has_deadline(self) -> bool:
        """Its time is for its first step: it runs out for one that waits or, served, for its pages."""
        return not self.started and not self.cancelled


@dataclass(slots=True)
class Job:
    """A load or an evict that is not done yet. (Pin and unpin are answered at once.)"""

    id: str
    kind: JobKind
    model: str
    number: int
    at: float
