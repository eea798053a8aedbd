"""What the server stands on: a Ray, groups of workers, and the scheduler that drives them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from scheduler.core.config import CoreConfig
from scheduler.interface import Observer
from scheduler.journal import Journal
from scheduler.live import LiveScheduler
from server.config import Config, GroupConfig
from swapper.errors import WorkerError
from swapper.tier_arena import SHARED_MEMORY, remove_arena
from worker.cluster import Cluster
from worker.group import WorkerGroup
from worker.place import Place
from worker.protocol import WorkerSpec

EXTENT_SECONDS = 0.025
"""How far page-ins are decided ahead."""

EXTENT_BYTES = {"cpu": 160 << 20, "cuda": 1280 << 20}
"""About what is read into frames in that time."""

GPU_DEVICE = Path("/dev/nvidiactl")


class RayBackend:
    """Built at once, so that requests can queue; `start` brings it to life."""

    def __init__(self, config: Config, observer: Observer) -> None:
        self._ray_address = config.cluster.ray_address
        self._specs = [worker_specs(config, group) for group in config.cluster.groups]
        self._cluster: Cluster | None = None
        groups = [
            WorkerGroup(
                specs[0].group,
                specs,
                self._take_place,
                heartbeat_timeout=config.timeouts.heartbeat,
                stall_timeout=config.timeouts.stall,
            )
            for specs in self._specs
        ]
        path = config.scheduler.journal
        journal = None if path is None else Journal(path, config.scheduler.journal_size)
        self.scheduler = LiveScheduler(groups, core_config(config), observer, journal=journal)

    async def start(self) -> None:
        """Returns once the groups are up. Raises WorkerError.

        A Ray that was joined may grow: there, a group that finds no place is waited for, beside one that did.
        """
        self._cluster = await Cluster.start(self._ray_address)
        await self.scheduler.start()
        workers = self.scheduler.workers()
        down = [worker for worker in workers if worker.state != "up"]
        if down and (self._cluster.is_private or len(down) == len(workers)):
            raise WorkerError(f"{down[0].reason}. Make cluster.groups smaller.")

    async def watch(self) -> None:
        """Raises WorkerError if what the workers stand on is lost, which nothing but a new daemon mends."""
        assert self._cluster is not None
        await self._cluster.watch()

    async def stop(self) -> None:
        """Returns once the workers are gone, and with them a private Ray and the host tiers' memory."""
        await self.scheduler.stop()
        if self._cluster is not None:
            await self._cluster.stop()
        for specs in self._specs:
            for spec in specs:
                remove_arena(spec.tier_name)
                if spec.peers:
                    shutil.rmtree(spec.peers, ignore_errors=True)

    async def _take_place(self, specs: Sequence[WorkerSpec]) -> Place:
        if self._cluster is None:
            raise WorkerError("The cluster has not been started.")
        return await Place.take(self._cluster, specs)


def worker_specs(config: Config, group: GroupConfig) -> tuple[WorkerSpec, ...]:
    """What each rank of a group is started with."""
    cluster, memory = config.cluster, config.memory
    size = memory if group.pool is None else group
    # A share of a machine's memory is for all workers on it; a GPU's is for the one that has the GPU.
    pool = memory.pool if group.pool is None else group.pool
    sharing = 1 if size.gpu_share is None else group.ranks if size is group else cluster.ranks
    cores = len(os.sched_getaffinity(0))
    return tuple(
        WorkerSpec(
            group=group.name,
            rank=rank,
            frames=max(1, pool // sharing // memory.page),
            page_bytes=memory.page,
            tp=group.tp,
            pp=group.pp,
            node=group.node,
            device=group.device or cluster.device,
            pool_share=size.gpu_share,
            tier_bytes=memory.host_tier if group.host_tier is None else group.host_tier,
            tier_name=_tier_name(config, group, rank),
            tiers=frozenset(_tier_name(config, its, r) for its in cluster.groups for r in range(its.ranks)),
            peers=_peers(config, group),
            store=str(config.store.resolve()),
            verify=cluster.verify,
            reader=cluster.reader,
            read_rate=config.storage.max_bytes_per_second,
            read_threads=cluster.read_threads,
            # A core is left to the daemon: threads that wait for a busy one slow every step down.
            compute_threads=cluster.compute_threads or max(1, (cores - 1) // cluster.ranks),
            max_batch_tokens=cluster.max_batch_tokens,
            max_batch_sequences=cluster.max_batch_sequences,
            graphs=cluster.graphs,
            attention=cluster.attention,
            suspended_bytes=memory.suspended,
        )
        for rank in range(group.ranks)
    )


def _tier_name(config: Config, group: GroupConfig, rank: int) -> str:
    """A restarted worker finds its tier by it, and so does the next daemon of the same store."""
    return f"{_mark(config)}-{group.name}-{rank}"


def _peers(config: Config, group: GroupConfig) -> str:
    """Where the workers of a node meet; on a CPU they would only take each other's time."""
    if config.memory.peers == "off" or (group.device or _likely_device(config)) != "cuda" or config.cluster.ranks == 1:
        return ""
    return str(SHARED_MEMORY / f"gswapd-peers-{_mark(config)}")


def _mark(config: Config) -> str:
    """Tells daemons of different stores apart."""
    return blake3(str(config.store.resolve()).encode()).hexdigest(8)


def core_config(config: Config) -> CoreConfig:
    extent = EXTENT_BYTES[_likely_device(config)]
    if config.storage.max_bytes_per_second is not None:
        extent = min(extent, int(config.storage.max_bytes_per_second * EXTENT_SECONDS))
    return CoreConfig(
        page_bytes=config.memory.page,
        max_queue=config.scheduler.max_queue,
        max_queue_total=config.scheduler.max_queue_total,
        max_running=config.cluster.max_batch_sequences,
        extent_pages=max(1, extent // config.memory.page),
        wait_bound=config.scheduler.wait_bound,
        policy=config.scheduler.policy,
        time_slice=config.scheduler.time_slice,
    )


def _likely_device(config: Config) -> str:
    """Where the workers will be, as far as can be told before there is a Ray: it is a matter of speed only."""
    if config.cluster.device != "auto":
        return config.cluster.device
    return "cuda" if config.cluster.ray_address is not None or GPU_DEVICE.exists() else "cpu"
