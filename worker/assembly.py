"""Making the real parts of a shard and putting them together. Imported in the worker's process only.

Importing this module imports torch and transformers, which takes seconds: a worker does it before it says that it is
ready, and not when the first request waits. What only a GPU needs is imported when there is one to be used.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.encoder import EncoderModel
from engine.engine import open_engine
from engine.mesh import Mesh, MeshRank
from engine.model import BoundModel, ModelRunnerProtocol
from engine.recorder import Recorder
from engine.workspace import WORKSPACE_BYTES
from swapper.copier import Copier, HostCopier
from swapper.errors import ConfigError
from swapper.frames import FramePool
from swapper.host_frames import HostFramePool
from swapper.host_tier import HostTier
from swapper.image import Image
from swapper.paged_shard import PagedShard
from swapper.peer_frames import HostWindow
from swapper.peers import PEERS_DEPTH, PEERS_RUN, RING_FRAMES, Peers
from swapper.pread import PreadReader
from swapper.readers import Reader
from swapper.store import Store
from swapper.throttle import ThrottledReader
from swapper.tier_arena import Arena, remove_orphans
from worker.memory import MemoryGauge
from worker.protocol import WorkerReady, WorkerSpec
from worker.shard import Shard

PREAD_THREADS = 4
MOST_KVIKIO_THREADS = 16
"""One H200 took 48.6 GB/s from 16 threads and 33.2 from 8; 20 gave no more."""

JOIN_TIMEOUT = 60.0
"""Seconds in which the workers of a mesh must have met: each says that it is here once its memory is its own."""

SPARE_CORES = 2
"""kvikio's threads keep a core busy each, waiting included. On 16 cores, with 16 of them, mapping a page took 650 µs
and page-ins reached 83 % of what kvikio can do; with 14 of them 140 µs, and all of it."""

GPU_DEPTH, GPU_RUN = 16, 4
"""Pages in flight, and how many of them are mapped together and read at once."""


GPU_SWITCH_INTERVAL = 0.0001
"""Seconds after which a thread that computes in Python lets another one in. On a GPU a decode is launched in two
milliseconds of Python that give way at each call of the driver, and the pager takes half of a processor meanwhile."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What depends on the device."""

    device: str
    pool: FramePool
    reader: Reader
    reader_name: str
    copier: Copier
    peers: Peers | None
    rehearse: Callable[[Path], object] = lambda path: None
    depth: int = 8
    run: int = 1


def open_shard(spec: WorkerSpec) -> tuple[Shard, WorkerReady]:
    """Raises ConfigError when the machine cannot give what the spec asks for, WorkerError when others do not come."""
    _check_store(spec)
    parts = _on_gpu(spec) if spec.device == "cuda" else _on_cpu(spec)
    mesh = _join_mesh(spec, parts.device)
    make_engine = partial(
        open_engine,
        parts.pool,
        mesh=mesh,
        max_batch_tokens=spec.max_batch_tokens,
        max_batch_sequences=spec.max_batch_sequences,
        compute_threads=spec.compute_threads,
        suspended_bytes=spec.suspended_bytes,
        recorder=Recorder(MemoryGauge(parts.pool, parts.device)),
    )
    shard = Shard(
        spec,
        parts.pool,
        parts.reader if spec.read_rate is None else ThrottledReader(parts.reader, spec.read_rate),
        make_engine,
        partial(_bind, mesh, spec.attention == "plain"),
        rehearse=parts.rehearse,
        tier=_open_tier(spec, parts.copier, parts.peers),
        peers=parts.peers,
        depth=parts.depth,
        run=parts.run,
    )
    return shard, WorkerReady(device=parts.device, reader=parts.reader_name, frames=parts.pool.frames)


def _join_mesh(spec: WorkerSpec, device: str) -> Mesh | None:
    """Meet the group's other workers, if it has some. Raises WorkerError."""
    rank = MeshRank(spec.tp, spec.pp, spec.rank)
    return Mesh.join(rank, spec.rendezvous, torch.device(device), JOIN_TIMEOUT) if rank.size > 1 else None


def _bind(mesh: Mesh | None, plain: bool, image: Image, shard: PagedShard) -> ModelRunnerProtocol:
    if image.manifest.embedding is not None:
        return EncoderModel.bind(image, shard)
    return BoundModel.bind(image, shard, mesh, plain=plain)


