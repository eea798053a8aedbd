"""The daemon's hold on one worker. Every Ray call that concerns a worker is made here.

A `WorkerClient` is one life of a worker: a process that is started once and killed once. What restarts workers,
and notices that one must be, is the group (`worker/group.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import psutil
import ray
from ray.exceptions import PendingCallsLimitExceeded, RayActorError, RayError, RayTaskError

from swapper.errors import WorkerError
from worker.actor import actor_class
from worker.cluster import Cluster
from worker.protocol import Batch, Command, WorkerReady, WorkerSpec

START_TIMEOUT = 120.0
"""Seconds for a process to come up and import what it needs, on a slow disk."""

KILL_TIMEOUT = 10.0

GPU_PACKAGES = ("cuda.bindings", "kvikio")

logger = logging.getLogger(__name__)


class WorkerClient:
    def __init__(self, cluster: Cluster, spec: WorkerSpec) -> None:
        self.spec = spec
        self.pid: int | None = None
        self._cluster = cluster
        self._actor: Any = None
        self._process: psutil.Process | None = None  # when it is on this machine

    async def start(self) -> WorkerReady:
        """Start the process and its shard. Raises WorkerError with the reason when that fails."""
        name = f"worker {self.spec.group}/{self.spec.rank}"
        self.spec = spec = replace(self.spec, device=_device(self.spec.device, self._cluster.has_gpu))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                self._actor = (
                    actor_class(self.spec.group, self.spec.rank)
                    .options(
                        # A private Ray has nothing to share out; a joined one must know what we take.
                        num_cpus=0 if self._cluster.is_private else spec.compute_threads,
                        num_gpus=1 if spec.device == "cuda" else 0,
                    )
                    .remote()
                )
                self.pid, node = await self._actor.identify.remote()
                if node == self._cluster.node:
                    with suppress(psutil.NoSuchProcess):  # died at once: `open` will say so
                        self._process = psutil.Process(self.pid)
                ready: WorkerReady = await self._actor.open.remote(spec)
                return ready
        except TimeoutError:
            raise WorkerError(
                f"{name} did not start within {START_TIMEOUT:.0f} s; the cluster may lack the "
                f"{spec.compute_threads} free CPUs {'or the GPU ' if spec.device == 'cuda' else ''}it asks for"
            ) from None
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


def _device(wanted: str, has_gpu: bool) -> str:
    """What `auto` means here; anything else means what it says."""
    if wanted != "auto" or not has_gpu:
        return "cpu" if wanted == "auto" else wanted
    if missing := [package for package in GPU_PACKAGES if not _is_installed(package)]:
        logger.warning(
            "There is a GPU, but %s is not installed: workers use the CPU. Install it with: pip install 'gswapd[gpu]'",
            " and ".join(missing),
        )
        return "cpu"
    return "cuda"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it is part of
        return False


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
