"""A worker without a process: what it answers, and when it dies or falls silent, is for the test to say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swapper.errors import WorkerError
from worker.protocol import Batch, Command, Heartbeat, Report, WorkerReady, WorkerSpec


class FakeWorker:
    def __init__(self, spec: WorkerSpec, start_error: Exception | None = None) -> None:
        self.spec = spec
        self.pid: int | None = None
        self.node = "10.0.0.1"
        self.rendezvous = ""
        self.posted: list[Command] = []
        self.killed = False
        self.computing = self.paging = False
        self.steps = 0
        self.pages_read = 0
        self.piled_up = False
        self._start_error = start_error
        self._reports: list[Report] = []
        self._silent = False
        self._death: str | None = None
        self._changed = asyncio.Event()

    # ---- what the group calls

    async def start(self) -> str:
        if self._start_error is not None:
            raise self._start_error
        self.pid = 1000 + self.spec.rank
        return f"10.0.0.1:{self.pid}"

    async def open(self, rendezvous: str) -> WorkerReady:
        self.rendezvous = rendezvous
        return WorkerReady("cpu", self.spec.reader, self.spec.frames)

    def post(self, commands: Sequence[Command]) -> None:
        if self.piled_up:
            raise WorkerError("its commands are piling up")
        self.posted += commands

    async def poll(self, cursor: int, timeout: float) -> Batch:
        try:
            async with asyncio.timeout(timeout):
                while len(self._reports) <= cursor and self._death is None and not self._silent:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self._silent:
            await asyncio.Event().wait()
        if self._death is not None:
            raise WorkerError(self._death)
        frames = self.spec.frames
        heartbeat = Heartbeat(self.steps, self.pages_read, self.computing, self.paging, frames, frames, 1)
        return Batch(cursor, tuple(self._reports[cursor:]), heartbeat)

    async def kill(self) -> None:
        self.killed = True
        self.pid = None

    # ---- what the test does

    def report(self, *reports: Report) -> None:
        self._reports += reports
        self._changed.set()

    def die(self, message: str = "its process died") -> None:
        self._death = message
        self._changed.set()

    def fall_silent(self) -> None:
        self._silent = True
        self._changed.set()
