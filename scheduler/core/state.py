"""Everything the core knows, and the elementary changes of it.

Each method here changes the state and emits the action that makes the same change outside. When to do so is decided
in `core.py` (what an event means) and `planner.py` (what is to be done now).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.core.actions import Action, Cancel, Fail, GrantKv, PageIn, PageOut, Reason, Serve
from scheduler.core.config import CoreConfig
from scheduler.core.events import Mesh, ModelSpec
from scheduler.core.ledger import Ledger
from scheduler.core.placement import EXTENTS_AHEAD, Extent, Leaving, Placement
from scheduler.core.requests import Job, Request
from scheduler.core.transitions import Phase, Signal
from scheduler.core.view import Decision

DECISIONS = 16
"""Explanations that are kept of each model."""


@dataclass(slots=True)
class Group:
    """A group of workers. One that was lost is remembered: it is expected to come back."""

    name: str
    ranks: int
    ledger: Ledger
    pp: int = 1
    up: bool = True
    placements: dict[str, Placement] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.ranks, self.pp


@dataclass(slots=True)
class Model:
    """What is known of a model wherever it is. `waiting` is sorted by `Request.number`."""

    spec: ModelSpec
    waiting: list[Request] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    pinned: int | None = None  # the number of the pin, which is its place among the demands
    pinned_at: float = 0.0
    home: str | None = None  # the group on which it is pinned
    target: str | None = None  # the group on which room is being made for it
    failures: int = 0  # page-ins that failed in a row
    failure: str | None = None
    retry_at: float = 0.0
    last_finish: float | None = None
    removed: bool = False
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=DECISIONS))
    pages: int = field(init=False)
    identities: tuple[frozenset[int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = len(self.spec.shards[0])
        self.identities = tuple(frozenset(shard) for shard in self.spec.shards)

    @property
    def is_leaving(self) -> bool:
        """Whether it admits nothing now, because it is to go first."""
        return self.removed or any(job.kind == "evict" for job in self.jobs)

    def loads(self) -> list[Job]:
        return [job for job in self.jobs if job.kind == "load"]


class State:
    """Groups, models, requests, the clock of the events, and the actions of the present step."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.now = 0.0
        self.groups: dict[str, Group] = {}
        self.models: dict[str, Model] = {}
        self.requests: dict[str, Request] = {}
        self.draining = False
        self.wake_at: float | None = None  # the Tick that was asked for
        self.service_seconds = 1.0  # of a request, averaged
        self.actions: list[Action] = []
        self._epoch = 0
        self._number = 0

    # ---- looking

    def placements(self, model: str) -> Iterator[Placement]:
        """Where a model is, or was asked to be."""
        return (group.placements[model] for group in self.groups.values() if model in group.placements)

    def busy(self, model: str) -> Placement | None:
        """Where it runs or is being read, if anywhere. A model is busy on one group at a time."""
        return next((placement for placement in self.placements(model) if placement.is_busy), None)

    def running(self, model: str) -> int:
        return sum(len(placement.running) for placement in self.placements(model))

    # ---- counting

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    # ---- requests and jobs

    def enqueue(self, request: Request) -> None:
        request.group = None
        insort(self.models[request.model].waiting, request, key=lambda waiting: waiting.number)

    def forget(self, request: Request) -> None:
        """The request has had its last word."""
        del self.requests[request.id]
        if request.group is None:
            self.models[request.model].waiting.remove(request)
        else:
            del self.groups[request.group].placements[request.model].running[request.id]

    def fail(self, request: Request, reason: Reason, message: str, retry_after: float | None = None) -> None:
        """Last word on an admitted request. If it was sent to a worker, it may be running there: it is stopped."""
        if request.group is not None:
            self.actions.append(Cancel(request.id, request.group))
        self.forget(request)
        self.actions.append(Fail(request.id, reason, message, retry_after))

    def fail_job(self, job: Job, reason: Reason, message: str, retry_after: float | None = None) -> None:
        self.models[job.model].jobs.remove(job)
        self.actions.append(Fail(job.id, reason, message, retry_after))

    # ---- memory

    def placement(self, group: Group, model: Model) -> Placement:
        name = model.spec.name
        if name not in group.placements:
            group.placements[name] = Placement(name, group.name, model.pages, self.next_number())
        return group.placements[name]

    def reserve(self, group: Group, placement: Placement) -> None:
        """Reserve all of the model's pages, so that a page-in that began can end."""
        if not placement.reserved:
            placement.number = self.next_number()
        shards = self.models[placement.model].spec.shards
        group.ledger.hold(shards, placement.reserved, placement.pages)
        placement.reserved = placement.pages

    def revoke(self, group: Group, placement: Placement) -> None:
        """Give up what was reserved and not asked for yet: the page-in ends with what is being read."""
        shards = self.models[placement.model].spec.shards
        group.ledger.drop(shards, placement.issued, placement.reserved)
        placement.reserved = placement.issued

    def release(self, group: Group, placement: Placement, keep: int) -> None:
        """The worker holds pages `[0, keep)` at most: the frames behind are free."""
        shards = self.models[placement.model].spec.shards
        group.ledger.drop(shards, keep, placement.reserved)
        placement.resident = placement.issued = placement.reserved = keep

    def issue_extents(self, placement: Placement) -> None:
        """Ask for the next pages, as far ahead as allowed."""
        while placement.issued < placement.reserved and len(placement.extents) < EXTENTS_AHEAD:
            placement.follow(Signal.PAGE_IN)
            first = placement.issued
            last = min(placement.reserved, first + self.config.extent_pages)
            epoch = self.next_epoch()
            placement.issued = last
            placement.extents.append(Extent(last, epoch))
            self.actions.append(PageIn(placement.group, placement.model, first, last, epoch))

    def page_out(self, placement: Placement, keep: int) -> None:
        placement.follow(Signal.PAGE_OUT)
        placement.leaving = Leaving(keep, self.next_epoch())
        self.actions.append(PageOut(placement.group, placement.model, keep, placement.leaving.epoch))

    def grant(self, placement: Placement, frames: int) -> None:
        epoch = self.next_epoch()
        placement.kv.grant(frames, epoch)
        self.groups[placement.group].ledger.set_kv(placement.model, placement.kv.reserved)
        self.actions.append(GrantKv(placement.group, placement.model, frames, epoch))

    def serve(self, placement: Placement, request: Request) -> None:
        """Send a waiting request to the group. Its pages are reserved there and the grant covers it."""
        self.models[request.model].waiting.remove(request)
        request.group = placement.group
        request.served = self.now
        placement.running[request.id] = request.kv_frames
        self.actions.append(Serve(request.id, placement.group))

    def settle(self, placement: Placement) -> None:
        """An extent is in. With no other behind it, the page-in is over: complete, or stopped."""
        if placement.extents:
            placement.follow(Signal.EXTENT_IN)
        else:
            placement.follow(Signal.ALL_IN if placement.resident == placement.pages else Signal.STOPPED)

    def is_in(self, placement: Placement) -> bool:
        """Whether the whole model is in, or on its way with its frames reserved."""
        return placement.reserved == placement.pages and placement.phase in (Phase.LOADING, Phase.RESIDENT)
