"""The map of frames counts what is there once, and says whose it is."""

from scheduler.core.transitions import Phase
from scheduler.core.view import GroupView, ModelView, PlacementView
from scheduler.interface import Holding
from scheduler.memory_map import memory_map
from tests.scheduler.house import served

PAGE = 2 << 20


def view(name: str, group: str, resident: int, reserved: int, kv: int = 0) -> ModelView:
    place = PlacementView(group, Phase.RESIDENT, resident, reserved, kv, 0)
    return ModelView(
        name, 4, group, Phase.RESIDENT, resident, kv, False, None, 0, 0, None, None, None, placements=(place,)
    )


def test_shared_pages_lie_in_one_frame_and_belong_to_all_who_have_them() -> None:
    models = {name: served(name, 4, shared=2) for name in ("a", "b")}
    views = [view("a", "g0", 4, 4, kv=3), view("b", "g0", 3, 3)]
    (group,) = memory_map(models, views, [GroupView("g0", 1, True, 20, 10)], PAGE)
    assert (group.group, group.frames) == ("g0", 20)
    assert set(group.holdings) == {
        Holding(("a", "b"), "weights", 2),
        Holding(("a",), "weights", 2),
        Holding(("b",), "weights", 1),
        Holding(("a",), "kv", 3),
    }


def test_frames_reserved_for_pages_on_their_way_are_told_apart() -> None:
    (group,) = memory_map({"a": served("a", 4)}, [view("a", "g0", 1, 4)], [GroupView("g0", 1, True, 8, 4)], PAGE)
    assert set(group.holdings) == {Holding(("a",), "weights", 1), Holding(("a",), "loading", 3)}


def test_groups_have_maps_of_their_own_and_an_empty_one_is_there_too() -> None:
    models = {name: served(name, 4) for name in ("a", "b")}
    groups = [GroupView("g0", 1, True, 8, 0), GroupView("g1", 1, False, 0, 0), GroupView("g2", 2, True, 8, 0)]
    maps = memory_map(models, [view("a", "g0", 2, 2), view("b", "g2", 4, 4)], groups, PAGE)
    assert [(one.group, one.up, [h.models for h in one.holdings]) for one in maps] == [
        ("g0", True, [("a",)]),
        ("g1", False, []),
        ("g2", True, [("b",)]),
    ]
