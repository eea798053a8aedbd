"""A model's status as people read it, put together from the core's view, the model itself and its last load."""

from __future__ import annotations

from scheduler.core.transitions import Phase
from scheduler.core.view import ModelView
from scheduler.interface import LoadRecord, ModelPlace, ModelStatus, ServedModel


def model_status(
    model: ServedModel,
    view: ModelView | None,
    last_load: LoadRecord | None,
    clock_to_wall: float,
    oldest_wait: float = 0.0,
) -> ModelStatus:
    """`view` is None before the core has heard of the model. `clock_to_wall` is what to add to the core's times.

    Pages are counted in one rank, since ranks move in lockstep; bytes are those of all ranks.
    """
    ranks = len(model.page_hashes)
    placements = () if view is None else view.placements
    last_finish = None if view is None else view.last_finish
    return ModelStatus(
        name=model.name,
        group=None if view is None else view.group,
        state="absent" if view is None else view.phase.value,
        reason=None if view is None else view.failure,
        pinned=view is not None and view.pinned,
        resident_pages=0 if view is None else view.resident,
        total_pages=len(model.page_hashes[0]),
        # The last page of a shard may be cut short, so a whole model is less than its pages.
        resident_bytes=sum(min(model.nbytes, its.resident * ranks * model.page_bytes) for its in placements),
        total_bytes=model.nbytes,
        waiting=0 if view is None else view.waiting,
        running=0 if view is None else view.running,
        kv_frames=sum(its.kv_frames for its in placements),
        last_used=None if last_finish is None else last_finish + clock_to_wall,
        last_load=last_load,
        oldest_wait=oldest_wait,
        places=tuple(
            ModelPlace(its.group, its.phase.value, its.resident, its.kv_frames, its.running)
            for its in placements
            if its.phase is not Phase.ABSENT or its.kv_frames
        ),
        profiled=model.profiled,
    )
