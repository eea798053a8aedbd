"""The simulator's clock, links and processors, by figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.core import actions, events
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.core.invariants import check
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.outcome import Outcome
from scheduler.simulate.simulator import Core, Simulator, Stuck
from scheduler.simulate.workload import Workload, gamma

PAGE = 1000
PAGES = 10
LOAD, PASS = 1.0, 0.1


def model(name: str, first: int, *, output_pass: float = PASS, **costs: float) -> SimulatedModel:
    """Ten pages of which each takes 0.1 s."""
    return SimulatedModel(ModelSpec(name, (tuple(range(first, first + PAGES)),)), output_pass, **costs)  # type: ignore[arg-type]


def group(name: str = "g0", frames: int = 20, **rates: float) -> GroupSpec:
    return GroupSpec(name, frames, PAGE, **({"host_rate": PAGE * PAGES / LOAD} | rates))  # type: ignore[arg-type]


def asked(*calls: tuple[float, str], output: int = 1) -> Workload:
    models = tuple(dict.fromkeys(name for _, name in calls))
    ones = np.ones(len(calls), np.int64)
    which = np.array([models.index(name) for _, name in calls], np.int64)
    return Workload(models, np.array([at for at, _ in calls]), which, ones, ones * output)


def simulate(workload: Workload, *models: SimulatedModel, groups: Sequence[GroupSpec] = (), **how: object) -> Outcome:
    core = SchedulerCore(CoreConfig(page_bytes=PAGE, extent_pages=1))
    return Simulator(core, groups or [group()], models, after_step=lambda _: check(core), **how).run(workload)  # type: ignore[arg-type]


def test_a_cold_model_answers_when_its_last_page_has_run() -> None:
    outcome = simulate(asked((0.0, "a")), model("a", 0))
    assert outcome.models["a"].latencies == pytest.approx([LOAD + PASS / PAGES])
    assert outcome.bytes_by_source["host"] == PAGES * PAGE
    assert outcome.busy_seconds["g0"] == pytest.approx(PASS)


def test_without_a_streaming_start_the_whole_pass_comes_after_the_load() -> None:
    outcome = simulate(asked((0.0, "a")), model("a", 0), streaming=False)
    assert outcome.models["a"].latencies == pytest.approx([LOAD + PASS])


def test_requests_of_one_moment_share_a_pass_and_later_ones_wait_for_its_end() -> None:
    outcome = simulate(asked((0.0, "a"), (2.0, "a"), (2.0, "a"), (2.05, "a")), model("a", 0))
    assert outcome.models["a"].latencies[1:] == pytest.approx([PASS, PASS, 2 * PASS - 0.05])


def test_models_take_turns_at_the_processor() -> None:
    outcome = simulate(asked((0.0, "a"), (1.0, "b"), (5.0, "a"), (5.0, "b")), model("a", 0), model("b", 100))
    assert sorted([outcome.models["a"].latencies[1], outcome.models["b"].latencies[1]]) == pytest.approx([0.1, 0.2])


def test_each_token_of_an_answer_takes_a_pass_and_each_prompt_token_its_time() -> None:
    outcome = simulate(asked((0.0, "a"), (2.0, "a"), output=3), model("a", 0, token_seconds=0.01))
    assert outcome.models["a"].latencies[1] == pytest.approx(3 * (PASS + 0.01))
    assert outcome.models["a"].first_tokens[1] == pytest.approx(PASS + 0.01)


def test_a_page_that_another_model_holds_moves_no_bytes() -> None:
    sibling = SimulatedModel(ModelSpec("b", ((*range(8), 100, 101),)), PASS)
    outcome = simulate(asked((0.0, "a"), (2.0, "b")), model("a", 0), sibling)
    assert outcome.models["b"].latencies == pytest.approx([2 * LOAD / PAGES + PASS / PAGES])
    assert outcome.bytes_by_source == {"alias": 8 * PAGE, "host": 12 * PAGE, "storage": 0}
    assert outcome.bytes_moved == 12 * PAGE


def test_groups_of_a_node_share_its_storage() -> None:
    slow = {"storage_rate": PAGE * PAGES / LOAD, "host_rate": 1e12}
    workload = asked((0.0, "a"), (0.0, "b"))
    apart = [group("g0", 11, node="n0", **slow), group("g1", 11, node="n1", **slow)]
    together = [group("g0", 11, **slow), group("g1", 11, **slow)]
    models = model("a", 0), model("b", 100)
    assert simulate(workload, *models, groups=apart).latencies == pytest.approx([1.01, 1.01])
    shared = simulate(workload, *models, groups=together)
    assert shared.latencies == pytest.approx([2.01, 2.01], rel=0.06)  # the first page of one is read alone
    assert shared.bytes_by_source["storage"] == 2 * PAGES * PAGE


def test_the_host_tier_keeps_what_was_used_last() -> None:
    rates = {"storage_rate": 100.0, "host_rate": 1e6, "host_pages": PAGES}
    workload = asked((0.0, "a"), (200.0, "b"), (400.0, "b"), (600.0, "a"))
    outcome = simulate(workload, model("a", 0), model("b", 100), groups=[group(frames=10, **rates)])
    assert outcome.bytes_by_source == {"alias": 0, "host": 0, "storage": 3 * PAGES * PAGE}
    assert outcome.models["a"].page_ins == 2


def test_the_same_workload_gives_the_same_outcome() -> None:
    workload = gamma({"a": 2.0, "b": 2.0, "c": 1.0}, 1.0, 30.0, seed=3)
    models = [model(name, 100 * index) for index, name in enumerate("abc")]
    one, two = (simulate(workload, *models, groups=[group("g0"), group("g1", 10)]) for _ in range(2))
    assert one == two
    assert len(one.latencies) == len(workload)


def test_what_a_request_waits_for_too_long_fails_it() -> None:
    outcome = simulate(asked((0.0, "a")), model("a", 0), timeout=0.5)
    assert outcome.reasons == {"timeout": 1}
    assert outcome.summary()["failed"] == 1


def test_a_core_that_forgets_a_request_is_found_out() -> None:
    class Forgetful(Core):
        def step(self, event: events.Event) -> Sequence[actions.Action]:
            return []

    with pytest.raises(Stuck, match=r"1 requests are open at 3\.000 s, among them r0"):
        Simulator(Forgetful(), [group()], [model("a", 0)]).run(asked((3.0, "a")))


class Turns(Core):
    """Serves what comes, and suspends and resumes the model at given times, as a core with time slices does."""

    def __init__(self) -> None:
        self.reports: list[events.Event] = []

    def step(self, event: events.Event) -> Sequence[actions.Action]:
        match event:
            case events.Arrived(at=0.0):
                return [
                    actions.PageIn("g0", "a", 0, PAGES, 1),
                    actions.Serve(event.request, "g0"),
                    actions.WakeAt(1.35),
                ]
            case events.Tick(at=1.35):
                return [actions.Suspend("g0", "a", 2), actions.WakeAt(5.0)]
            case events.Tick(at=5.0):
                return [actions.Resume("g0", "a", 1, 3)]
            case events.Suspended() | events.Resumed() | events.Finished():
                self.reports.append(event)
        return []


def test_a_model_is_suspended_between_two_passes_and_goes_on_where_it_was() -> None:
    core = Turns()
    outcome = Simulator(core, [group()], [model("a", 0, kv_frame_tokens=100)]).run(asked((0.0, "a"), output=5))
    suspended, resumed, finished = core.reports
    assert isinstance(suspended, events.Suspended)
    assert suspended.kv_frames == 1
    # All is in at 1.0; passes end at 1.1, 1.2, 1.3, 1.4: the one under way ends, then a frame takes 0.1 s to copy.
    assert suspended.at == pytest.approx(1.4 + PAGE / (PAGE * PAGES / LOAD))
    assert resumed.at == pytest.approx(5.1)
    assert finished.at == pytest.approx(5.2)
    assert outcome.models["a"].suspensions == 1


def test_a_model_that_is_about_to_be_idle_goes_rather_than_one_that_is_needed_soon() -> None:
    """`once` is on its way and answers within a moment when `next` has waited for what the return of `often` costs."""
    often = [(0.4 + second, "often") for second in range(1, 31)]
    calls = sorted([*often, (0.0, "idle"), (25.5, "once"), (25.52, "next")])
    models = [model(name, 100 * number) for number, name in enumerate(("often", "idle", "once", "next"))]
    outcome = simulate(asked(*calls), *models)
    assert outcome.models["often"].page_ins == 1
    assert outcome.models["next"].latencies[0] < 2 * LOAD + 2 * PASS
