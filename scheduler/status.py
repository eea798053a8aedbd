"""A model's status as people read it, put together from the core's view, the model itself and its last load."""

from __future__ import annotations

from scheduler.core.view import ModelView
from scheduler.interface import LoadRecord, ModelStatus, ServedModel


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
    resident = 0 if view is None else view.resident
    last_finish = None if view is None else view.last_finish
    return ModelStatus(
        name=model.name,
        group=None if view is None else view.group,
        state="absent" if view is None else view.phase.value,
        reason=None if view is None else view.failure,
        pinned=view is not None and view.pinned,
        resident_pages=resident,
        total_pages=len(model.page_hashes[0]),
        # The last page of a shard may be cut short, so a whole model is less than its pages.
        resident_bytes=min(model.nbytes, resident * ranks * model.page_bytes),
        total_bytes=model.nbytes,
        waiting=0 if view is None else view.waiting,
        running=0 if view is None else view.running,
        kv_frames=0 if view is None else view.kv_frames,
        last_used=None if last_finish is None else last_finish + clock_to_wall,
        last_load=last_load,
        oldest_wait=oldest_wait,
    )
