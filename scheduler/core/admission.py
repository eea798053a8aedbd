"""What people ask for: requests, jobs, pins, models. Each handler changes the state; the planner acts on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scheduler.core.actions import Cancel, Done, Reason, Reject
from scheduler.core.events import (
    Arrived,
    Cancelled,
    EvictWanted,
    LoadWanted,
    ModelAdded,
    ModelChanged,
    ModelRemoved,
    Pinned,
    Unpinned,
)
from scheduler.core.fitting import MINIMAL_KV, can_hold, choose_home, never_fits, set_home, why_not
from scheduler.core.measured import remaining_seconds, run_seconds
from scheduler.core.model import Model
from scheduler.core.placement import Placement
from scheduler.core.requests import Job, JobKind, Request
from scheduler.core.state import State

LONGEST_RETRY_AFTER: Final = 60.0
"""Seconds. An estimate from the backlog beyond this says nothing."""

SHORTEST_RETRY_AFTER: Final = 1.0


def arrived(state: State, event: Arrived) -> None:
    model = state.models.get(event.model)
    if not _is_open(state, event.request, event.model) or model is None:
        return
    if _refused_for_good(state, event.request, model, event.kv_frames):
        return
    if len(model.waiting) >= state.config.max_queue or state.waiting >= state.config.max_queue_total:
        message = (
            f"{len(model.waiting)} requests wait for model {event.model}, {state.waiting} in all; try again later."
        )
        _reject(state, event.request, "queue_full", message, _until_served(state, model))
        return
    request = Request(
        id=event.request,
        model=event.model,
        kv_frames=event.kv_frames,
        number=state.next_number(),
        arrived=event.at,
        patience=event.deadline - event.at,
        deadline=event.deadline,
    )
    state.requests[request.id] = request
    model.history.arrived(event.at)
    model.sent_away = False
    state.enqueue(request)


def cancelled(state: State, event: Cancelled) -> None:
    """The race: the request may have ended while the cancellation was on its way; then there is nothing to do."""
    request = state.requests.get(event.request)
    if request is None or request.cancelled:
        return
    request.cancelled = True
    if request.group is None:
        state.forget(request)
    else:
        state.actions.append(Cancel(request.id, request.group))


def load_wanted(state: State, event: LoadWanted) -> None:
    model = state.models.get(event.model)
    if _is_open(state, event.job, event.model) and model and not _refused_for_good(state, event.job, model, 0):
        _open_job(state, event.job, "load", model, event.at)


def evict_wanted(state: State, event: EvictWanted) -> None:
    """The model goes once what runs is done. Loads asked for before are given up: the later wish wins."""
    model = state.models.get(event.model)
    if not _is_open(state, event.job, event.model) or model is None:
        return
    if model.pinned is not None:
        _reject(state, event.job, "pinned", f"Model {event.model} is pinned; unpin it before it is evicted.")
        return
    model.sent_away = True
    if _open_job(state, event.job, "evict", model, event.at):
        for job in model.loads():
            state.fail_job(job, "load_failed", f"The load of model {event.model} was given up because it is evicted.")


def pinned(state: State, event: Pinned) -> None:
    model = state.models.get(event.model)
    if not _is_open(state, event.job, event.model) or model is None:
        return
    if model.pinned is None:
        home = choose_home(state, model)
        if home is None:
            _reject(state, event.job, "no_memory", why_not(state, model, MINIMAL_KV))
            return
        model.pinned, model.pinned_at = state.next_number(), event.at
        set_home(state, model, home)
        for job in [job for job in model.jobs if job.kind == "evict"]:
            state.fail_job(job, "pinned", f"Model {event.model} was pinned before it could be evicted.")
        refuse_hopeless(state)
    state.actions.append(Done(event.job))


def unpinned(state: State, event: Unpinned) -> None:
    model = state.models.get(event.model)
    if model is None or model.removed:
        _reject(state, event.job, "model_not_found", f"There is no model {event.model}.")
        return
    model.pinned = None
    set_home(state, model, None)
    state.actions.append(Done(event.job))


def model_added(state: State, event: ModelAdded) -> None:
    model = state.models[event.model.name] = Model(event.model)
    for other in state.sharing.add(model):
        state.touch_wants(other)
    state.touched_models[event.model.name] = None


def model_changed(state: State, event: ModelChanged) -> None:
    model, new = state.models.get(event.model.name), event.model
    if model is not None:
        model.spec = replace(model.spec, max_wait=new.max_wait, slo=new.slo, priority=new.priority, ttl=new.ttl)
        state.touched_models[new.name] = None


def model_removed(state: State, event: ModelRemoved) -> None:
    model = state.models.get(event.model)
    if model is None:
        return
    model.removed = True
    model.pinned = None
    set_home(state, model, None)
    message = f"Model {event.model} was removed."
    for request in list(model.waiting):
        state.fail(request, "removed", message)
    for job in model.loads():
        state.fail_job(job, "removed", message)


def refuse_hopeless(state: State) -> None:
    """A pin or a smaller group may leave too little for what waits: say so now, not at its deadline."""
    for model in state.models.values():
        for request in list(model.waiting):
            if never_fits(state, model, request.kv_frames):
                state.fail(request, "no_memory", why_not(state, model, request.kv_frames))
        for job in model.loads():
            if never_fits(state, model, 0):
                state.fail_job(job, "no_memory", why_not(state, model, 0))
        for placement in list(model.placements.values()):
            refuse_suspended(state, model, placement)


def refuse_suspended(state: State, model: Model, placement: Placement) -> None:
    """What is suspended goes on where it was; a pin may leave too little for it there."""
    if placement.is_suspended and not can_hold(state.groups[placement.group], model, placement.kv_suspended):
        for request in [state.requests[running] for running in placement.running]:
            state.fail(request, "no_memory", why_not(state, model, placement.kv_suspended))


def _is_open(state: State, ident: str, name: str) -> bool:
    """Whether anything is admitted, and the model is known. Rejects if not."""
    model = state.models.get(name)
    if model is None or model.removed:
        _reject(state, ident, "model_not_found", f"There is no model {name}.")
    elif state.draining:
        _reject(state, ident, "draining", "The daemon is shutting down and admits nothing more.")
    else:
        return True
    return False


def _refused_for_good(state: State, ident: str, model: Model, kv_frames: int) -> bool:
    """Rejects what waiting would not help: the model cannot fit, or its load has just failed."""
    if never_fits(state, model, kv_frames):
        _reject(state, ident, "no_memory", why_not(state, model, kv_frames))
    elif state.now < model.retry_at:
        message = f"Model {model.spec.name} could not be loaded: {model.failure}"
        _reject(state, ident, "load_failed", message, model.retry_at - state.now)
    else:
        return False
    return True


def _open_job(state: State, ident: str, kind: JobKind, model: Model, at: float) -> bool:
    unfinished = len(state.jobs)
    if unfinished >= state.config.max_queue_total:
        message = f"{unfinished} loads and evicts are not done yet; try again later."
        _reject(state, ident, "queue_full", message, SHORTEST_RETRY_AFTER)
        return False
    job = state.jobs[ident] = Job(ident, kind, model.spec.name, state.next_number(), at)
    model.jobs.append(job)
    state.touched_models[job.model] = None
    return True


def _until_served(state: State, model: Model) -> float:
    """When those who wait will have been served: by what the model's own requests take, where it is or is to be."""
    groups = [state.groups[name] for name in model.targets]
    rounds = len(model.waiting) / (state.config.max_running * max(1, len(groups)))
    begin = min((remaining_seconds(state, group, model) for group in groups), default=0.0)
    return min(LONGEST_RETRY_AFTER, max(SHORTEST_RETRY_AFTER, begin + rounds * run_seconds(state, model)))


def _reject(state: State, ident: str, reason: Reason, message: str, retry_after: float | None = None) -> None:
    state.actions.append(Reject(ident, reason, message, retry_after))
