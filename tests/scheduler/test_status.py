"""What people read of a model that is on several groups."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.transitions import Phase
from scheduler.core.view import ModelView, PlacementView
from scheduler.interface import ModelPlace
from scheduler.status import model_status
from tests.scheduler.fake_group import PAGE_BYTES
from tests.scheduler.house import served


def test_replicas_are_told_apart_and_their_memory_is_added_up() -> None:
    model = replace(served("a", 4), nbytes=4 * PAGE_BYTES - 100)
    placements = (
        PlacementView("near", Phase.RESIDENT, resident=4, reserved=4, kv_frames=2, running=1),
        PlacementView("far", Phase.LOADING, resident=1, reserved=4, kv_frames=1, running=0),
        PlacementView("left", Phase.ABSENT, resident=0, reserved=0, kv_frames=0, running=0),
    )
    view = ModelView("a", 4, "near", Phase.RESIDENT, 4, 2, False, None, 0, 1, None, None, None, placements)
    status = model_status(model, view, None, 0.0)
    assert (status.group, status.state, status.resident_pages) == ("near", "resident", 4)
    assert status.places == (ModelPlace("near", "resident", 4, 2, 1), ModelPlace("far", "loading", 1, 1, 0))
    assert status.resident_bytes == 5 * PAGE_BYTES - 100
    assert status.kv_frames == 3
