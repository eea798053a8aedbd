"""Thousands of random operations on a live scheduler: whatever happens in whatever order, every promise is kept.

After each turn the core's invariants hold and driver and core agree on who is unfinished. In the end every client has
each token of its answer exactly once, or a clear error, and nothing is left over.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.request import KvWanted
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.invariants import check
from swapper.errors import Refused
from tests.scheduler.fake_group import PAGE_BYTES, FakeGroup
from tests.scheduler.house import Client, House, house, served
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from worker.protocol import PageIn, PageOut, PageOutFailed

OPERATIONS = 1500
MODELS = {name: served(name, pages, shared=1) for name, pages in (("a", 4), ("b", 5), ("c", 3), ("d", 6))}


class Chaos:
    """Clients, administrators and workers that do anything they may do, in random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clients: list[Client] = []
        self.jobs: list[asyncio.Task[None]] = []
        self.house: House | None = None
        self.refused: set[str] = set()
        self.turns = 0

    def after_turn(self, core: SchedulerCore) -> None:
        check(core)
        assert self.house is not None
        driver = self.house.scheduler
        for id in driver._requests._answers:
            assert core.request(id) is not None, f"{id} has had its last word, and its client has not"
        assert len(driver._requests) + len(driver._jobs) == core.unfinished
        self.turns += 1

    # ---- what may happen

    def ask(self) -> None:
        assert self.house is not None
        timeout = self.random.choice([2.0, 60.0])
        self.clients.append(self.house.ask(self.model(), max_tokens=self.random.randint(1, 120), timeout=timeout))

    def cancel(self) -> None:
        if self.clients:
            self.random.choice(self.clients[-20:]).answer.cancel()

    def administrate(self) -> None:
        assert self.house is not None
        scheduler = self.house.scheduler
        kinds = [scheduler.load, scheduler.evict, scheduler.evict, scheduler.pin, scheduler.unpin, scheduler.unpin]
        self.jobs.append(asyncio.create_task(self._job(self.random.choice(kinds)(self.model()))))

    async def _job(self, job) -> None:  # type: ignore[no-untyped-def]
        try:
            await job
        except Refused as refused:
            self.refused.add(refused.reason)

    def remove_or_add(self) -> None:
        assert self.house is not None
        scheduler, name = self.house.scheduler, self.model()
        if any(status.name == name for status in scheduler.models()):
            scheduler.remove_model(name)
        else:
            scheduler.add_model(MODELS[name])

    def work(self) -> None:
        """A group carries out its oldest command, or one of another model that may overtake it."""
        group = self.group()
        if group.todo:
            command = self.random.choice(group.todo)
            model = getattr(command, "model", None)
            group.do(next(c for c in group.todo if c is command or getattr(c, "model", None) == model))

    def fail(self) -> None:
        group = self.group()
        if group.waiting(PageIn) and self.random.random() < 0.5:
            group.fail_page_in("unreadable", self.random.choice(group.waiting(PageIn)))
        elif group.waiting(PageOut):
            command = group.next(PageOut)
            group.todo.remove(command)
            group.report(PageOutFailed(command.model, command.epoch, "busy"))

    def generate(self) -> None:
        group = self.group()
        if not group.serving:
            return
        id = self.random.choice(list(group.serving))
        if self.random.random() < 0.02:
            group.fail_request(id, "a defect")
            return
        group.started(id)
        generate(group, id, self.random.randint(1, 40), repeat=self.random.randint(0, 2))

    def want_kv(self) -> None:
        self.group().report(KvWanted(self.model(), self.random.randint(1, 4)))

    def die_or_live(self) -> None:
        group = self.group()
        if group.is_up:
            group.die()
        else:
            group.come_up()

    def model(self) -> str:
        return self.random.choice(list(MODELS))

    def group(self) -> FakeGroup:
        assert self.house is not None
        return self.random.choice(list(self.house.groups))


def generate(group: FakeGroup, id: str, count: int, repeat: int = 0) -> None:
    """Token `i` of an answer is `i`. A worker goes on behind the answer it was given, and may repeat itself."""
    request = group.serving[id].request
    start = group.generated.get(id, len(request.answer))
    end = min(request.sampling.max_tokens, start + count)
    group.generated[id] = end
    first = max(0, start - repeat)
    group.tokens(id, first, *range(first, end), finish="length" if end == request.sampling.max_tokens else None)


@pytest.mark.parametrize("seed", range(4))
@virtual_time
async def test_every_promise_is_kept_whatever_happens(seed: int) -> None:
    chaos = Chaos(seed)
    weights = {
        chaos.work: 40,
        chaos.ask: 20,
        chaos.generate: 25,
        chaos.cancel: 4,
        chaos.administrate: 3,
        chaos.fail: 2,
        chaos.want_kv: 2,
        chaos.die_or_live: 1,
        chaos.remove_or_add: 1,
    }
    config = CoreConfig(page_bytes=PAGE_BYTES, extent_pages=2, max_queue=8, max_queue_total=16, max_running=4)
    groups = [FakeGroup("g0", 9), FakeGroup("g1", 11)]

    def after_turn(core: SchedulerCore) -> None:
        if chaos.house is not None:
            chaos.after_turn(core)

    async with house(*MODELS.values(), groups=groups, config=config, after_turn=after_turn) as here:
        chaos.house = here
        for _ in range(OPERATIONS):
            (operation,) = chaos.random.choices(list(weights), list(weights.values()))
            operation()
            if chaos.random.random() < 0.7:
                await settle()
            if chaos.random.random() < 0.1:
                await pass_time(chaos.random.random())
        await come_to_rest(here, chaos)

        for client in chaos.clients:
            expected = client.answer.request.sampling.max_tokens
            if client.finish == "length":
                assert client.tokens == list(range(expected))
            else:
                assert client.answer.outcome == "cancelled" or client.error is not None
                assert client.tokens == list(range(len(client.tokens)))
        assert len(here.diary.ends) == len(chaos.clients), "every request ends exactly once"
        assert all(job.done() and job.exception() is None for job in chaos.jobs)
        assert here.scheduler.is_live()
        for status in here.scheduler.models():
            assert (status.waiting, status.running, status.kv_frames) == (0, 0, 0)
        outcomes = {outcome for _, outcome in here.diary.ends}
        assert outcomes >= {"length", "cancelled"}, "the chaos was too tame"


async def come_to_rest(here: House, chaos: Chaos) -> None:
    """No more trouble: groups live, do what they are told and answer everything."""
    for group in here.groups:
        if not group.is_up:
            group.come_up()
    for _ in range(1000):
        await here.work()
        for group in here.groups:
            for id in list(group.serving):
                generate(group, id, 1000)
        await settle()
        if all(client.is_done for client in chaos.clients) and all(job.done() for job in chaos.jobs):
            await here.work()
            return
        await pass_time(1.0)
    raise AssertionError("something waits for ever")
