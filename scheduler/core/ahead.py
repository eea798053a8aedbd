"""What a group's idle link brings in before it is asked for: the next extent of what policy expects soonest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.core.frames import Frames
from scheduler.core.group import Group
from scheduler.core.placement import Placement
from scheduler.core.state import State
from scheduler.core.transitions import Phase
from scheduler.policy.view import Holder, Want


def bring_ahead(state: State, group: Group, frames: Frames) -> None:
    """The link has nothing to do: bring in what may be wanted soon."""
    group.prefetch_at = math.inf
    candidates = [holder for name in list(group.known) if (holder := _candidate(state, group, frames, name))]
    if not candidates:
        return
    choice = state.policy.prefetch(candidates, frames.idle_holders(""), state.now)
    if choice is None:
        return
    if choice.ask_at is not None:
        group.prefetch_at = choice.ask_at
        state.wake_group(group, choice.ask_at)
    if choice.model is not None:
        _bring(state, group, frames, choice.model, choice.victims)


def _candidate(state: State, group: Group, frames: Frames, name: str) -> Holder | None:
    """A model that was paged out here, if it could be brought in again."""
    model = state.models[name]
    if name in group.wanted or model.is_leaving or model.sent_away or model.history.next_use(state.now) is None:
        return None
    if state.now < model.retry_at:
        return None  # its load has failed, here or on another group
    placement = group.placements.get(name)
    if placement is None or placement.phase is Phase.ABSENT:
        return frames.holder(Placement(name, group.name, model.pages, 0))
    if placement.is_committed:
        del group.known[name]
        return None
    return frames.holder(placement) if placement.phase is Phase.PARTIAL else None


def _bring(state: State, group: Group, frames: Frames, name: str, victims: Sequence[Holder]) -> None:
    """Ask for the next extent of a model, or make room for it."""
    model, placement = state.models[name], group.placements.get(name)
    if group.next_in != name:
        group.turn_to(name)
        state.explain(model, "prefetched", "The link of {} is idle; it may be wanted soon.", group.name)
    reserved = placement.reserved if placement is not None else 0
    last = min(model.pages, reserved + state.config.extent_pages)
    lacking = state.lacking(group, model, placement, last)
    if frames.has(lacking, None, 0):
        placement = state.placement(group, model)
        state.reserve(group, placement, last)
        state.issue_extents(group, placement)
    else:
        frames.take_for(Want(name, 0, state.now, state.now, 0, 0, 0.0, 0.0, 0.0), lacking, victims)
