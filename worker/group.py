"""A group of workers as the scheduler sees it: one stream of reports, and restarts that it need not manage.

One task lives the group's life: find a place, start all ranks there, poll each (one poll is always outstanding), and
when anything is wrong with one of them, say GroupLost, kill them all and start anew. A group that finds no place (its
node is gone, or has not come yet) looks for one again every few seconds. What is wrong may be

- a death: the outstanding poll fails at once;
- silence: a worker answers no poll for `heartbeat_timeout` although polls carry their own, far shorter time-out;
- a stall: for `stall_timeout` a worker computes and ends no forward pass, or pages in and no page arrives;
- disagreement between ranks, or a command that cannot be delivered.

Reports are delivered by tasks that belong to one life of the group and end with it, so nothing of an earlier life
can arrive after GroupLost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from engine.recorder import Recording, TorchProfiler
from swapper.errors import NoPlace, WorkerError
from worker.merge import ReportMerger
from worker.protocol import (
    Batch,
    Command,
    GroupLost,
    GroupUp,
    Heartbeat,
    Report,
    WorkerReady,
    WorkerSpec,
    WorkerStatus,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Sink = Callable[[Sequence[Report | GroupUp | GroupLost]], None]

POLL_TIMEOUT = 0.15  # seconds: how often an idle worker's heartbeat comes
BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each restart in a row
STEADY = 60.0  # seconds of life after which the next restart counts as the first


PLACE_INTERVAL = 2.0  # seconds between two looks for a place


class Worker(Protocol):
    """One life of one rank; `worker.client.WorkerClient` is the real one."""

    spec: WorkerSpec
    pid: int | None
    node: str

    async def start(self) -> str: ...

    async def open(self, rendezvous: str) -> WorkerReady: ...

    def post(self, commands: Sequence[Command]) -> None: ...

    async def poll(self, cursor: int, timeout: float) -> Batch: ...

    async def record(self, on: bool, torch_profiler: TorchProfiler) -> Recording | None: ...

    async def kill(self) -> None: ...


class Place(Protocol):
    """Where one life of a group runs; `worker.place.Place` is the real one."""

    def worker(self, spec: WorkerSpec) -> Worker: ...

    async def give_back(self) -> None: ...


class Rank:
    """A rank's worker of this life and what is known of it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.ready: WorkerReady | None = None
        self.heartbeat: Heartbeat | None = None
        self.heard_at = 0.0
        self.computed_at = 0.0  # when it last ended a forward pass, or had none to make
        self.paged_at = 0.0  # when a page last came in, or it wanted none

    def begin(self, ready: WorkerReady, now: float) -> None:
        self.ready = ready
        self.heard_at = self.computed_at = self.paged_at = now

    def hear(self, heartbeat: Heartbeat, now: float) -> None:
        before = self.heartbeat
        if before is None or not heartbeat.computing or heartbeat.steps != before.steps:
            self.computed_at = now
        if before is None or not heartbeat.paging or heartbeat.pages_read != before.pages_read:
            self.paged_at = now
        self.heartbeat = heartbeat
        self.heard_at = now

    def stall(self, now: float, timeout: float) -> str | None:
        """What has stood still for `timeout` seconds. Passes and pages are told apart: one must not hide the other."""
        if now - self.computed_at >= timeout:
            return f"has ended no forward pass for {timeout:g} s"
        if now - self.paged_at >= timeout:
            return f"has paged nothing in for {timeout:g} s, though it wants to"
        return None


