"""The alarm rings at the earliest time asked for, and at least once a period."""

from __future__ import annotations

import asyncio

from scheduler.alarm import Alarm
from tests.scheduler.virtual_time import pass_time, virtual_time


def alarm_of(rings: list[float], period: float = 10.0) -> Alarm:
    loop = asyncio.get_running_loop()
    start = loop.time()
    return Alarm(loop.time, lambda: rings.append(round(loop.time() - start, 6)), period)


@virtual_time
async def test_it_rings_once_a_period() -> None:
    rings: list[float] = []
    alarm_of(rings).start()
    await pass_time(35)
    assert rings == [10, 20, 30]


@virtual_time
async def test_the_earliest_wish_counts_and_later_ones_are_forgotten_with_it() -> None:
    rings: list[float] = []
    alarm = alarm_of(rings)
    now = asyncio.get_running_loop().time()
    alarm.start()
    alarm.wake_at(now + 5)
    alarm.wake_at(now + 3)
    alarm.wake_at(now + 4)
    await pass_time(9)
    assert rings == [3]


@virtual_time
async def test_a_wish_beyond_the_period_is_kept() -> None:
    rings: list[float] = []
    alarm = alarm_of(rings)
    alarm.start()
    alarm.wake_at(asyncio.get_running_loop().time() + 25)
    await pass_time(28)
    assert rings == [10, 20, 25]


@virtual_time
async def test_a_wish_in_the_past_rings_at_once() -> None:
    rings: list[float] = []
    alarm = alarm_of(rings)
    alarm.start()
    alarm.wake_at(0.0)
    await pass_time(1)
    assert rings == [0]


@virtual_time
async def test_the_clock_may_be_another_than_the_loops() -> None:
    loop = asyncio.get_running_loop()
    rings: list[float] = []
    alarm = Alarm(lambda: loop.time() - 500.0, lambda: rings.append(loop.time() - 500.0), 10.0)
    start = loop.time() - 500.0
    alarm.start()
    alarm.wake_at(start + 2)
    await pass_time(3)
    assert rings == [start + 2]


@virtual_time
async def test_a_stopped_alarm_is_silent() -> None:
    rings: list[float] = []
    alarm = alarm_of(rings)
    alarm.start()
    alarm.stop()
    await pass_time(100)
    assert rings == []
