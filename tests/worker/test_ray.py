"""Workers as Ray actors: the same promises as in `test_group.py`, kept by real processes that really die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from engine.request import KvReleased
from swapper.errors import WorkerError
from tests.worker.ear import PATIENCE, Ear
from worker.cluster import Cluster
from worker.group import WorkerGroup
from worker.place import Place
from worker.protocol import GrantKv, GroupLost, GroupUp, PageIn, PageInFailed, WorkerSpec

SPEC = WorkerSpec("g", 0, frames=4, page_bytes=2 << 20)


@pytest.fixture(scope="module")
def group(cluster: Cluster, loop: asyncio.Runner) -> Iterator[tuple[WorkerGroup, Ear]]:
    """A group that is up."""

    async def start() -> tuple[WorkerGroup, Ear]:
        group = WorkerGroup("g", [SPEC], partial(Place.take, cluster), heartbeat_timeout=3.0)
        ear = Ear(group)
        await group.start()
        assert await ear.next() == GroupUp(frames=4)
        return group, ear

    group, ear = loop.run(start())
    pid = group.workers[0].pid
    yield group, ear
    loop.run(group.stop())
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_commands_are_obeyed_and_reported_in_order(group: tuple[WorkerGroup, Ear], loop: asyncio.Runner) -> None:
    async def scenario(group: WorkerGroup, ear: Ear) -> None:
        for epoch in range(0, 200, 2):
            group.post([GrantKv("x", 0, epoch), GrantKv("x", 0, epoch + 1)])
        assert [await ear.next() for _ in range(200)] == [KvReleased("x", 0, epoch) for epoch in range(200)]

    loop.run(scenario(*group))


def test_errors_come_back_as_sentences(group: tuple[WorkerGroup, Ear], loop: asyncio.Runner) -> None:
    async def scenario(group: WorkerGroup, ear: Ear) -> None:
        group.post([PageIn("x", 0, 1, epoch=5)])
        assert await ear.next() == PageInFailed("x", 5, "This worker does not have a model x.")

    loop.run(scenario(*group))


def test_a_killed_worker_is_noticed_at_once_and_replaced(group: tuple[WorkerGroup, Ear], loop: asyncio.Runner) -> None:
    async def scenario(group: WorkerGroup, ear: Ear) -> None:
        [before] = group.workers
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        async with asyncio.timeout(1.0):  # 0.03 s on an idle machine; Ray's own restart would notice after 1.5 s
            lost = await ear.next()
        assert isinstance(lost, GroupLost)
        assert "its process died" in lost.message
        assert await ear.next() == GroupUp(frames=4)
        [after] = group.workers
        assert after.restarts == before.restarts + 1
        assert after.pid != before.pid
        group.post([GrantKv("x", 0, 1)])
        assert await ear.next() == KvReleased("x", 0, 1)

    loop.run(scenario(*group))


def test_a_stopped_worker_is_noticed_and_replaced(group: tuple[WorkerGroup, Ear], loop: asyncio.Runner) -> None:
    async def scenario(group: WorkerGroup, ear: Ear) -> None:
        pid = group.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert await ear.next() == GroupLost("worker g/0 gave no sign of life for 3 s")
        assert await ear.next() == GroupUp(frames=4)
        assert not psutil.pid_exists(pid), "a stopped process can only be killed"

    loop.run(scenario(*group))


def test_a_repeated_poll_gets_the_same_reports(cluster: Cluster, loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        place = await Place.take(cluster, [SPEC])
        worker = place.worker(SPEC)
        await worker.open(await worker.start())
        worker.post([GrantKv("x", 0, 1), GrantKv("x", 0, 2)])
        while len((first := await worker.poll(0, PATIENCE)).reports) < 2:
            pass  # one of the two may have come alone
        again = await worker.poll(0, 0)
        assert first.reports == again.reports == (KvReleased("x", 0, 1), KvReleased("x", 0, 2))
        assert (await worker.poll(1, 0)).reports == (KvReleased("x", 0, 2),)
        assert (await worker.poll(2, 0)).reports == ()
        pid = worker.pid
        await worker.kill()
        assert pid is not None
        assert not psutil.pid_exists(pid)
        with pytest.raises(WorkerError):
            await worker.poll(2, 0)
        await place.give_back()

    loop.run(scenario())


def test_a_worker_that_cannot_start_says_why(cluster: Cluster, loop: asyncio.Runner) -> None:
    async def scenario() -> None:
        spec = WorkerSpec("big", 0, frames=1 << 20, page_bytes=2 << 20)
        group = WorkerGroup("big", [spec], partial(Place.take, cluster))
        with pytest.raises(WorkerError, match=r"worker big/0 could not start: The frame pool wants 2,199,023,255,552"):
            await group.start()

    loop.run(scenario())