class WorkerGroup:
    """Implements `scheduler.interface.GroupClient`."""

    def __init__(
        self,
        name: str,
        specs: Sequence[WorkerSpec],
        take_place: Callable[[Sequence[WorkerSpec]], Awaitable[Place]],
        heartbeat_timeout: float = 5.0,
        stall_timeout: float = 60.0,
    ) -> None:
        self.name = name
        self._specs = tuple(specs)
        self._take_place = take_place
        self._heartbeat_timeout = heartbeat_timeout
        self._stall_timeout = stall_timeout
        self._sink: Sink | None = None
        self._place: Place | None = None
        self._ranks: list[Rank] = []  # of this life, or of the one before; none if there was none yet
        self._state: Literal["starting", "up", "down"] = "down"
        self._reason: str | None = None  # why it is not up
        self._lives = 0
        self._life: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop  # set by `start`
        self._fault: asyncio.Future[str]  # of this life: why `post` wants it to end

    def subscribe(self, sink: Sink) -> None:
        self._sink = sink

    def post(self, commands: Sequence[Command]) -> None:
        if self._state != "up":
            return
        for rank in self._ranks:
            try:
                rank.worker.post(commands)
            except WorkerError as error:
                if not self._fault.done():
                    self._fault.set_result(f"{self._name_of(rank)}: {error}")

    async def record(self, on: bool, torch_profiler: TorchProfiler) -> Sequence[Recording | None]:
        """Begin a recording on every rank, or end it: then each rank's. Raises WorkerError."""
        if self._state != "up":
            raise WorkerError(f"Group {self.name} is {self._state}.")
        return await asyncio.gather(*(rank.worker.record(on, torch_profiler) for rank in self._ranks))

    async def start(self) -> None:
        """Returns when the group is up, or has no place yet; then it comes up when there is one. Raises WorkerError."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._start_ranks()
        except NoPlace as error:
            self._has_no_place(error)
        self._life = asyncio.create_task(self._live(), name=f"group {self.name}")

    async def stop(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])
            self._life = None
        await self._kill_ranks()

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        ranks = dict(enumerate(self._ranks))
        return [self._status(spec, ranks.get(spec.rank)) for spec in self._specs]

    def _status(self, spec: WorkerSpec, rank: Rank | None) -> WorkerStatus:
        ready = rank.ready if rank is not None else None
        heartbeat = rank.heartbeat if rank is not None else None
        return WorkerStatus(
            group=self.name,
            rank=spec.rank,
            state=self._state,
            pid=rank.worker.pid if rank is not None else None,
            restarts=max(0, self._lives - 1),
            device=ready.device if ready is not None else "",
            reader=ready.reader if ready is not None else spec.reader,
            heartbeat=heartbeat,
            heartbeat_age=self._now() - rank.heard_at if rank is not None and heartbeat is not None else None,
            tp=spec.tp,
            pp=spec.pp,
            node=rank.worker.node if rank is not None else "",
            reason=self._reason,
        )

    # ---- one life after another

    async def _live(self) -> None:
        failures = 0
        while True:
            if self._state == "up":
                born = self._now()
                self._reason = await self._serve()
                logger.warning("group %s is lost: %s", self.name, self._reason)
                self._state = "down"
                self._deliver([GroupLost(self._reason)])
                await self._kill_ranks()
                if self._now() - born >= STEADY:
                    failures = 0
            failures = await self._restart(failures)

    async def _restart(self, failures: int) -> int:
        """Start the ranks until that works; returns how many attempts in a row there have been."""
        while True:
            await asyncio.sleep(BACK_OFF[min(failures, len(BACK_OFF) - 1)])
            try:
                await self._start_ranks()
            except NoPlace as error:  # nothing has failed, and looking again costs little
                self._has_no_place(error)
                await asyncio.sleep(PLACE_INTERVAL)
                continue
            except WorkerError as error:
                self._reason = str(error)
                logger.error("group %s did not restart: %s", self.name, error)
            except Exception as error:  # nothing but a restart that works may end these attempts
                self._reason = repr(error)
                logger.exception("group %s did not restart", self.name)
            else:
                return failures + 1
            failures += 1

    def _has_no_place(self, error: NoPlace) -> None:
        if self._reason != str(error):
            logger.warning("group %s waits for a place: %s", self.name, error)
        self._reason = str(error)

    async def _start_ranks(self) -> None:
        self._state = "starting"
        try:
            self._place = await self._take_place(self._specs)
            self._ranks = [Rank(self._place.worker(spec)) for spec in self._specs]
            addresses = await _all(rank.worker.start() for rank in self._ranks)
            ready = await _all(rank.worker.open(addresses[0]) for rank in self._ranks)
        except BaseException:
            await self._kill_ranks()
            raise
        now = self._now()
        for rank, its in zip(self._ranks, ready, strict=True):
            rank.begin(its, now)
        self._fault = self._loop.create_future()
        self._state = "up"
        self._reason = None
        self._lives += 1
        mesh = self._specs[0]
        self._deliver([GroupUp(min(its.frames for its in ready), mesh.tp, mesh.pp)])

    # ---- within one life

    async def _serve(self) -> str:
        """Deliver reports until the group must be given up; returns why."""
        merger = ReportMerger(len(self._ranks))
        tasks = [asyncio.create_task(self._follow(rank, merger)) for rank in self._ranks]
        try:
            done, _ = await asyncio.wait([*tasks, self._fault], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            self._fault.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, rank: Rank, merger: ReportMerger) -> str:
        """Poll one rank until something is wrong with it; returns what."""
        cursor = 0
        name = self._name_of(rank)
        while True:
            try:
                batch = await self._poll(rank, cursor)
                if batch is None:
                    return f"{name} gave no sign of life for {self._heartbeat_timeout:g} s"
                now = self._now()
                rank.hear(batch.heartbeat, now)
                merged, undo = merger.merge(rank.worker.spec.rank, batch.reports)
                self._deliver(merged)
                for other in self._ranks:
                    if undo and other is not rank:
                        other.worker.post(undo)
            except WorkerError as error:
                return f"{name}: {error}"
            except Exception as error:
                logger.exception("a report of %s could not be handled", name)
                return f"a report of {name} could not be handled: {error!r}"
            cursor = batch.index + len(batch.reports)
            if stall := rank.stall(now, self._stall_timeout):
                return f"{name} {stall}"

    async def _poll(self, rank: Rank, cursor: int) -> Batch | None:
        """One poll; None if it is not answered in time.

        The time is waited for in two halves: if it was this process that stood still, the first half ends late, and
        an answer that is there already gets in during the second.
        """
        poll = asyncio.ensure_future(rank.worker.poll(cursor, POLL_TIMEOUT))
        try:
            for _ in range(2):
                await asyncio.wait([poll], timeout=self._heartbeat_timeout / 2)
                if poll.done():
                    return poll.result()
            return None
        finally:
            poll.cancel()

    async def _kill_ranks(self) -> None:
        self._state = "down"
        if self._place is None:
            return
        ends = await asyncio.gather(*(rank.worker.kill() for rank in self._ranks), return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):  # it is given up either way
                logger.error("a worker of group %s could not be killed", self.name, exc_info=error)
        await self._place.give_back()
        self._place = None

    def _name_of(self, rank: Rank) -> str:
        return f"worker {self.name}/{rank.worker.spec.rank}"

    def _now(self) -> float:
        return self._loop.time()

    def _deliver(self, reports: Sequence[Report | GroupUp | GroupLost]) -> None:
        if reports and self._sink is not None:
            self._sink(reports)


async def _all(starting: Iterable[Coroutine[Any, Any, Result]]) -> Sequence[Result]:
    """What all of them return. Raises the first error at once: one rank's failure leaves the others waiting for it."""
    tasks = [asyncio.ensure_future(start) for start in starting]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
