"""A model as the core knows it, wherever it is."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from scheduler.core.events import Mesh, ModelSpec
from scheduler.core.placement import Placement
from scheduler.core.requests import Job, Request
from scheduler.core.view import Decision, DecisionKind
from scheduler.policy.history import History

DECISIONS: Final = 16
"""Explanations that are kept of each model."""

Explained = tuple[float, DecisionKind, str, tuple[object, ...]]
"""When, what, and the sentence that tells why, with values that are not filled in yet."""


@dataclass(slots=True)
class Model:
    """`waiting` is sorted by `Request.number`."""

    spec: ModelSpec
    waiting: list[Request] = field(default_factory=list)
    arrived_sum: float = 0.0  # of the arrivals of those that wait
    jobs: list[Job] = field(default_factory=list)
    placements: dict[str, Placement] = field(default_factory=dict)  # by group
    targets: dict[str, None] = field(default_factory=dict)  # groups on which its demands are to be met
    pinned: int | None = None  # the number of the pin, which is its place among the demands
    pinned_at: float = 0.0
    home: str | None = None  # the group on which it is pinned
    failures: int = 0  # page-ins that failed in a row
    failure: str | None = None
    retry_at: float = 0.0
    last_finish: float | None = None
    removed: bool = False
    is_offered: bool = False  # a group has nothing to do and may be better than the one it waits on
    look_at: float = math.inf  # when it should have been complete where it waits, and looks at other groups again
    wake_at: float | None = None  # when it is to be looked at though nothing happens
    page_seconds: float | None = None  # measured: to read one of its pages
    run_seconds: float | None = None  # measured: from when it could run to its end, a request
    history: History = field(default_factory=History)
    sent_away: bool = False  # by an operator or its time to live: not brought in ahead until it is asked for again
    explained: deque[Explained] = field(default_factory=lambda: deque(maxlen=DECISIONS))
    shares: bool = True  # it may have pages in common with another model, or one twice (`sharing.py`)
    mesh: Mesh = field(init=False)
    pages: int = field(init=False)
    identities: tuple[frozenset[int], ...] = field(init=False)
    most_pages: int = field(init=False)  # distinct ones, on the fullest rank

    def __post_init__(self) -> None:
        self.mesh = self.spec.mesh
        self.pages = len(self.spec.shards[0])
        self.identities = tuple(frozenset(shard) for shard in self.spec.shards)
        self.most_pages = max(len(pages) for pages in self.identities)
        self.page_seconds = self.spec.page_seconds
        self.run_seconds = self.spec.run_seconds

    @property
    def is_leaving(self) -> bool:
        """Whether it admits nothing now, because it is to go first."""
        if not self.jobs:
            return self.removed
        return self.removed or any(job.kind == "evict" for job in self.jobs)

    def loads(self) -> list[Job]:
        return [job for job in self.jobs if job.kind == "load"]

    def decisions(self) -> tuple[Decision, ...]:
        return tuple(Decision(at, kind, message.format(*values)) for at, kind, message, values in self.explained)
