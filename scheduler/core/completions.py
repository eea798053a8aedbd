"""What groups report: pages, KV, finished requests, their own coming and going.

Every report that answers an action carries its epoch. `find` is the one place where a stale report is told from a true
one: after a group was lost or a model failed, a report may still be on its way that speaks of what is gone.
"""

from __future__ import annotations

from typing import Final

from scheduler.core.actions import Fail, Reason
from scheduler.core.admission import refuse_hopeless, refuse_suspended
from scheduler.core.events import (
    Finished,
    KvReleased,
    KvWanted,
    PagedIn,
    PagedOut,
    PageInFailed,
    PageOutFailed,
    Resumed,
    Started,
    Suspended,
    WorkerLost,
    WorkerUp,
)
from scheduler.core.fitting import rehome
from scheduler.core.group import Group, Shape
from scheduler.core.ledger import Ledger
from scheduler.core.measured import measure_extent, measure_run
from scheduler.core.placement import Activity, Placement
from scheduler.core.requests import Request
from scheduler.core.state import State
from scheduler.core.transitions import Signal
from scheduler.core.wanted import Wanted

MOST_LOSSES: Final = 3
"""A request that ran on so many groups when they were lost is not run again: it may be what they die of."""


def find(state: State, group: str, model: str) -> Placement | None:
    """The placement that a report speaks of; None if the group or the model is gone."""
    known = state.groups.get(group)
    return known.placements.get(model) if known is not None else None


def paged_in(state: State, event: PagedIn) -> None:
    """The race: the group was lost, or an earlier extent failed, after this one was sent. It is not awaited then."""
    placement = find(state, event.group, event.model)
    if placement is None or not placement.awaits(event.epoch):
        return
    group, model = state.groups[event.group], state.models[event.model]
    measure_extent(state, group, model, placement)
    group.outstanding -= 1
    group.prefetch_at = 0.0
    placement.extents.popleft()
    placement.resident = event.last
    state.settle(placement)
    if placement.resident == placement.pages:
        placement.used = placement.whole_at = state.now
        model.failures, model.failure, model.retry_at = 0, None, 0.0


def page_in_failed(state: State, event: PageInFailed) -> None:
    """The model is absent. Everyone who waits for it hears of it; the next try comes after a pause.

    The race: a second extent, a grant and a request may have been sent after the worker had failed. The second
    extent's own failure is not awaited any more. The grant is taken back like any other: its frames stay
    reserved until the worker answers. The request is stopped by a Cancel.
    """
    placement = find(state, event.group, event.model)
    if placement is None or not placement.awaits(event.epoch):
        return
    placement.follow(Signal.IN_FAILED)
    state.groups[event.group].outstanding -= len(placement.extents)
    placement.extents.clear()
    state.release(state.groups[event.group], placement, 0)
    model = state.models[event.model]
    model.failures += 1
    model.failure = event.message
    pause = state.config.backoff(model.failures)
    model.retry_at = state.now + pause
    state.wake_model(model, model.retry_at)
    message = f"Model {event.model} could not be loaded: {event.message}"
    for request in [*(state.requests[running] for running in placement.running), *model.waiting]:
        state.fail(request, "load_failed", message, pause)
    for job in model.loads():
        state.fail_job(job, "load_failed", message, pause)


def paged_out(state: State, event: PagedOut) -> None:
    """The race: the group was lost after the page-out was sent; with it went the placement, or its epoch."""
    placement = find(state, event.group, event.model)
    if placement is None or placement.leaving is None or placement.leaving.epoch != event.epoch:
        return
    placement.follow(Signal.TAIL_OUT if event.keep else Signal.ALL_OUT)
    placement.leaving = None
    placement.out_failures, placement.out_message = 0, ""
    state.release(state.groups[event.group], placement, event.keep)


def page_out_failed(state: State, event: PageOutFailed) -> None:
    """Nothing was unmapped, which only a defect can cause: tried again after a pause, a few times."""
    placement = find(state, event.group, event.model)
    if placement is None or placement.leaving is None or placement.leaving.epoch != event.epoch:
        return  # stale, as in `paged_out`
    is_whole = placement.resident == placement.pages
    placement.follow(Signal.OUT_FAILED_WHOLE if is_whole else Signal.OUT_FAILED_PART)
    placement.leaving = None
    placement.out_failures += 1
    placement.out_message = event.message
    state.groups[event.group].version += 1
    state.groups[event.group].wanted.touch(event.model)
    placement.out_retry_at = state.now + state.config.backoff(placement.out_failures)
    state.wake_group(state.groups[event.group], placement.out_retry_at)
    state.wake_model(state.models[event.model], placement.out_retry_at)
    state.touch(placement)


def kv_wanted(state: State, event: KvWanted) -> None:
    """The race: the batch may have ended since; an idle model is granted nothing."""
    placement = find(state, event.group, event.model)
    if placement is not None and placement.running and placement.activity is Activity.RUNNING:
        placement.kv.wanted = event.frames
        state.touched_groups[event.group] = None


