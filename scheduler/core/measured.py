"""What things take, measured on the events themselves: a page of the link, a request's run."""

from __future__ import annotations

from typing import Final

from scheduler.core.group import Group
from scheduler.core.model import Model
from scheduler.core.placement import Placement
from scheduler.core.requests import Request
from scheduler.core.state import State

RECENT: Final = 0.3
"""Weight of the latest measurement in an average."""

EXTENT_SECONDS: Final = 0.025
"""An extent, until one was measured."""

RUN_SECONDS: Final = 1.0
"""A request, until one was measured."""


def measure_extent(state: State, group: Group, model: Model, placement: Placement) -> None:
    """The oldest extent of a placement is in. The link was its own since it was asked for, or the one before came in.

    A model's own average knows where its pages come from: a frame that holds them already, memory near by, storage.
    """
    extent = placement.extents[0]
    pages = extent.last - placement.resident
    seconds = (state.now - max(extent.at, group.extent_in_at)) / pages
    group.extent_in_at = state.now
    group.page_seconds = _mix(group.page_seconds, seconds)
    model.page_seconds = _mix(model.page_seconds, seconds)
    state.touch_wants(model)


def measure_run(state: State, model: Model, placement: Placement, request: Request) -> None:
    """From when a request could run to its end."""
    seconds = state.now - max(request.served, placement.whole_at, placement.turn_began)
    model.run_seconds = _mix(model.run_seconds, seconds)
    state.touch_wants(model)
    state.run_seconds = _mix(state.run_seconds, seconds)


def page_seconds(state: State, group: Group, model: Model) -> float:
    known = model.page_seconds if model.page_seconds is not None else group.page_seconds
    return known if known is not None else EXTENT_SECONDS / state.config.extent_pages


def load_seconds(state: State, group: Group, model: Model) -> float:
    """To bring in the whole model, if nothing of it were there."""
    return model.pages * page_seconds(state, group, model)


def remaining_seconds(state: State, group: Group, model: Model) -> float:
    """Until all of it is in, if the link were its own from now on."""
    placement = group.placements.get(model.spec.name)
    if not model.shares:
        missing = model.pages - (placement.resident if placement is not None else 0)
        return missing * page_seconds(state, group, model)
    coming = placement.reserved - placement.resident if placement is not None else 0
    missing = coming + len(model.identities[0].difference(group.ledger.holders[0]))
    return missing * page_seconds(state, group, model)


def run_seconds(state: State, model: Model) -> float:
    """That of all models together, until one of its own requests has ended."""
    known = model.run_seconds if model.run_seconds is not None else state.run_seconds
    return known if known is not None else RUN_SECONDS


def _mix(average: float | None, latest: float) -> float:
    return latest if average is None else average + RECENT * (latest - average)
