"""Whether a model can fit at all, whatever is paged out: sizes against capacity and against what is pinned."""

from __future__ import annotations

from typing import Final

from scheduler.core.group import Group
from scheduler.core.ledger import distinct_pages
from scheduler.core.model import Model
from scheduler.core.state import State
from scheduler.core.view import KvRoom

MINIMAL_KV: Final = 1
"""KV frames a group must have left beside its pinned models."""


def matching_groups(state: State, model: Model) -> list[Group]:
    """Groups of the mesh that the model was packed for, whether they are up or expected back."""
    return list(state.shape(model).groups.values())


def pinned_on(group: Group, beside: Model | None = None) -> list[Model]:
    """Models pinned on a group, in the order in which they were pinned; `beside` is left out."""
    return [model for model in group.pinned.values() if model is not beside]


def frames_needed(group: Group, model: Model, kv_frames: int) -> int:
    """Frames on the fullest rank that hold the model, its KV, and all that is pinned there."""
    pinned = pinned_on(group, model) if group.pinned else []
    if not pinned:
        return model.most_pages + kv_frames
    together = [model.spec.shards, *(other.spec.shards for other in pinned)]
    return max(distinct_pages(together, rank) for rank in range(group.ranks)) + kv_frames


def can_hold(group: Group, model: Model, kv_frames: int) -> bool:
    return frames_needed(group, model, kv_frames) <= group.ledger.capacity


def set_home(state: State, model: Model, group: Group | None) -> None:
    """Pin the model on a group, or nowhere."""
    before = state.groups.get(model.home) if model.home is not None else None
    if before is not None:
        before.pinned.pop(model.spec.name, None)
        state.touched_groups[before.name] = None
    model.home = group.name if group is not None else None
    if group is not None:
        group.pinned[model.spec.name] = model
        state.touched_models |= dict.fromkeys(group.wanted)  # what waits there may not fit beside it
    shape = state.shape(model)
    shape.changed()
    state.touched_models |= shape.homeless
    state.touched_models[model.spec.name] = None


def kv_room(state: State, model: Model) -> KvRoom | None:
    """What the best group has; None while no group of the right shape is known."""
    if not state.shape(model).groups:
        return None
    sizes = state.shape(model).sizes
    beside_pins = [group.ledger.capacity - frames_needed(group, model, 0) for group in sizes.pinned]
    if len(sizes.pinned) < len(state.shape(model).groups):
        beside_pins.append(sizes.largest_unpinned - model.most_pages)
    return KvRoom(now=max(beside_pins), ever=sizes.largest - model.most_pages)


def never_fits(state: State, model: Model, kv_frames: int) -> bool:
    """Whether waiting is in vain. While no group of the right shape is known, there is hope."""
    if model.most_pages + kv_frames <= state.shape(model).sizes.largest_unpinned:
        return False
    room = kv_room(state, model)
    return room is not None and room.now < kv_frames


def why_not(state: State, model: Model, kv_frames: int) -> str:
    """A sentence for `never_fits`: memory needed and available on the best group, and who is pinned there."""
    name = model.spec.name
    groups = matching_groups(state, model)
    if not groups:
        return f"No group of {len(model.spec.shards)} workers has come up yet, which model {name} needs."
    best = max(groups, key=lambda group: group.ledger.capacity - frames_needed(group, model, kv_frames))
    alone = model.most_pages
    pinned = pinned_on(best, model)
    taken = frames_needed(best, model, kv_frames) - alone - kv_frames
    available = best.ledger.capacity - taken

    def size(frames: int) -> str:
        count = frames * state.config.page_bytes
        return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count} bytes"

    sentence = (
        f"Model {name} needs {size(alone + kv_frames)} ({size(alone)} of weights, {size(kv_frames)} of KV cache), "
        f"but group {best.name} can give it {size(available)} of its {size(best.ledger.capacity)}"
    )
    if not pinned:
        return sentence + "; use a group with more memory, or ask for fewer tokens."
    names = ", ".join(other.spec.name for other in pinned)
    return sentence + f": pinned models ({names}) keep {size(taken)}. Unpin one of them."


def choose_home(state: State, model: Model) -> Group | None:
    """A group on which the model can be pinned beside those pinned there already."""

    def preference(group: Group) -> tuple[bool, int, int]:
        placement = group.placements.get(model.spec.name)
        return group.up, placement.resident if placement else 0, group.ledger.least_free

    groups = [group for group in matching_groups(state, model) if can_hold(group, model, MINIMAL_KV)]
    return max(groups, key=preference, default=None)


def rehome(state: State) -> None:
    """A group's size changed: keep every pin that still fits, the oldest first, and find the others a new home."""
    pinned = sorted((m for m in state.models.values() if m.pinned is not None), key=lambda m: m.pinned or 0)
    homes = [(model, model.home) for model in pinned]
    for model in pinned:
        set_home(state, model, None)
    for model, before in homes:
        group = state.groups.get(before) if before is not None else None
        if group is None or not can_hold(group, model, MINIMAL_KV):
            group = choose_home(state, model)
        set_home(state, model, group)
