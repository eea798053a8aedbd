"""The core, promise by promise, where a scenario of text would say too little: several groups, loss, time, removal."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from scheduler.core import actions as act
from scheduler.core import events as ev
from scheduler.core import invariants
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.transitions import Phase

CONFIG = CoreConfig(page_bytes=1, extent_pages=8, wait_bound=5.0, load_backoff=1.0, load_backoff_max=4.0)


class Desk:
    """A core with short words for what a test tells it."""

    def __init__(self, config: CoreConfig = CONFIG, **groups: int | tuple[int, int]) -> None:
        self.core = SchedulerCore(config)
        self.now = 0.0
        self.extent_seconds = 0.0  # until an extent is in
        for name, shape in groups.items():
            frames, ranks = shape if isinstance(shape, tuple) else (shape, 1)
            self.send(ev.WorkerUp(0.0, name, frames, ranks))

    def send(self, event: ev.Event) -> list[act.Action]:
        done = self.core.step(event)
        invariants.check(self.core)
        return done

    def add(self, model: str, *shards: tuple[int, ...]) -> None:
        self.send(ev.ModelAdded(self.now, ev.ModelSpec(model, shards)))

    def arrive(self, request: str, model: str, kv: int = 1, patience: float = 100.0) -> list[act.Action]:
        return self.send(ev.Arrived(self.now, request, model, kv, self.now + patience))

    def answer(self, actions: list[act.Action]) -> list[act.Action]:
        """Carry out everything that is about memory, and what follows from it; returns all actions in order."""
        said = list(actions)
        for action in said:
            match action:
                case act.PageIn():
                    self.now += self.extent_seconds
                    said += self.send(ev.PagedIn(self.now, action.group, action.model, action.epoch, action.last))
                case act.PageOut():
                    said += self.send(ev.PagedOut(self.now, action.group, action.model, action.epoch, action.keep))
                case act.GrantKv():
                    said += self.send(ev.KvReleased(self.now, action.group, action.model, action.epoch, action.frames))
        return said

    def at(self, seconds: float) -> list[act.Action]:
        self.now = seconds
        return self.send(ev.Tick(seconds))

    def finish(self, request: str) -> list[act.Action]:
        return self.answer(self.send(ev.Finished(self.now, request)))


T = TypeVar("T", bound=act.Action)


def only(actions: list[act.Action], kind: type[T]) -> list[T]:
    return [action for action in actions if isinstance(action, kind)]


# ---- groups


def test_a_model_runs_on_a_group_with_as_many_ranks_as_it_has_shards() -> None:
    desk = Desk(single=9, double=(9, 2))
    desk.add("A", (1, 2), (11, 12))
    assert only(desk.arrive("a", "A"), act.Serve) == [act.Serve("a", "double")]


def test_a_model_runs_on_a_group_of_its_mesh_not_just_of_as_many_ranks() -> None:
    desk = Desk()
    desk.send(ev.WorkerUp(0.0, "tensor", 9, ranks=2, pp=1))
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("A", ((1, 2), (11, 12)), pp=2)))
    assert not only(desk.arrive("a", "A"), act.Serve)
    assert only(desk.send(ev.WorkerUp(0.0, "pipeline", 9, ranks=2, pp=2)), act.Serve) == [act.Serve("a", "pipeline")]


def test_a_model_goes_where_most_is_free_and_then_where_it_is() -> None:
    desk = Desk(small=5, large=9)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5, 6))
    assert only(desk.answer(desk.arrive("a", "A")), act.Serve) == [act.Serve("a", "large")]
    desk.finish("a")
    desk.answer(desk.arrive("b", "B"))
    assert only(desk.arrive("a2", "A"), act.Serve) == [act.Serve("a2", "large")]


def test_requests_wait_while_there_is_no_group_and_are_served_when_one_appears() -> None:
    desk = Desk()
    desk.add("A", (1, 2))
    assert only(desk.arrive("a", "A"), act.WakeAt) == [act.WakeAt(100.0)]
    assert desk.core.request("a") == "waiting"
    assert only(desk.send(ev.WorkerUp(1.0, "late", 4)), act.Serve) == [act.Serve("a", "late")]


def test_requests_of_a_lost_group_wait_again_in_their_old_place() -> None:
    desk = Desk(g=5)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("first", "A"))
    desk.arrive("second", "A", kv=3)
    assert only(desk.send(ev.WorkerLost(1.0, "g", "killed")), act.Serve) == []
    desk.arrive("third", "A")
    served = only(desk.send(ev.WorkerUp(2.0, "g", 5)), act.Serve)
    assert [serve.request for serve in served] == ["first", "second", "third"]


def test_a_request_that_waits_again_has_its_full_patience_again() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("a", "A", patience=10.0))
    desk.send(ev.Started(1.0, "a"))
    assert desk.at(60.0) == [], "it has begun, so its deadline is met"
    desk.send(ev.WorkerLost(60.0, "g", "killed"))
    assert desk.core.request("a") == "waiting"
    assert only(desk.at(70.0), act.Fail)[0].reason == "timeout"


def test_a_request_that_was_served_and_never_began_runs_out_of_time() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.arrive("a", "A", patience=10.0)  # its pages do not come
    assert desk.core.request("a") == "running"
    done = desk.at(10.0)
    assert act.Cancel("a", "g") in done
    assert only(done, act.Fail)[0].reason == "timeout"
    assert desk.core.request("a") is None


def test_queued_work_moves_to_another_group_and_a_load_goes_on_there() -> None:
    desk = Desk(a=4, b=4)
    desk.add("A", (1, 2))
    lost = only(desk.send(ev.LoadWanted(0.0, "j", "A")), act.PageIn)[0].group
    other = "b" if lost == "a" else "a"
    moved = desk.send(ev.WorkerLost(1.0, lost, "killed"))
    assert only(moved, act.PageIn)[0].group == other
    assert act.Done("j") in desk.answer(moved)


@pytest.mark.parametrize(("first", "group"), [("a", "g"), ("b", "h")])
def test_who_waits_for_memory_goes_to_the_group_that_has_it_first(first: str, group: str) -> None:
    desk = Desk(g=4, h=4)
    for number, model in enumerate("ABC"):
        desk.add(model, (3 * number, 3 * number + 1, 3 * number + 2))
    served = [only(desk.answer(desk.arrive(model.lower(), model)), act.Serve) for model in "ABC"]
    assert served == [[act.Serve("a", "g")], [act.Serve("b", "h")], []]
    desk.now = 0.5
    assert act.Serve("c", group) in desk.finish(first)


def test_who_waits_for_longer_than_was_thought_looks_at_other_groups_again() -> None:
    """Runs took next to nothing, so it was not worth to displace B; but A runs on and on."""
    desk = Desk(g=4, h=4)
    for number, model in enumerate("ABC"):
        desk.add(model, (3 * number, 3 * number + 1, 3 * number + 2))
        desk.answer(desk.arrive(model.lower(), model))
    assert not only(desk.finish("b"), act.Serve)
    assert only(desk.answer(desk.at(0.1)), act.Serve) == [act.Serve("c", "h")]


def test_who_waits_on_a_group_leaves_it_when_a_pin_makes_it_too_small() -> None:
    desk = Desk(g=4, h=4)
    for number, model in enumerate("ABC"):
        desk.add(model, (3 * number, 3 * number + 1, 3 * number + 2))
        desk.answer(desk.arrive(model.lower(), model))
    assert not only(desk.finish("b"), act.Serve), "runs take no time here, so c waits for a's end"
    pinned = desk.answer(desk.send(ev.Pinned(0.0, "j", "A")))
    assert only(pinned, act.Serve) == [act.Serve("c", "h")]


def test_a_restart_that_was_not_announced_is_a_loss() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("a", "A"))
    again = desk.send(ev.WorkerUp(1.0, "g", 4))
    assert only(again, act.PageIn)
    assert only(again, act.Serve) == [act.Serve("a", "g")]


def test_a_request_cancelled_on_a_group_that_is_lost_ends_there() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("a", "A"))
    assert desk.send(ev.Cancelled(1.0, "a")) == [act.Cancel("a", "g")]
    assert desk.send(ev.Cancelled(1.0, "a")) == []
    assert only(desk.send(ev.WorkerLost(2.0, "g", "killed")), act.Fail)[0].id == "a"
    assert desk.core.unfinished == 0


# ---- time


def test_a_request_that_waits_too_long_fails_and_somebody_is_woken_for_it() -> None:
    desk = Desk(g=3)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A"))
    assert only(desk.arrive("b", "B", patience=2.0), act.WakeAt) == [act.WakeAt(2.0)]
    (failed,) = only(desk.at(2.0), act.Fail)
    assert (failed.id, failed.reason) == ("b", "timeout")


def test_the_next_tick_is_asked_for_when_the_one_before_has_come() -> None:
    """Not by what happens at the same moment, while the driver still waits to send that one."""
    desk = Desk(g=3)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B", patience=2.0)
    desk.now = 2.0
    desk.arrive("late", "B", patience=1.0)
    assert only(desk.at(2.0), act.WakeAt) == [act.WakeAt(3.0)]


def test_a_pinned_model_is_loaded_again_by_itself_after_a_failure() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    (page_in,) = only(desk.send(ev.Pinned(0.0, "j", "A")), act.PageIn)
    failed = desk.send(ev.PageInFailed(0.0, "g", "A", page_in.epoch, "short read"))
    assert only(failed, act.WakeAt) == [act.WakeAt(1.0)]
    view = desk.core.model("A")
    assert view is not None
    assert (view.phase, view.failure, view.retry_at) == (Phase.FAILED, "short read", 1.0)
    assert only(desk.at(1.0), act.PageIn)


def test_the_pause_after_a_failure_is_kept_by_what_comes_in_ahead_on_another_group() -> None:
    desk = Desk(replace(CONFIG, load_backoff=4.0), g=3)
    desk.extent_seconds = 0.1
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    for second in range(20):
        desk.now = float(second)
        desk.answer(desk.arrive(f"a{second}", "A"))
        desk.finish(f"a{second}")
    desk.now = 19.3
    desk.answer(desk.arrive("b", "B"))
    while desk.core.request("b") == "waiting":
        desk.answer(desk.at(desk.now + 0.01))
    desk.send(ev.WorkerUp(desk.now, "h", 3))
    (page_in,) = only(desk.arrive("a", "A"), act.PageIn)
    desk.send(ev.PageInFailed(desk.now, "h", "A", page_in.epoch, "short read"))
    desk.now = 20.3
    assert not only(desk.finish("b"), act.PageIn)


def test_the_pause_after_a_failure_is_kept_by_what_is_suspended_and_removed() -> None:
    """It has to come in once more, to end; its load has failed on another group."""
    desk = Desk(replace(CONFIG, time_slice=1.0), g=4)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5))
    desk.answer(desk.arrive("a", "A", kv=2))
    desk.arrive("b", "B")
    [suspend] = [action for second in range(1, 9) for action in only(desk.at(float(second)), act.Suspend)]
    desk.answer(desk.send(ev.Suspended(8.0, "g", "A", suspend.epoch, kv_frames=2)))
    desk.send(ev.WorkerUp(8.0, "h", 4))
    (page_in,) = only(desk.arrive("a2", "A"), act.PageIn)
    desk.send(ev.PageInFailed(8.0, "h", "A", page_in.epoch, "short read"))
    desk.send(ev.ModelRemoved(8.0, "A"))
    assert not only(desk.finish("b"), act.PageIn)
    assert [page_in.group for page_in in only(desk.answer(desk.at(9.0)), act.PageIn)] == ["g"]


def test_a_page_out_that_fails_is_tried_five_times_and_then_the_evict_fails() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("a", "A"))
    desk.finish("a")
    said = desk.send(ev.EvictWanted(0.0, "j", "A"))
    tries = 0
    while page_outs := only(said, act.PageOut):
        tries += 1
        said = desk.send(ev.PageOutFailed(desk.now, "g", "A", page_outs[0].epoch, "EINVAL"))
        said += desk.at(desk.now + CONFIG.load_backoff_max)
    assert tries == 5
    (failed,) = only(said, act.Fail)
    assert "EINVAL" in failed.message
    view = desk.core.model("A")
    assert view is not None
    assert (view.phase, view.failure) == (Phase.RESIDENT, "EINVAL")


# ---- memory


def test_kv_granted_beyond_need_is_taken_back_when_somebody_waits_for_it() -> None:
    desk = Desk(g=8)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A"))
    assert only(desk.answer(desk.send(ev.KvWanted(0.0, "g", "A", 9))), act.GrantKv)[-1].frames == 6
    said = desk.arrive("b", "B")
    assert only(said, act.GrantKv)[0].frames == 3
    assert not only(said, act.Serve)
    assert only(desk.answer(said), act.Serve) == [act.Serve("b", "g")]


def test_kv_that_nobody_else_can_use_is_lent_and_taken_back_when_it_is_due() -> None:
    desk = Desk(g=6)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B", kv=2)  # needs five frames, and three are free
    lent = desk.answer(desk.send(ev.KvWanted(0.0, "g", "A", 4)))
    assert [grant.frames for grant in only(lent, act.GrantKv)] == [4]
    desk.answer(desk.at(5.0))
    assert act.Serve("b", "g") in desk.finish("a")


def test_what_fits_is_not_held_up_by_what_does_not() -> None:
    desk = Desk(g=7)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5, 6, 7))
    desk.add("C", (8, 9))
    desk.answer(desk.arrive("a", "A"))
    assert not only(desk.arrive("b", "B"), act.Serve)
    assert only(desk.arrive("c", "C"), act.Serve) == [act.Serve("c", "g")]


def test_what_is_overdue_is_not_overtaken_by_what_would_take_its_memory() -> None:
    desk = Desk(g=7)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5, 6, 7))
    desk.add("C", (8, 9))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B")
    desk.at(5.0)
    assert not only(desk.arrive("c", "C"), act.Serve)
    assert act.Serve("b", "g") in desk.finish("a")


def test_who_waits_for_kv_past_its_bound_is_not_overtaken_by_who_passes_it_later() -> None:
    """Both are in. Nothing happens to B while it waits: time alone brings it before the others. Nor does A, which is
    overdue, too, take a page of B's for the frame that it lacks.
    """
    desk = Desk(g=7)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("b0", "B"))
    desk.finish("b0")
    desk.answer(desk.arrive("a0", "A"))
    desk.arrive("b", "B", kv=3)
    desk.at(5.0)
    assert not only(desk.arrive("a1", "A"), act.Serve), "A takes no more work"
    desk.at(10.5)
    said = desk.finish("a0")
    assert not only(said, act.PageOut)
    assert only(said, act.Serve) == [act.Serve("b", "g")]


def test_a_pin_that_leaves_too_little_fails_at_once_what_can_no_longer_be_served() -> None:
    desk = Desk(g=5)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5))
    desk.answer(desk.arrive("a", "A", kv=2))
    desk.arrive("b", "B")
    (failed,) = only(desk.send(ev.Pinned(0.0, "j", "A")), act.Fail)
    assert (failed.id, failed.reason) == ("b", "no_memory")
    assert "pinned models (A)" in failed.message


def test_a_model_pinned_on_one_group_may_run_on_another_when_the_request_is_too_large_for_its_home() -> None:
    desk = Desk(home=4)
    desk.add("A", (1, 2))
    desk.answer(desk.send(ev.Pinned(0.0, "j", "A")))
    desk.send(ev.WorkerUp(0.0, "large", 9))
    assert only(desk.arrive("a", "A", kv=5), act.Serve) == [act.Serve("a", "large")]
    view = desk.core.model("A")
    assert view is not None
    assert {placement.group for placement in view.placements if placement.resident} == {"home"}


def test_who_fits_nowhere_beside_the_pins_is_looked_at_again_when_a_pin_goes() -> None:
    desk = Desk(near=2, far=2)
    desk.add("A", (1,))
    desk.add("B", (2,))
    desk.answer(desk.send(ev.Pinned(0.0, "j", "B")))
    (home,) = [group.name for group in desk.core.groups() if group.free < 2]
    other = "far" if home == "near" else "near"
    desk.answer(desk.arrive("a", "A", kv=1))
    desk.send(ev.WorkerLost(1.0, other, "killed"))
    actions = desk.answer(desk.send(ev.Unpinned(2.0, "u", "B")))
    assert only(actions, act.Serve) == [act.Serve("a", home)]


def test_who_comes_first_in_the_queue_and_is_too_large_for_where_its_model_is_waits_elsewhere() -> None:
    desk = Desk(replace(CONFIG, max_running=1), small=4, large=9)
    desk.add("A", (1, 2, 3))
    desk.add("B", (4, 5, 6, 7, 8))
    desk.answer(desk.arrive("other", "B", kv=4))
    for request, kv in (("a", 1), ("b", 1), ("c", 4)):
        desk.answer(desk.arrive(request, "A", kv))
    assert only(desk.finish("a"), act.Serve) == [act.Serve("b", "small")]
    assert "A" in desk.core._state.groups["large"].wanted
    assert only(desk.finish("other"), act.Serve) == [act.Serve("c", "large")]


def test_who_does_not_fit_beside_a_pin_that_comes_waits_elsewhere() -> None:
    desk = Desk(one=5, two=5)
    for model, pages in (("A", (1, 2, 3, 4)), ("B", (5, 6)), ("C", (7, 8))):
        desk.add(model, pages)
    desk.answer(desk.arrive("b", "B"))
    desk.answer(desk.arrive("c", "C"))
    desk.arrive("a", "A")  # waits for either
    groups = desk.core._state.groups
    (here,) = [name for name, group in groups.items() if "A" in group.wanted]
    neighbour = "B" if "B" in groups[here].placements else "C"
    desk.answer(desk.send(ev.Pinned(0.0, "j", neighbour)))
    assert [name for name, group in groups.items() if "A" in group.wanted] == ["two" if here == "one" else "one"]


# ---- the link


def test_a_page_in_that_is_decided_extent_by_extent_has_two_on_their_way() -> None:
    """So that the link never waits for a decision."""
    desk = Desk(replace(CONFIG, extent_pages=2), g=20)
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("A", (tuple(range(12)),), page_seconds=0.1, run_seconds=0.5)))
    page_ins = only(desk.arrive("a", "A"), act.PageIn)
    assert [(one.first, one.last) for one in page_ins] == [(0, 2), (2, 4)]
    first = page_ins[0]
    following = only(desk.send(ev.PagedIn(2.0, "g", "A", first.epoch, first.last)), act.PageIn)
    assert [(one.first, one.last) for one in following] == [(4, 6)]


# ---- coming and going


def test_a_removed_model_finishes_what_runs_and_then_its_pages_go() -> None:
    desk = Desk(g=5)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("b", "B", kv=1))
    desk.answer(desk.arrive("waits", "A", kv=3))
    removed = desk.send(ev.ModelRemoved(0.0, "A"))
    assert [(failed.id, failed.reason) for failed in only(removed, act.Fail)] == [("waits", "removed")]
    assert not only(desk.send(ev.ModelRemoved(0.0, "B")), act.PageOut)
    assert only(desk.arrive("late", "B"), act.Reject)[0].reason == "model_not_found"
    assert only(desk.finish("b"), act.PageOut)
    assert desk.core.models() == ()
    desk.add("B", (3, 4, 5))
    assert only(desk.arrive("again", "B"), act.Serve)


def test_a_draining_core_admits_nothing_and_finishes_what_it_admitted() -> None:
    desk = Desk(g=3)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B")
    desk.send(ev.DrainBegan(0.0))
    assert only(desk.arrive("c", "A"), act.Reject)[0].reason == "draining"
    assert only(desk.send(ev.LoadWanted(0.0, "j", "A")), act.Reject)[0].reason == "draining"
    assert act.Serve("b", "g") in desk.finish("a")
    desk.finish("b")
    assert desk.core.unfinished == 0


def test_a_load_on_a_full_group_waits_for_busy_models() -> None:
    desk = Desk(g=3)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A"))
    assert not only(desk.send(ev.LoadWanted(0.0, "j", "B")), act.PageIn)
    assert act.Done("j") in desk.finish("a")


def test_the_same_events_give_the_same_actions() -> None:
    def run() -> list[act.Action]:
        desk = Desk(g=6, h=5)
        for name, pages in {"A": (1, 2, 3), "B": (1, 4, 5), "C": (6, 7, 8, 9)}.items():
            desk.add(name, pages)
        said = []
        for at in range(12):
            desk.now = float(at)
            said += desk.answer(desk.arrive(f"r{at}", "ABC"[at * 7 % 3], kv=at % 2 + 1))
            if at % 3 == 2:
                said += desk.finish(f"r{at - 2}")
        return said

    assert run() == run()


def test_a_request_that_its_workers_keep_dying_with_is_given_up() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.arrive("a", "A")
    for death in (1.0, 2.0):
        assert only(desk.send(ev.WorkerLost(death, "g", "killed")), act.Fail) == []
        assert only(desk.send(ev.WorkerUp(death, "g", 4)), act.Serve) == [act.Serve("a", "g")]
    [failed] = only(desk.send(ev.WorkerLost(3.0, "g", "killed")), act.Fail)
    assert failed.reason == "engine_failed"
    assert "3 times" in failed.message
    assert desk.core.request("a") is None


def test_a_time_to_live_can_change_while_a_model_is_idle_or_busy() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("r1", "A"))
    spec = ev.ModelSpec("A", ((1, 2),))
    desk.send(ev.ModelChanged(0.0, replace(spec, ttl=0.0)))
    assert desk.core.model("A").resident == 2  # it runs
    assert [type(action) for action in desk.finish("r1")].count(act.PageOut) == 1
    desk.answer(desk.arrive("r2", "A"))
    desk.finish("r2")
    desk.answer(desk.arrive("r3", "A"))
    desk.send(ev.ModelChanged(0.0, replace(spec, ttl=5.0)))
    desk.finish("r3")
    assert not any(isinstance(action, act.PageOut) for action in desk.at(4.0))
    desk.send(ev.ModelChanged(4.0, spec))
    assert not any(isinstance(action, act.PageOut) for action in desk.at(60.0))
    assert any(isinstance(action, act.PageOut) for action in desk.send(ev.ModelChanged(60.0, replace(spec, ttl=5.0))))
    desk.send(ev.ModelChanged(60.0, ev.ModelSpec("unknown", ((1,),))))  # one that went meanwhile


# ---- taking turns, and why


def test_a_model_that_came_in_has_its_turn_before_it_is_suspended() -> None:
    desk = Desk(CoreConfig(page_bytes=1, wait_bound=0.2, time_slice=2.0), g=4)
    desk.add("A", (1, 2, 3))
    desk.add("B", (11, 12, 13))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B")
    assert not only(desk.at(1.9), act.Suspend)
    assert [suspend.model for suspend in only(desk.at(2.0), act.Suspend)] == ["A"]


def test_a_model_whose_batch_is_full_comes_to_another_group_too() -> None:
    desk = Desk(CoreConfig(page_bytes=1, max_running=1), g=4, h=4)
    desk.add("A", (1, 2))
    desk.answer(desk.arrive("a0", "A"))
    for number in range(1, 8):
        desk.answer(desk.arrive(f"a{number}", "A"))
    view = desk.core.model("A")
    assert view is not None
    assert sorted(placement.group for placement in view.placements if placement.running) == ["g", "h"]


def test_an_idle_model_goes_when_its_time_to_live_is_over() -> None:
    desk = Desk(g=4)
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("A", ((1, 2),), ttl=3.0)))
    desk.answer(desk.arrive("a", "A"))
    desk.at(50.0)
    desk.finish("a")  # a long answer: the clock starts at its end
    assert not only(desk.at(52.9), act.PageOut)
    assert only(desk.at(53.0), act.PageOut)


def test_a_bound_of_ones_own_goes_before_the_common_one() -> None:
    desk = Desk(g=5)
    desk.add("A", (1, 2, 3))
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("B", ((11, 12, 13),), max_wait=1.0)))
    desk.answer(desk.arrive("a", "A"))
    desk.arrive("b", "B")
    desk.at(1.0)
    assert not only(desk.arrive("a2", "A"), act.Serve), "A takes no more work"
    assert act.Serve("b", "g") in desk.finish("a")


def test_decisions_say_why_in_numbers() -> None:
    desk = Desk(g=4)
    desk.add("A", (1, 2, 3))
    desk.add("B", (11, 12, 13))
    desk.answer(desk.arrive("a", "A"))
    desk.finish("a")
    desk.now = 2.0
    desk.answer(desk.arrive("b", "B"))
    (decision,) = [decision for decision in desk.core.decisions("A") if decision.kind == "evicted"]
    assert decision.at == 2.0
    assert "3 of its 3 pages go from g for B" in decision.message
    assert "last used 2.00 s ago" in decision.message
    assert desk.core.decisions("nobody") == ()


@pytest.mark.parametrize(("evicted_at", "comes"), [(None, True), (20, False), (10, True)])
def test_what_was_evicted_by_hand_comes_in_ahead_only_once_it_is_asked_for_again(
    evicted_at: int | None, comes: bool
) -> None:
    """A is asked for every second, up to the 19th; then B has its memory, and an idle link would bring it in again."""
    desk = Desk(g=3)
    desk.extent_seconds = 0.1
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))

    def ask(model: str, at: float) -> None:
        desk.now = at
        desk.answer(desk.arrive(f"{model}{at}", model))
        while desk.core.request(f"{model}{at}") == "waiting":
            desk.answer(desk.at(desk.now + 0.01))
        desk.finish(f"{model}{at}")

    for second in range(20):
        if second == evicted_at:
            desk.answer(desk.send(ev.EvictWanted(desk.now, "j", "A")))
        ask("A", float(second))
    ask("B", 19.3)
    if evicted_at == 20:
        assert only(desk.send(ev.EvictWanted(desk.now, "j", "A")), act.Done)
    said = [action for tick in range(40) for action in desk.answer(desk.at(max(desk.now, 19.7 + tick / 20)))]
    assert any(page_in.model == "A" for page_in in only(said, act.PageIn)) is comes


def test_what_is_suspended_and_cannot_go_on_beside_a_pin_that_came_meanwhile_is_told() -> None:
    desk = Desk(replace(CONFIG, time_slice=1.0), g=6)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4))
    desk.answer(desk.arrive("a", "A", kv=4))
    desk.arrive("b", "B")
    [suspend] = [action for second in range(1, 9) for action in only(desk.at(float(second)), act.Suspend)]
    assert only(desk.send(ev.Pinned(8.0, "j", "B")), act.Done), "A may still end"
    failed = only(desk.send(ev.Suspended(8.0, "g", "A", suspend.epoch, kv_frames=4)), act.Fail)
    assert [(fail.id, fail.reason) for fail in failed] == [("a", "no_memory")]


def test_what_is_suspended_goes_on_though_there_is_not_memory_for_all_that_had_begun() -> None:
    """A batch may have begun more than it had blocks for: those it preempted wait for them still."""
    desk = Desk(replace(CONFIG, time_slice=1.0), g=6)
    desk.add("A", (1, 2))
    desk.add("B", (3, 4, 5))
    for request in ("a1", "a2"):
        desk.answer(desk.arrive(request, "A", kv=2))
    desk.arrive("b", "B")
    [suspend] = [action for second in range(1, 9) for action in only(desk.at(float(second)), act.Suspend)]
    said = desk.answer(desk.send(ev.Suspended(8.0, "g", "A", suspend.epoch, kv_frames=5)))
    assert not only(said, act.Fail)
    assert only(said, act.Serve) == [act.Serve("b", "g")]
    [resume] = only(desk.finish("b"), act.Resume)
    assert resume.kv_frames == 2, "as much as it had"


def test_who_finds_the_queue_full_is_told_when_as_many_as_wait_will_have_been_served() -> None:
    """By what the model's own requests take, and what brings it in: others may be a hundred times as quick."""
    desk = Desk(replace(CONFIG, max_queue=6, max_running=2), slow=3, quick=(3, 2))
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("slow", ((1, 2),), page_seconds=1.0, run_seconds=8.0)))
    desk.send(ev.ModelAdded(0.0, ev.ModelSpec("quick", ((1, 2), (3, 4)), run_seconds=0.1)))

    def retry_after(model: str) -> float | None:
        arrivals = [desk.arrive(f"{model}{number}", model) for number in range(9)]
        said = [rejected for actions in arrivals for rejected in only(actions, act.Reject)]
        assert {rejected.reason for rejected in said} == {"queue_full"}
        return said[0].retry_after

    assert retry_after("quick") == 1.0, "soon, but not at once"
    # Six wait for two places of eight seconds each, once the model is in.
    assert retry_after("slow") == pytest.approx(24.0 + 2.0)
