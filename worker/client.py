"""The daemon's hold on one worker. Every Ray call that concerns a worker is made here.

A `WorkerClient` is one life of a worker: a process that is started once and killed once. What restarts workers,
and notices that one must be, is the group (`worker/group.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.exceptions import PendingCallsLimitExceeded, RayActorError, RayError, RayTaskError

from engine.recorder import Recording, TorchProfiler
from swapper.errors import WorkerError
from swapper.store import Store
from worker.actor import actor_class
from worker.cluster import Cluster
from worker.protocol import Batch, Command, WorkerReady, WorkerSpec

START_TIMEOUT = 120.0
"""Seconds for a process to come up and import what it needs, on a slow disk."""

KILL_TIMEOUT = 10.0

RECORD_TIMEOUT = 30.0
"""A recording queues behind the commands before it, and may be some megabytes."""


class WorkerClient:
    """Implements `worker.group.Worker`."""

    def __init__(self, cluster: Cluster, spec: WorkerSpec, options: dict[str, Any]) -> None:
        """`options` are the actor's: where it runs and what it takes (`worker/place.py`)."""
        self.spec = spec
        self.pid: int | None = None
        self.node = ""
        self._cluster = cluster
        self._options = options
        self._actor: Any = None
        self._process: psutil.Process | None = None  # when it is on this machine

    async def start(self) -> str:
        """Start the process; returns an address of its node at which nobody listens. Raises WorkerError."""
        async with self._starting():
            self._actor = actor_class(self.spec.group, self.spec.rank).options(**self._options).remote()
            identity: tuple[int, str, str] = await self._actor.identify.remote()
        self.pid, node, address = identity
        self.node = address.rpartition(":")[0]
        if node == self._cluster.node:
            with suppress(psutil.NoSuchProcess):  # died at once: `open` will say so
                self._process = psutil.Process(self.pid)
        return address

    async def open(self, rendezvous: str) -> WorkerReady:
        """Have the process make its shard. Raises WorkerError with the reason when that fails."""
        spec = replace(self.spec, rendezvous=rendezvous)
        if self._process is None:  # on another node
            spec = replace(spec, images=await asyncio.to_thread(Store(spec.store).identities))
        async with self._starting():
            ready: WorkerReady = await self._actor.open.remote(spec)
            return ready

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """What may go wrong in a start, as a sentence, and a bound on it."""
        name = f"worker {self.spec.group}/{self.spec.rank}"
        try:
            async with asyncio.timeout(START_TIMEOUT):
                yield
        except TimeoutError:
            raise WorkerError(f"{name} did not start within {START_TIMEOUT:.0f} s") from None
        except RayError as error:
            raise WorkerError(f"{name} could not start: {_reason(error)}") from error

    def post(self, commands: Sequence[Command]) -> None:
        """Send commands without waiting for them. Raises WorkerError when the worker has stopped taking any."""
        try:
            self._actor.post.remote(tuple(commands))
        except PendingCallsLimitExceeded as error:
            raise WorkerError("its commands are piling up") from error

    async def poll(self, cursor: int, timeout: float) -> Batch:
        """Reports from `cursor` on, or none after `timeout` seconds. Raises WorkerError when the worker is gone."""
        try:
            batch: Batch = await self._actor.poll.remote(cursor, timeout)
            return batch
        except RayError as error:
            raise WorkerError(_reason(error)) from error

    async def record(self, on: bool, torch_profiler: TorchProfiler) -> Recording | None:
        """See `worker.shard.Shard.record`. Raises WorkerError when the worker does not answer."""
        try:
            async with asyncio.timeout(RECORD_TIMEOUT):
                recording: Recording | None = await self._actor.record.remote(on, torch_profiler)
                return recording
        except (TimeoutError, RayError) as error:
            raise WorkerError(f"worker {self.spec.group}/{self.spec.rank} gives no recording: {error!r}") from error

    async def kill(self) -> None:
        """Kill the worker's process, stopped or hung as it may be; returns when it is gone, or after KILL_TIMEOUT."""
        if self._actor is None:
            return
        ray.kill(self._actor, no_restart=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT):
                if self._process is not None:
                    await asyncio.to_thread(_kill, self._process)
                else:
                    await self._is_dead()
        self.pid = None

    async def _is_dead(self) -> None:
        """Return once Ray says that the actor is dead, wherever it was."""
        with suppress(RayActorError):
            await self._actor.identify.remote()


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        process.kill()
        process.wait(KILL_TIMEOUT)


def _reason(error: RayError) -> str:
    """What went wrong, in a sentence: the worker's own error, or what Ray knows of its death."""
    if isinstance(error, RayTaskError):
        return str(error.cause) or repr(error.cause)
    text = " ".join(str(error).split())
    _, marker, detail = text.partition("Worker exit detail: ")
    return f"its process died ({detail.split(' Some common causes')[0].rstrip('.')})" if marker else text