def kv_released(state: State, event: KvReleased) -> None:
    placement = find(state, event.group, event.model)
    if placement is None:
        return
    before = placement.kv.reserved
    placement.kv.released(event.epoch, event.frames)
    if placement.kv.reserved < before:
        group = state.groups[event.group]
        group.ledger.set_kv(event.model, placement.kv.reserved)
        group.version += 1
        if group.wanted or group.busy:
            state.touched_groups[event.group] = None
        if not placement.is_held:
            state.touched_models[event.model] = None


def started(state: State, event: Started) -> None:
    """The race: its deadline passed while the report was on its way; then it is gone."""
    request = state.requests.get(event.request)
    if request is not None and request.group is not None:
        request.started = True


def finished(state: State, event: Finished) -> None:
    """The race: a request that was failed here finishes there. One that waits again, because its group was lost,
    cannot have finished: after a loss nothing of before is reported.
    """
    request = state.requests.get(event.request)
    if request is None or request.group is None:
        return
    placement, model = state.groups[request.group].placements[request.model], state.models[request.model]
    placement.used = model.last_finish = state.now
    measure_run(state, model, placement, request)
    state.forget(request)


def suspended(state: State, event: Suspended) -> None:
    """The race: the group was lost, or all that ran has ended, after it was asked to suspend. Or something was pinned,
    and what is suspended cannot go on beside it.
    """
    placement = _acted(state, event.group, event.model, event.epoch)
    if placement is not None and placement.activity is Activity.SUSPENDING:
        placement.activity = Activity.SUSPENDED
        state.groups[event.group].version += 1
        state.groups[event.group].wanted.touch(event.model)
        state.touch(placement)
        # A batch may have begun more than it had blocks for: it goes on with as much as it had, the oldest first.
        placement.kv_suspended = max(min(event.kv_frames, placement.kv_suspended), placement.least_kv)
        placement.suspended_at, placement.number_suspended = state.now, state.next_number()
        refuse_suspended(state, state.models[event.model], placement)


def resumed(state: State, event: Resumed) -> None:
    """The race: as in `suspended`."""
    placement = _acted(state, event.group, event.model, event.epoch)
    if placement is not None and placement.activity is Activity.RESUMING:
        state.touch(placement)
        state.groups[event.group].wanted.touch(event.model)
        placement.activity = Activity.RUNNING


def _acted(state: State, group: str, model: str, epoch: int) -> Placement | None:
    """A Suspend or Resume is a change of the KV grant too, and this is its answer."""
    placement = find(state, group, model)
    if placement is None:
        return None
    kv_released(state, KvReleased(state.now, group, model, epoch, placement.kv.frames_of(epoch)))
    return placement if placement.activity_epoch == epoch else None


def worker_lost(state: State, event: WorkerLost) -> None:
    group = state.groups.get(event.group)
    if group is not None and group.up:
        _lose(state, group, event.message)


def worker_up(state: State, event: WorkerUp) -> None:
    """A group comes up empty. If it was up, it was restarted before its loss was heard of."""
    group = state.groups.get(event.group)
    if group is not None and group.up:
        _lose(state, group, "it was restarted")
    if group is not None:
        state.shapes[group.mesh].groups.pop(group.name)
        state.shapes[group.mesh].changed()
    group = Group(event.group, event.ranks, Ledger(event.ranks, event.frames), event.pp)
    state.groups[group.name] = group
    shape = state.shapes.setdefault(group.mesh, Shape())
    shape.groups[group.name] = group
    shape.changed()
    state.touched_groups[group.name] = None
    for model in state.models.values():
        if model.waiting or model.jobs or model.pinned is not None:
            state.touched_models[model.spec.name] = None
    rehome(state)
    refuse_hopeless(state)


def _lose(state: State, group: Group, message: str) -> None:
    """Everything on the group is gone. What ran there waits again in its old place, with its full patience."""
    group.up = False
    for placement in group.placements.values():
        placement.follow(Signal.LOST)
        for request in [state.requests[running] for running in placement.running]:
            request.losses += 1
            if request.losses >= MOST_LOSSES:
                why = f"The request was lost with its workers {request.losses} times. The last time: {message}"
                _end_lost(state, request, "engine_failed", why)
            elif request.cancelled:
                _end_lost(state, request, "engine_failed", f"Group {group.name} was lost: {message}")
            elif state.models[request.model].removed:
                _end_lost(state, request, "removed", f"Group {group.name} was lost and model {request.model} removed.")
            else:
                request.started = False
                request.deadline = state.now + request.patience
                state.enqueue(request)
    for name in [*group.placements, *group.wanted]:
        model = state.models[name]
        model.placements.pop(group.name, None)
        model.targets.pop(group.name, None)
        state.touched_models[name] = None
    group.placements, group.wanted, group.busy = {}, Wanted(), {}
    group.loading, group.wake_at, group.listed = {}, None, None
    group.outstanding = 0
    group.ledger = Ledger(group.ranks, group.ledger.capacity)


def _end_lost(state: State, request: Request, reason: Reason, message: str) -> None:
    """Last word on a request that ran on a lost group and is not to run again. Nobody is left to cancel it."""
    del state.requests[request.id]
    state.actions.append(Fail(request.id, reason, message))
