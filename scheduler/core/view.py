"""What others may see of the core: frozen, made when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from scheduler.core.transitions import Phase


@dataclass(frozen=True, slots=True)
class PlacementView:
    """A model on one group. Pages and frames are those of one rank (ranks move in lockstep)."""

    group: str
    phase: Phase
    resident: int  # pages [0, resident) are in
    reserved: int
    kv_frames: int  # reserved for its KV
    running: int


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model: a summary for status pages, and in `placements` where it really is.

    `group`, `phase`, `resident` and `kv_frames` speak of the group that it runs on, or that holds most of it.
    """

    name: str
    pages: int  # of one rank
    group: str | None
    phase: Phase
    resident: int
    kv_frames: int
    pinned: bool
    home: str | None  # the group on which its pin holds
    waiting: int
    running: int
    last_finish: float | None  # on the clock of the events
    failure: str | None  # why it is failed, or why its pages cannot be taken
    retry_at: float | None  # when a failed load may be tried again
    placements: tuple[PlacementView, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    name: str
    ranks: int
    up: bool
    frames: int
    free: int  # on the fullest rank


class KvRoom(NamedTuple):
    """KV frames that one request of a model can have: beside what is pinned now, and with no pins."""

    now: int
    ever: int


DecisionKind = Literal["placed", "loading", "waiting", "evicted", "suspended", "resumed", "prefetched"]


class Decision(NamedTuple):
    """Why something was done to a model or not: a sentence with numbers, for people."""

    at: float  # on the clock of the events
    kind: DecisionKind
    message: str
