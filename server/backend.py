"""What the server stands on: a Ray, one group of workers, and the scheduler that drives them."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from scheduler.core.config import CoreConfig
from scheduler.interface import Observer
from scheduler.live import LiveScheduler
from server.config import Config
from swapper.errors import WorkerError
from swapper.tier_arena import remove_arena
from worker.client import WorkerClient
from worker.cluster import Cluster
from worker.group import Worker, WorkerGroup
from worker.protocol import WorkerSpec

GROUP = "default"
EXTENT_BYTES = {"cpu": 160 << 20, "cuda": 1280 << 20}
"""About what is read into frames in 25 ms: how far page-ins are decided ahead."""

GPU_DEVICE = Path("/dev/nvidiactl")


class RayBackend:
    """Built at once, so that requests can queue; `start` brings it to life."""

    def __init__(self, config: Config, observer: Observer) -> None:
        self._ray_address = config.cluster.ray_address
        self._spec = worker_spec(config)
        self._cluster: Cluster | None = None
        group = WorkerGroup(
            GROUP,
            [self._spec],
            self._make_worker,
            heartbeat_timeout=config.timeouts.heartbeat,
            stall_timeout=config.timeouts.stall,
        )
        self.scheduler = LiveScheduler([group], core_config(config), observer)

    async def start(self) -> None:
        """Returns once the group is up. Raises WorkerError."""
        self._cluster = await Cluster.start(self._ray_address)
        await self.scheduler.start()

    async def watch(self) -> None:
        """Raises WorkerError if what the workers stand on is lost, which nothing but a new daemon mends."""
        assert self._cluster is not None
        await self._cluster.watch()

    async def stop(self) -> None:
        """Returns once the workers are gone, and with them a private Ray and the host tier's memory."""
        await self.scheduler.stop()
        if self._cluster is not None:
            await self._cluster.stop()
        remove_arena(self._spec.tier_name)

    def _make_worker(self, spec: WorkerSpec) -> Worker:
        if self._cluster is None:
            raise WorkerError("The cluster has not been started.")
        return WorkerClient(self._cluster, spec)


def worker_spec(config: Config) -> WorkerSpec:
    cluster = config.cluster
    return WorkerSpec(
        group=GROUP,
        rank=0,
        frames=config.memory.frames,
        page_bytes=config.memory.page,
        device=cluster.device,
        pool_share=config.memory.gpu_share,
        tier_bytes=config.memory.host_tier,
        tier_name=f"{blake3(str(config.store.resolve()).encode()).hexdigest(8)}-{GROUP}-0",
        verify=cluster.verify,
        reader=cluster.reader,
        read_threads=cluster.read_threads,
        # A core is left to the daemon: threads that wait for a busy one slow every step down.
        compute_threads=cluster.compute_threads or max(1, len(os.sched_getaffinity(0)) - 1),
        max_batch_tokens=cluster.max_batch_tokens,
        max_batch_sequences=cluster.max_batch_sequences,
        suspended_bytes=config.memory.suspended,
    )


def core_config(config: Config) -> CoreConfig:
    return CoreConfig(
        page_bytes=config.memory.page,
        max_queue=config.scheduler.max_queue,
        max_queue_total=config.scheduler.max_queue_total,
        max_running=config.cluster.max_batch_sequences,
        extent_pages=max(1, EXTENT_BYTES[_likely_device(config)] // config.memory.page),
        wait_bound=config.scheduler.wait_bound,
    )


def _likely_device(config: Config) -> str:
    """Where the workers will be, as far as can be told before there is a Ray: it is a matter of speed only."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if config.cluster.ray_address is not None or GPU_DEVICE.exists() else "cpu"
