"""How the live driver starts, drains and stops, and what becomes of everybody when it breaks."""

from __future__ import annotations

import asyncio
import logging

import pytest

from engine.request import Tokens
from scheduler.core.core import CoreConfig, SchedulerCore
from scheduler.core.invariants import check
from scheduler.live import HEARTBEAT, STALLED_AFTER
from swapper.errors import Refused, WorkerError
from tests.scheduler.fake_group import PAGE_BYTES, FakeGroup
from tests.scheduler.house import House, house, served
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from worker.protocol import Cancel, PageIn, PageInFailed

A, B = served("a", 4), served("b", 4)


# ---- start


@virtual_time
async def test_it_is_live_once_a_group_is_up() -> None:
    group = FakeGroup()
    async with house(A, groups=[group]) as here:
        assert here.scheduler.is_live()
        assert here.diary.restarts == []
        group.die()
        await settle()
        assert not here.scheduler.is_live()
        group.come_up()
        await settle()
        assert here.scheduler.is_live()
        assert here.diary.restarts == ["g0"]


@virtual_time
async def test_workers_that_cannot_start_stop_the_others_and_are_named() -> None:
    sound, broken = FakeGroup("g0"), FakeGroup("g1", refuses_to_start="worker g1/0 needs a GPU that is not there")
    with pytest.raises(WorkerError, match="needs a GPU"):
        async with house(groups=[sound, broken]):
            pass
    assert sound.stopped
    assert broken.stopped


@virtual_time
async def test_what_is_asked_for_before_the_start_is_done_after_it() -> None:
    here = House([FakeGroup()], CoreConfig(page_bytes=PAGE_BYTES))
    here.scheduler.add_model(A)
    client = here.ask("a")
    await settle()
    assert here.status("a").state == "absent"
    assert not here.scheduler.is_live()
    await here.scheduler.start()
    await here.work()
    await here.finish(client, 1)
    assert client.tokens == [1]
    await here.scheduler.stop()


@virtual_time
async def test_it_stays_live_while_nothing_happens() -> None:
    async with house(A) as here:
        await pass_time(3600)
        assert here.scheduler.is_live()


@virtual_time
async def test_a_loop_that_does_not_turn_is_not_live() -> None:
    async with house(A) as here:
        loop = asyncio.get_running_loop()
        loop.now += STALLED_AFTER + HEARTBEAT  # type: ignore[attr-defined]  # something blocks the loop meanwhile
        assert not here.scheduler.is_live()
        await pass_time(HEARTBEAT)
        assert here.scheduler.is_live()


# ---- drain and stop


@virtual_time
async def test_a_drain_admits_nothing_and_returns_when_all_that_was_admitted_has_ended() -> None:
    async with house(A) as here:
        client = here.ask("a")
        await here.work()
        draining = asyncio.create_task(here.scheduler.drain(60))
        await settle()
        late = here.ask("a")
        await settle()
        assert late.error is not None
        assert late.error.reason == "draining"
        assert not draining.done()
        await here.finish(client, 1)
        assert draining.done()
        assert client.tokens == [1]


@virtual_time
async def test_a_drain_waits_for_jobs_too() -> None:
    async with house(A) as here:
        load = asyncio.create_task(here.scheduler.load("a"))
        draining = asyncio.create_task(here.scheduler.drain(60))
        await settle()
        assert not draining.done()
        await here.work()
        assert draining.done()
        await asyncio.wait_for(load, 1)


@virtual_time
async def test_an_idle_scheduler_is_drained_at_once() -> None:
    async with house(A) as here:
        start = asyncio.get_running_loop().time()
        await here.scheduler.drain(60)
        assert asyncio.get_running_loop().time() == start


