"""Where a model is to run: on which groups its demands are met.

It runs wherever all of it is in or coming. A cold model goes to the group where its requests can be expected to be
complete first. One whose batches are full gets another group when its queue takes longer than bringing it in there,
and loses it as it loses its pages: a copy is worth half."""

from __future__ import annotations

from typing import Final

from scheduler.core.fitting import can_hold
from scheduler.core.group import Group
from scheduler.core.measured import load_seconds, remaining_seconds, run_seconds
from scheduler.core.model import Model
from scheduler.core.placement import Placement
from scheduler.core.state import State
from scheduler.core.wants import refresh

CANDIDATES: Final = 3
"""Groups that are looked at closely for a model, beside those that hold some of it."""

LEAST_PATIENCE: Final = 0.1
"""Seconds after which who waits looks at other groups again, at least."""

REPLICA_PAYS: Final = 1.5
"""How much longer the queue must be expected to take than a load elsewhere."""


def aim(state: State, model: Model) -> dict[str, None]:
    """The groups on which the waiting requests and loads of a model are to be served."""
    kv = model.waiting[0].kv_frames if model.waiting else 0
    targets = {
        p.group: None
        for p in model.placements.values()
        if p.is_committed and can_hold(state.groups[p.group], model, kv)
    }
    if not targets:
        group = _aimed_at(state, model, kv) or _choose_anew(state, model, kv)
        if group is not None:
            targets[group.name] = None
    elif model.waiting and _is_saturated(state, model, targets):
        group = _choose(state, model, kv, besides=targets)
        if group is not None and _replica_pays(state, model, group, len(targets)):
            message = "{} requests wait, so it comes to {} too."
            state.explain(model, "placed", message, len(model.waiting), group.name)
            targets[group.name] = None
    return targets


def _aimed_at(state: State, model: Model, kv: int) -> Group | None:
    """Where it waits already, unless another group offers itself, or it should have been complete by now."""
    if model.is_offered or state.now >= model.look_at:
        return None
    groups = (state.groups[name] for name in model.targets)
    return next((group for group in groups if group.up and can_hold(group, model, kv)), None)


def _choose_anew(state: State, model: Model, kv: int) -> Group | None:
    """Where it is to wait. If that takes longer than is thought now, it looks again, later and later."""
    model.is_offered = False
    group = _choose(state, model, kv)
    if group is not None and len(state.shape(model).groups) > 1:
        waited = state.now - model.waiting[0].arrived if model.waiting else 0.0
        state.look_again(model, state.now + max(LEAST_PATIENCE, waited, completion(state, model, group, kv)))
    return group


def _is_saturated(state: State, model: Model, targets: dict[str, None]) -> bool:
    most = state.config.max_running
    return all(len(model.placements[name].running) >= most for name in targets)


def _replica_pays(state: State, model: Model, group: Group, copies: int) -> bool:
    rounds = len(model.waiting) / (state.config.max_running * copies)
    return rounds * run_seconds(state, model) > REPLICA_PAYS * completion(state, model, group, 0)


def _choose(state: State, model: Model, kv: int, besides: dict[str, None] | None = None) -> Group | None:
    home = state.groups.get(model.home) if model.home is not None else None
    besides = besides or {}
    if home is not None and home.up and home.name not in besides and can_hold(home, model, kv):
        return home
    shape = state.shape(model)
    names = [*model.targets, *model.placements]
    groups = {name: state.groups[name] for name in names}
    if len(shape.groups) <= CANDIDATES:
        groups |= shape.groups
    else:
        groups |= {group.name: group for group in shape.freest(CANDIDATES)}
    possible = [g for g in groups.values() if g.up and g.name not in besides and can_hold(g, model, kv)]
    if not possible:
        # None of those looked at closely is large enough; one that is may be busier.
        possible = [g for g in shape.groups.values() if g.up and g.name not in besides and can_hold(g, model, kv)]
    if len(possible) < 2:
        return possible[0] if possible else None
    return min(possible, key=lambda group: _preference(state, model, group, kv))


def _preference(state: State, model: Model, group: Group, kv: int) -> tuple[float, bool, int, int]:
    placement = group.placements.get(model.spec.name)
    held = placement.resident if placement is not None else 0
    seconds = completion(state, model, group, kv)
    return round(seconds, 3), group.name not in model.targets, -held, -group.ledger.least_free


def completion(state: State, model: Model, group: Group, kv: int) -> float:
    """Seconds until a request that comes now may be complete there: what is ahead of it, its load, and its run."""
    refresh(state, group)
    ahead = (group.wanted.ahead - group.wanted.load(model.spec.name)) / 1e9
    missing = max(state.lacking(group, model, group.placements.get(model.spec.name), model.pages))
    short = missing + kv - group.ledger.least_free
    if short > 0:
        ahead += _room_seconds(state, group, model, short)
    return ahead + remaining_seconds(state, group, model) + run_seconds(state, model)


def _room_seconds(state: State, group: Group, model: Model, short: int) -> float:
    """What it costs to make room: reloading what idle models lose, or waiting for what runs."""
    others = [p for name, p in group.placements.items() if name != model.spec.name and name not in group.pinned]
    idle = sum(p.reserved for p in others if not p.is_busy)
    cost = min(short, idle) * load_seconds(state, group, model) / model.pages
    if idle < short:
        cost += max((_rest(state, p) for p in others if p.is_busy), default=0.0)
    return cost


def _rest(state: State, placement: Placement) -> float:
    """Seconds that what runs there may still take: who has run for longer than others do may run on for as long."""
    oldest = next(iter(placement.running), None)
    elapsed = state.now - state.requests[oldest].served if oldest is not None else 0.0
    return max(run_seconds(state, state.models[placement.model]), elapsed)
