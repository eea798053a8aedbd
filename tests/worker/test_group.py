"""A group notices what is wrong with its workers, says so once, and restarts them; on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from engine.request import KvReleased, Started
from swapper.errors import NoPlace, WorkerError
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from tests.worker.fake_worker import FakeWorker
from worker.group import WorkerGroup
from worker.protocol import (
    FailPageIn,
    GroupLost,
    GroupUp,
    PagedOut,
    PageInFailed,
    PageOutFailed,
    Report,
    WorkerReady,
    WorkerSpec,
)

HEARTBEAT = 5.0
STALL = 60.0


class House:
    """A group of fake workers, its only place, every worker it ever had, and everything it ever said."""

    def __init__(self, ranks: int = 1) -> None:
        self.workers: list[FakeWorker] = []
        self.no_place: NoPlace | None = None
        self.is_taken = False
        self.heard: list[Report | GroupUp | GroupLost] = []
        self.start_error: Exception | None = None
        self.born = asyncio.Event()  # set whenever a worker is made
        specs = [WorkerSpec("g", rank, frames=8 + rank, page_bytes=2 << 20, tp=ranks) for rank in range(ranks)]
        self.group = WorkerGroup("g", specs, self._take, heartbeat_timeout=HEARTBEAT, stall_timeout=STALL)
        self.group.subscribe(self._hear)

    async def _take(self, specs: Sequence[WorkerSpec]) -> House:
        assert not self.is_taken
        if self.no_place is not None:
            raise self.no_place
        self.is_taken = True
        return self

    async def give_back(self) -> None:
        self.is_taken = False

    def worker(self, spec: WorkerSpec) -> FakeWorker:
        self.workers.append(FakeWorker(spec, self.start_error))
        self.born.set()
        return self.workers[-1]

    def _hear(self, reports: Sequence[Report | GroupUp | GroupLost]) -> None:
        self.heard += reports

    @property
    def latest(self) -> FakeWorker:
        return self.workers[-1]

    async def __aenter__(self) -> House:
        await self.group.start()
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.group.stop()
        assert all(worker.killed for worker in self.workers)
        assert not self.is_taken


@virtual_time
async def test_a_started_group_is_up_with_the_frames_of_its_smallest_rank() -> None:
    async with House(ranks=2) as house:
        assert house.heard == [GroupUp(frames=8, tp=2)]
        assert {worker.rendezvous for worker in house.workers} == {"10.0.0.1:1000"}, "the leader's address"
        assert [(status.rank, status.state, status.device) for status in house.group.workers] == [
            (0, "up", "cpu"),
            (1, "up", "cpu"),
        ]


@virtual_time
async def test_a_group_that_cannot_start_says_why_and_leaves_no_worker() -> None:
    house = House(ranks=2)
    house.start_error = WorkerError("the pool is larger than the memory")
    with pytest.raises(WorkerError, match="larger than the memory"):
        await house.group.start()
    assert house.heard == []
    assert all(worker.killed for worker in house.workers)


@virtual_time
async def test_commands_go_to_every_rank_and_reports_come_in_order() -> None:
    async with House(ranks=2) as house:
        house.group.post([])
        house.workers[0].report(Started("a"), KvReleased("m", 1, 1))
        await settle()
        house.workers[1].report(KvReleased("m", 1, 1))
        house.workers[0].report(Started("b"))
        await settle()
        assert house.heard[1:] == [Started("a"), KvReleased("m", 1, 1), Started("b")]


@virtual_time
async def test_an_idle_worker_keeps_the_group_up_and_its_heartbeat_fresh() -> None:
    async with House() as house:
        await pass_time(10 * STALL)
        assert house.heard == [GroupUp(8)]
        [status] = house.group.workers
        assert status.heartbeat is not None
        assert status.heartbeat_age is not None
        assert status.heartbeat_age < 1.0


@virtual_time
async def test_a_dead_worker_is_told_at_once_and_restarted_at_once() -> None:
    async with House(ranks=2) as house:
        house.workers[0].die()
        await settle()
        assert house.heard[1:] == [GroupLost("worker g/0: its process died"), GroupUp(8, tp=2)]
        assert all(worker.killed for worker in house.workers[:2]), "a group is rebuilt whole"
        assert [status.restarts for status in house.group.workers] == [1, 1]


@virtual_time
async def test_no_report_of_before_comes_after_the_loss() -> None:
    async with House(ranks=2) as house:
        house.workers[0].die()
        house.workers[1].report(Started("late"))
        await settle()
        house.workers[1].report(Started("later"))
        await pass_time(1.0)
        lost = house.heard.index(GroupLost("worker g/0: its process died"))
        assert house.heard[lost:] == [GroupLost("worker g/0: its process died"), GroupUp(8, tp=2)]


@virtual_time
async def test_a_worker_that_dies_again_and_again_is_restarted_later_and_later() -> None:
    async with House() as house:
        waits: list[float] = []
        for _ in range(5):
            house.born.clear()
            began = asyncio.get_running_loop().time()
            house.latest.die()
            await house.born.wait()
            await settle()
            waits.append(asyncio.get_running_loop().time() - began)
        assert waits[0] == 0.0
        assert waits == sorted(waits)
        assert waits[-1] >= 5.0


@virtual_time
async def test_a_long_life_makes_the_next_restart_the_first_again() -> None:
    async with House() as house:
        for _ in range(4):
            house.latest.die()
            await pass_time(20.0)
        await pass_time(100.0)
        house.latest.die()
        await settle()
        assert isinstance(house.heard[-1], GroupUp)


@virtual_time
async def test_a_restart_that_fails_is_tried_again_and_nothing_is_said_meanwhile() -> None:
    async with House() as house:
        house.start_error = WorkerError("no memory yet")
        house.latest.die()
        await pass_time(0.1)
        assert [type(report) for report in house.heard] == [GroupUp, GroupLost]
        assert house.group.workers[0].state == "down"
        house.group.post([])  # dropped
        house.start_error = None
        await pass_time(2.0)
        assert [type(report) for report in house.heard] == [GroupUp, GroupLost, GroupUp]


@virtual_time
async def test_a_silent_worker_is_killed_and_replaced() -> None:
    async with House() as house:
        house.latest.fall_silent()
        await pass_time(HEARTBEAT + 0.5)
        assert house.heard[1:] == [GroupLost("worker g/0 gave no sign of life for 5 s"), GroupUp(8)]
        assert house.workers[0].killed


@virtual_time
async def test_a_worker_whose_forward_pass_does_not_end_is_replaced_whatever_it_reads() -> None:
    async with House() as house:
        house.latest.computing = True
        for _ in range(3):
            await pass_time(STALL / 2)
            house.latest.pages_read += 1
        assert house.heard[1:] == [GroupLost("worker g/0 has ended no forward pass for 60 s"), GroupUp(8)]


@virtual_time
async def test_a_worker_whose_read_hangs_is_replaced_whatever_it_computes() -> None:
    async with House() as house:
        house.latest.computing = house.latest.paging = True
        for _ in range(3):
            await pass_time(STALL / 2)
            house.latest.steps += 1
        assert house.heard[1:] == [
            GroupLost("worker g/0 has paged nothing in for 60 s, though it wants to"),
            GroupUp(8),
        ]


@virtual_time
async def test_every_page_that_arrives_restarts_the_stall_timer() -> None:
    """Scenario 8: a disk so slow that loading takes minutes is no stall."""
    async with House() as house:
        house.latest.paging = True
        for _ in range(20):
            await pass_time(STALL / 2)
            house.latest.pages_read += 1
        assert house.heard == [GroupUp(8)]


@virtual_time
async def test_every_forward_pass_restarts_the_stall_timer() -> None:
    async with House() as house:
        house.latest.computing = True
        for _ in range(20):
            await pass_time(STALL / 2)
            house.latest.steps += 1
        assert house.heard == [GroupUp(8)]


@virtual_time
async def test_idle_time_is_no_stall() -> None:
    async with House() as house:
        await pass_time(2 * STALL)
        house.latest.computing = house.latest.paging = True
        await pass_time(STALL / 2)
        assert house.heard == [GroupUp(8)]


@virtual_time
async def test_a_restart_that_fails_in_a_way_nobody_thought_of_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with House() as house:
        house.start_error = RuntimeError("what is this?")
        house.latest.die()
        await pass_time(3.0)
        house.start_error = None
        await pass_time(60.0)
        assert house.heard[-1] == GroupUp(8)
    assert "what is this?" in caplog.text


@virtual_time
async def test_a_worker_that_takes_no_commands_is_replaced() -> None:
    async with House() as house:
        house.latest.piled_up = True
        house.group.post([])
        await settle()
        assert house.heard[1:] == [GroupLost("worker g/0: its commands are piling up"), GroupUp(8)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PagedOut("m", 0, 1, 3, 0.1), PageOutFailed("m", 1, "still in a forward pass")),
        (KvReleased("m", 1, 1), PageInFailed("m", 1, "no such file")),
    ],
    ids=["page-out", "defect"],
)
@virtual_time
async def test_ranks_that_disagree_are_rebuilt(one: Report, other: Report) -> None:
    """None is left in another state than its siblings."""
    async with House(ranks=2) as house:
        house.workers[0].report(one)
        house.workers[1].report(other)
        await settle()
        assert isinstance(house.heard[1], GroupLost)
        assert "disagree about 'm'" in house.heard[1].message
        assert house.heard[2:] == [GroupUp(8, tp=2)]


@virtual_time
async def test_a_page_in_that_fails_on_one_rank_is_undone_on_the_others() -> None:
    async with House(ranks=3) as house:
        house.workers[1].report(PageInFailed("m", 1, "no such file"))
        await settle()
        undo = FailPageIn("m", 1, "no such file")
        assert [worker.posted for worker in house.workers] == [[undo], [], [undo]]
        for rank in (0, 2):
            house.workers[rank].report(PageInFailed("m", 1, "no such file"))
        await settle()
        assert house.heard[1:] == [PageInFailed("m", 1, "no such file")]


@virtual_time
async def test_stopping_ends_everything_even_in_the_middle_of_a_restart() -> None:
    house = House()
    await house.group.start()
    house.start_error = WorkerError("not yet")
    house.latest.die()
    await pass_time(0.1)
    await house.group.stop()
    lives = len(house.workers)
    await pass_time(100.0)
    assert len(house.workers) == lives
    assert all(worker.killed for worker in house.workers)


@virtual_time
async def test_a_rank_that_cannot_start_leaves_no_other_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_one(worker: FakeWorker, rendezvous: str) -> WorkerReady:
        if worker.spec.rank == 0:
            await asyncio.Event().wait()  # for the other one
        raise WorkerError("no such GPU")

    monkeypatch.setattr(FakeWorker, "open", open_one)
    house = House(ranks=2)
    with pytest.raises(WorkerError, match="no such GPU"):
        await house.group.start()
    assert all(worker.killed for worker in house.workers)


@virtual_time
async def test_a_group_without_a_place_comes_up_when_there_is_one() -> None:
    """Scenario 20: a node that joins late is used."""
    house = House()
    house.no_place = NoPlace("group g wants 1 GPU, but Ray has none")
    async with house:
        await pass_time(100.0)
        assert house.heard == []
        [status] = house.group.workers
        assert (status.state, status.reason, status.pid) == ("down", "group g wants 1 GPU, but Ray has none", None)
        house.no_place = None
        await pass_time(2.0)
        assert house.heard == [GroupUp(8)]
        [status] = house.group.workers
        assert (status.state, status.reason, status.restarts) == ("up", None, 0)


@virtual_time
async def test_a_group_whose_node_is_gone_comes_back_with_it() -> None:
    async with House() as house:
        house.no_place = NoPlace("group g wants what is gone")
        house.latest.die("its node died")
        await pass_time(1000.0)
        assert house.heard[1:] == [GroupLost("worker g/0: its node died")]
        assert house.group.workers[0].reason == "group g wants what is gone"
        house.no_place = None
        await pass_time(2.0)
        assert house.heard[2:] == [GroupUp(8)]
        assert house.group.workers[0].restarts == 1