def _check_store(spec: WorkerSpec) -> None:
    """A model is found at the same path on every node: each has a copy of the store, or all share one."""
    if not spec.images:
        return
    here = Store(spec.store).identities()
    if wrong := [name for name, identity in spec.images.items() if here.get(name) != identity]:
        raise ConfigError(
            f"The store {spec.store} on node {platform.node()} lacks {', '.join(wrong)}, or has other images of that "
            "name. Copy the daemon's store to every node, to the same path, or let them share it."
        )


def _on_cpu(spec: WorkerSpec) -> _Parts:
    pool = HostFramePool(spec.frames, spec.page_bytes)
    peers = None
    if spec.peers:
        ring = HostFramePool(RING_FRAMES, spec.page_bytes)
        peers = Peers(Path(spec.peers), _name(spec), "cpu", pool, ring, HostCopier(), HostWindow)
    if spec.reader in ("auto", "pread"):
        return _Parts("cpu", pool, PreadReader(spec.read_threads or PREAD_THREADS), "pread", HostCopier(), peers)
    if spec.reader == "kvikio":
        from swapper.kvikio_reader import KvikioReader

        kvikio = KvikioReader(spec.read_threads or PREAD_THREADS)
        return _Parts("cpu", pool, kvikio, f"kvikio/{kvikio.source}", HostCopier(), peers)
    raise ConfigError(f"There is no reader {spec.reader!r}; use pread or kvikio.")


def _on_gpu(spec: WorkerSpec) -> _Parts:
    if spec.reader not in ("auto", "kvikio"):
        raise ConfigError(f"The reader {spec.reader!r} cannot read into a GPU's memory; use kvikio, or auto.")
    sys.setswitchinterval(GPU_SWITCH_INTERVAL)
    from engine.graphs import graphs_of
    from engine.rehearsal import Rehearsals
    from swapper.cuda_copier import CudaCopier
    from swapper.cuda_driver import CudaDevice
    from swapper.cuda_frames import CudaFramePool
    from swapper.cuda_window import CudaWindow
    from swapper.kvikio_reader import KvikioReader

    device = CudaDevice()
    graphs_of(torch.device(f"cuda:{device.ordinal}")).enabled = spec.graphs
    ring = CudaFramePool(device, RING_FRAMES, spec.page_bytes) if spec.peers else None
    pool = CudaFramePool(device, gpu_frames(spec, device.free_bytes()), spec.page_bytes)
    peers = None
    if ring is not None:
        window = partial(CudaWindow, device)
        peers = Peers(Path(spec.peers), _name(spec), "cuda", pool, ring, CudaCopier(device), window)
    kvikio = KvikioReader(spec.read_threads or kvikio_threads(), device=pool.device)
    return _Parts(
        pool.device,
        pool,
        kvikio,
        f"kvikio/{kvikio.source}",
        CudaCopier(device),
        peers,
        Rehearsals(pool, spec.max_batch_tokens).ask,
        GPU_DEPTH if peers is None else PEERS_DEPTH,
        GPU_RUN if peers is None else PEERS_RUN,
    )


def _name(spec: WorkerSpec) -> str:
    """By which neighbours know a worker."""
    return f"{spec.group}-{spec.rank}"


def gpu_frames(spec: WorkerSpec, free: int) -> int:
    """How many frames the pool gets of so many free bytes of a GPU. Raises ConfigError if that leaves no workspace."""
    room = max(0, free - WORKSPACE_BYTES) // spec.page_bytes
    if spec.pool_share is not None:
        return min(int(free * spec.pool_share) // spec.page_bytes, room)
    if spec.frames > room:
        raise ConfigError(
            f"The frame pool wants {spec.frames * spec.page_bytes:,} bytes of GPU memory. {free:,} are free, of which "
            f"{WORKSPACE_BYTES:,} are for what is not in frames. Make memory.pool smaller, or end other programs that "
            "use this GPU."
        )
    return spec.frames


def kvikio_threads() -> int:
    """How many of kvikio's threads suit this host."""
    return max(1, min(MOST_KVIKIO_THREADS, len(os.sched_getaffinity(0)) - SPARE_CORES))


def _open_tier(spec: WorkerSpec, copier: Copier, peers: Peers | None) -> HostTier | None:
    """The host tier, and an end to those that dead workers left behind."""
    remove_orphans(keep=spec.tiers | {spec.tier_name})
    slots = spec.tier_bytes // spec.page_bytes
    if not slots:
        copier.close()
        return None
    return HostTier(Arena(spec.tier_name, slots, spec.page_bytes), copier, peers)
