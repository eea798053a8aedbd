"""A long answer is suspended for a model that has waited for its bound, and its client notices nothing but a pause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler.core.config import CoreConfig
from tests.scheduler.fake_group import PAGE_BYTES
from tests.scheduler.house import Client, House, house, served
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from worker.protocol import PageOut, Resume, Suspend

BOUND, SLICE = 2.0, 1.0


@asynccontextmanager
async def crowded() -> AsyncIterator[tuple[House, Client, Client]]:
    """Memory holds one of two models. `long` is half way through its answer when `other` comes and waits."""
    config = CoreConfig(page_bytes=PAGE_BYTES, extent_pages=2, wait_bound=BOUND, time_slice=SLICE)
    async with house(served("a", 5), served("b", 5), frames=8, config=config) as here:
        long = here.ask("a", "long", max_tokens=4)
        await here.work()
        here.group.started("long")
        here.group.tokens("long", 0, 1, 2)
        other = here.ask("b", "other")
        await settle()
        yield here, long, other


async def suspended(here: House) -> None:
    """Let the bound pass and the long answer be suspended."""
    await pass_time(BOUND + SLICE + 10.0)
    assert here.group.waiting(Suspend), "the bound has passed, and nothing was suspended"
    here.group.suspend()
    await settle()


@virtual_time
async def test_nobody_is_suspended_before_the_bound() -> None:
    async with crowded() as (here, _, other):
        await pass_time(BOUND - 0.1)
        assert not here.group.waiting(Suspend)
        assert not here.is_served(other)


@virtual_time
async def test_both_are_answered_and_the_long_one_goes_on_where_it_was() -> None:
    async with crowded() as (here, long, other):
        await suspended(here)
        assert here.group.waiting(PageOut), "its pages go, as far as they are in the way"
        await here.work()
        assert here.is_served(other)
        await here.finish(other, 9)
        await here.work()
        assert here.diary.suspensions == [("a", 100, 7)]
        here.group.tokens("long", 2, 3, 4, finish="length")
        await settle()
        assert (long.tokens, long.finish, long.error) == ([1, 2, 3, 4], "length", None)
        assert other.tokens == [9]


@virtual_time
async def test_who_is_cancelled_while_suspended_is_let_go_and_not_resumed() -> None:
    async with crowded() as (here, long, other):
        await suspended(here)
        long.answer.cancel()
        await here.work()
        await here.finish(other, 9)
        await here.work()
        assert not here.group.serving
        assert not any(isinstance(command, Resume) for post in here.group.posts for command in post)


@virtual_time
@pytest.mark.parametrize("when", ["suspending", "suspended", "resuming"])
async def test_what_was_suspended_when_its_worker_died_is_continued_from_the_tokens_it_had(when: str) -> None:
    async with crowded() as (here, long, other):
        await pass_time(BOUND + SLICE + 10.0)
        if when != "suspending":
            here.group.suspend()
            await settle()
        if when == "resuming":
            while not here.group.waiting(Resume):
                if here.is_served(other) and not other.is_done:
                    await here.finish(other, 9)
                here.group.do(here.group.todo[0])
                await settle()
        here.group.die()
        await settle()
        here.group.come_up()
        await here.work()
        if not here.is_served(long):
            await here.finish(other, 9)
            await here.work()
        assert here.serving("long").request.answer == (1, 2)
        await here.finish(long, 3, 4)
        await here.work()
        if not other.is_done:
            await here.finish(other, 9)
        assert long.tokens == [1, 2, 3, 4]
        assert other.tokens == [9]