@virtual_time
async def test_what_outlasts_the_drain_is_cancelled_and_told_why() -> None:
    async with house(A, B) as here:
        running, waiting = here.ask("a"), here.ask("b")
        load = asyncio.create_task(here.scheduler.load("b"))
        await here.work()
        start = asyncio.get_running_loop().time()
        await here.scheduler.drain(10)
        assert asyncio.get_running_loop().time() == pytest.approx(start + 10)
        await settle()
        for client in (running, waiting):
            assert client.error is not None
            assert client.error.reason == "draining"
        with pytest.raises(Refused, match="shutting down"):
            await load
        assert here.group.next(Cancel) == Cancel(running.answer.request.id)


@virtual_time
async def test_a_stop_leaves_nobody_waiting() -> None:
    async with house(A) as here:
        client = here.ask("a")
        load = asyncio.create_task(here.scheduler.load("a"))
        await settle()
        await here.scheduler.stop()
        await settle()
        assert client.error is not None
        assert client.error.reason == "draining"
        with pytest.raises(Refused):
            await load
        assert here.group.stopped
        late = here.ask("a")
        await settle()
        assert late.error is not None
        assert late.error.reason == "draining"


@virtual_time
async def test_reports_after_the_stop_are_ignored() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await settle()
        await here.scheduler.stop()
        waiting = len(here.scheduler._inbox._events)
        while here.group.waiting(PageIn):
            here.group.page_in()
        here.group.tokens("r", 0, 1, finish="stop")
        await pass_time(60)
        assert client.tokens == []
        assert here.diary.loads == []
        assert len(here.scheduler._inbox._events) == waiting, "nobody would ever take them"


# ---- a defect


@virtual_time
async def test_a_defect_in_the_core_refuses_everybody_and_turns_readiness_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken: list[bool] = []

    def break_when_told(core: SchedulerCore) -> None:
        check(core)
        if broken:
            raise AssertionError("the ledger does not add up")

    async with house(A, B, after_turn=break_when_told) as here:
        running = here.ask("a", "running")
        await here.work()
        load = asyncio.create_task(here.scheduler.load("b"))
        drain = asyncio.create_task(here.scheduler.drain(600))
        broken.append(True)
        with caplog.at_level(logging.CRITICAL):
            await settle()
        assert "Restart the daemon" in caplog.text
        assert "the ledger does not add up" in caplog.text
        assert not here.scheduler.is_live()
        assert running.error is not None
        assert running.error.reason == "engine_failed"
        with pytest.raises(Refused, match="defect"):
            await load
        await asyncio.wait_for(drain, 1)
        assert here.group.next(Cancel) == Cancel("running")
        late = here.ask("a")
        await settle()
        assert late.error is not None
        assert late.error.reason == "engine_failed"
        with pytest.raises(Refused, match="defect"):
            await here.scheduler.pin("a")
        waiting = len(here.scheduler._inbox._events)
        await pass_time(60)
        assert not here.scheduler.is_live()
        assert len(here.scheduler._inbox._events) == waiting, "nobody would ever take them"


# ---- last words that come too late


@virtual_time
async def test_a_load_that_a_drain_cut_off_may_still_end() -> None:
    async with house(A) as here:
        load = asyncio.ensure_future(here.scheduler.load("a"))
        await settle()
        await here.scheduler.drain(1.0)
        with pytest.raises(Refused, match="drain time"):
            await load
        await here.work()
        assert here.scheduler.is_live()


@virtual_time
async def test_a_request_may_end_while_news_of_its_failure_waits() -> None:
    """The worker fails the page-in and ends the cancelled request in one batch: the finish is heard first."""
    async with house(A, B) as here:
        client = here.ask("a")
        await settle()
        client.answer.cancel()
        await settle()
        page_in = here.group.next(PageIn)
        here.group.serving.clear()
        here.group.report(
            PageInFailed("a", page_in.epoch, "disk"), Tokens(client.answer.request.id, 0, (), finish="cancelled")
        )
        await settle()
        assert here.scheduler.is_live()
        here.group.todo.clear()
        await here.answered("b")
