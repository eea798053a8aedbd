"""Everything the core knows, and the elementary changes of it.

Each method here changes the state and emits the action that makes the same change outside. When to do so is decided
in `core.py` (what an event means) and `planner.py` (what is to be done now). A change that may give others something
to do touches its model or group: the planner looks at what was touched, and at nothing else."""

from __future__ import annotations

from bisect import insort
from math import inf

from mypy_extensions import mypyc_attr

from scheduler.core.actions import Action, Cancel, Fail, GrantKv, PageIn, PageOut, Reason, Resume, Serve, Suspend
from scheduler.core.config import CoreConfig
from scheduler.core.group import Group, Shape
from scheduler.core.model import Model
from scheduler.core.placement import EXTENTS_AHEAD, Activity, Extent, Leaving, Placement
from scheduler.core.requests import Job, Request
from scheduler.core.sharing import Sharing
from scheduler.core.timers import Timer, Timers
from scheduler.core.transitions import Phase, Signal
from scheduler.core.view import DecisionKind
from scheduler.policy.base import Policy


@mypyc_attr(allow_interpreted_subclasses=True)
class State:
    """Groups, models, requests, the clock of the events, and the actions of the present step."""

    def __init__(self, config: CoreConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.now = 0.0
        self.groups: dict[str, Group] = {}
        self.shapes: dict[tuple[int, int], Shape] = {}  # mesh → its groups
        self.models: dict[str, Model] = {}
        self.sharing = Sharing()
        self.requests: dict[str, Request] = {}
        self.jobs: dict[str, Job] = {}
        self.waiting = 0  # requests that wait, in all
        self.draining = False
        self.timers = Timers(self._is_true)
        self.wake_at = inf  # the Tick that was asked for
        self.run_seconds: float | None = None  # measured: of a request, from when it could run
        self.actions: list[Action] = []
        self.touched_models: dict[str, None] = {}
        self.touched_groups: dict[str, None] = {}
        self._epoch = 0
        self._number = 0

    # ---- looking

    def shape(self, model: Model) -> Shape:
        """The groups on which a model can run."""
        shape = self.shapes.get(model.mesh)
        if shape is None:
            shape = self.shapes[model.mesh] = Shape()
        return shape

    def busy(self, model: Model) -> Placement | None:
        """Where it runs or is being read, if anywhere."""
        return next((placement for placement in model.placements.values() if placement.is_busy), None)

    def touch(self, placement: Placement) -> None:
        self.touched_groups[placement.group] = None
        self.touched_models[placement.model] = None

    def touch_wants(self, model: Model) -> None:
        """What it wants, wherever it waits, is made of something that has changed."""
        for group in model.targets:
            self.groups[group].wanted.touch(model.spec.name)

    def _pages_changed(self, group: Group, model: Model) -> None:
        """Which pages of a model a group holds has changed."""
        group.wanted.touch(model.spec.name)
        if group.wanted.sharing and model.shares:
            group.wanted.touch_sharing()

    def explain(self, model: Model, kind: DecisionKind, message: str, *values: object) -> None:
        """The message becomes a sentence, with these values, only when somebody looks: few of them are seen."""
        model.explained.append((self.now, kind, message, values))

    # ---- counting

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    # ---- time

    def wake_group(self, group: Group, at: float) -> None:
        if group.wake_at is None or at < group.wake_at:
            group.wake_at = at
            self.timers.set(at, "group", group.name)

    def wake_model(self, model: Model, at: float) -> None:
        if model.wake_at is None or at < model.wake_at:
            model.wake_at = at
            self.timers.set(at, "model", model.spec.name)

    def look_again(self, model: Model, at: float) -> None:
        model.look_at = at
        self.timers.set(at, "look", model.spec.name)

    def watch(self, request: Request) -> None:
        self.timers.set(request.deadline, "deadline", request.id)

    def _is_true(self, timer: Timer) -> bool:
        at, _, kind, name = timer
        match kind:
            case "deadline":
                request = self.requests.get(name)
                return request is not None and request.deadline == at and request.has_deadline
            case "group":
                group = self.groups.get(name)
                return group is not None and group.wake_at == at
            case _:
                model = self.models.get(name)
                return model is not None and at == (model.look_at if kind == "look" else model.wake_at)

    # ---- requests and jobs

    def enqueue(self, request: Request) -> None:
        model = self.models[request.model]
        request.group = None
        self.waiting += 1
        model.arrived_sum += request.arrived
        if model.waiting and model.waiting[-1].number > request.number:
            insort(model.waiting, request, key=lambda waiting: waiting.number)
        else:
            model.waiting.append(request)
        self.watch(request)
        self.touch_wants(model)
        self.touched_models[request.model] = None

    def _dequeue(self, request: Request) -> None:
        model = self.models[request.model]
        model.waiting.remove(request)
        model.arrived_sum = model.arrived_sum - request.arrived if model.waiting else 0.0
        self.waiting -= 1
        self.touch_wants(model)

    def forget(self, request: Request) -> None:
        """The request has had its last word."""
        del self.requests[request.id]
        if request.group is None:
            self._dequeue(request)
            self.touched_models[request.model] = None
        else:
            placement = self.groups[request.group].placements[request.model]
            del placement.running[request.id]
            self.groups[request.group].wanted.touch(request.model)
            self._one_less(placement)

    def fail(self, request: Request, reason: Reason, message: str, retry_after: float | None = None) -> None:
        """Last word on an admitted request. If it was sent to a worker, it may be running there: it is stopped."""
        if request.group is not None:
            self.actions.append(Cancel(request.id, request.group))
        self.forget(request)
        self.actions.append(Fail(request.id, reason, message, retry_after))

    def close_job(self, job: Job) -> None:
        del self.jobs[job.id]
        self.models[job.model].jobs.remove(job)
        self.touched_models[job.model] = None

    def fail_job(self, job: Job, reason: Reason, message: str, retry_after: float | None = None) -> None:
        self.close_job(job)
        self.actions.append(Fail(job.id, reason, message, retry_after))

    # ---- memory

    def placement(self, group: Group, model: Model) -> Placement:
        name = model.spec.name
        placement = group.placements.get(name)
        if placement is None:
            placement = Placement(name, group.name, model.pages, self.next_number())
            group.placements[name] = model.placements[group.name] = placement
        return placement

    def drop_empty(self, placement: Placement) -> None:
        """Forget a placement of which nothing is left but that it was there."""
        if placement.phase is Phase.ABSENT and not placement.is_held and not placement.running:
            del self.groups[placement.group].placements[placement.model]
            del self.models[placement.model].placements[placement.group]

    def reserve(self, group: Group, placement: Placement, pages: int) -> None:
        """Reserve pages up to `pages`."""
        if not placement.reserved:
            placement.number = self.next_number()
        model = self.models[placement.model]
        group.ledger.hold(model.spec.shards, placement.reserved, pages)
        placement.reserved = pages
        self._pages_changed(group, model)

    def lacking(self, group: Group, model: Model, placement: Placement | None, last: int) -> list[int]:
        """For each rank, how many frames it takes to hold pages up to `last`."""
        reserved = placement.reserved if placement is not None else 0
        if not model.shares:
            return [last - reserved] * group.ranks
        return group.ledger.missing(model.spec.shards, reserved, last)

    def revoke(self, group: Group, placement: Placement) -> None:
        """Give up what was reserved and not asked for yet: the page-in ends with what is being read."""
        model = self.models[placement.model]
        group.ledger.drop(model.spec.shards, placement.issued, placement.reserved)
        placement.reserved = placement.issued
        self._pages_changed(group, model)
        group.version += 1
        group.loading.pop(placement.model, None)
        self.touch(placement)

    def release(self, group: Group, placement: Placement, keep: int) -> None:
        """The worker holds pages `[0, keep)` at most: the frames behind are free."""
        model = self.models[placement.model]
        group.ledger.drop(model.spec.shards, keep, placement.reserved)
        placement.resident = placement.issued = placement.reserved = keep
        self._pages_changed(group, model)
        group.loading.pop(placement.model, None)
        group.prefetch_at = 0.0
        group.version += 1
        self.touched_groups[group.name] = None
        if not keep or model.jobs or model.removed:
            self.touched_models[placement.model] = None

    def issue_extents(self, group: Group, placement: Placement) -> None:
        """Ask for the next pages that are reserved, as far ahead as allowed."""
        while placement.issued < placement.reserved and len(placement.extents) < EXTENTS_AHEAD:
            placement.follow(Signal.PAGE_IN)
            first = placement.issued
            last = min(placement.reserved, first + self.config.extent_pages)
            epoch = self.next_epoch()
            placement.issued = last
            placement.extents.append(Extent(last, epoch, self.now))
            group.outstanding += 1
            self.actions.append(PageIn(placement.group, placement.model, first, last, epoch))
        if placement.issued < placement.reserved:
            group.loading[placement.model] = placement
        else:
            group.loading.pop(placement.model, None)

    def page_out(self, placement: Placement, keep: int) -> None:
        placement.follow(Signal.PAGE_OUT)
        placement.leaving = Leaving(keep, self.next_epoch())
        self.groups[placement.group].wanted.touch(placement.model)
        self.actions.append(PageOut(placement.group, placement.model, keep, placement.leaving.epoch))

    def settle(self, placement: Placement) -> None:
        """An extent is in. With no other behind it, the page-in is over: complete, or stopped."""
        if placement.extents:
            placement.follow(Signal.EXTENT_IN)
        else:
            placement.follow(Signal.ALL_IN if placement.resident == placement.pages else Signal.STOPPED)
        group = self.groups[placement.group]
        group.version += 1
        group.wanted.touch(placement.model)
        self.touched_groups[placement.group] = None
        model = self.models[placement.model]
        unfinished = placement.reserved > placement.issued and not placement.running
        if model.jobs or model.removed or unfinished:
            self.touched_models[placement.model] = None

    # ---- running

    def grant(self, placement: Placement, frames: int) -> None:
        epoch = self.next_epoch()
        self._account_grant(placement, frames, epoch)
        self.actions.append(GrantKv(placement.group, placement.model, frames, epoch))

    def serve(self, group: Group, placement: Placement, request: Request) -> None:
        """Send a waiting request to the group. Its pages are reserved there and the grant covers it."""
        self._dequeue(request)
        waiting = self.models[request.model].waiting
        if waiting and waiting[0].kv_frames > request.kv_frames:
            self.touched_models[request.model] = None  # who is first now may not fit where this one does
        if not placement.running:
            placement.turn_began = self.now
            group.busy[placement.model] = placement
        request.group = placement.group
        request.served = self.now
        placement.running[request.id] = request.kv_frames
        self.actions.append(Serve(request.id, placement.group))

    def stop_running(self, group: Group, placement: Placement) -> None:
        """Nothing runs here any more: it keeps no KV, and nothing is suspended."""
        group.busy.pop(placement.model, None)
        group.prefetch_at = 0.0
        group.version += 1
        placement.kv.wanted = 0
        placement.activity = Activity.RUNNING

    def _one_less(self, placement: Placement) -> None:
        self.touched_groups[placement.group] = None
        model = self.models[placement.model]
        if not placement.running:
            self.stop_running(self.groups[placement.group], placement)
            if placement.kv.granted:
                self.grant(placement, 0)
        if model.is_leaving or (model.spec.ttl is not None and not placement.running):
            self.touched_models[placement.model] = None

    def suspend(self, placement: Placement) -> None:
        placement.activity = Activity.SUSPENDING
        placement.kv_suspended = placement.kv.reserved
        placement.activity_epoch = epoch = self.next_epoch()
        placement.kv.wanted = 0
        self._account_grant(placement, 0, epoch)
        self.actions.append(Suspend(placement.group, placement.model, epoch))

    def resume(self, placement: Placement) -> None:
        placement.activity = Activity.RESUMING
        self.groups[placement.group].wanted.touch(placement.model)
        placement.activity_epoch = epoch = self.next_epoch()
        placement.turn_began = self.now
        self._account_grant(placement, placement.kv_suspended, epoch)
        self.actions.append(Resume(placement.group, placement.model, placement.kv_suspended, epoch))

    def _account_grant(self, placement: Placement, frames: int, epoch: int) -> None:
        placement.kv.grant(frames, epoch)
        self.groups[placement.group].version += 1
        self.groups[placement.group].ledger.set_kv(placement.model, placement.kv.reserved)
