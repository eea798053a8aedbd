"""Is this machine fit to serve: what `gswapd doctor` looks at, and what to do about what it finds.

Every check looks at one thing and says what it found; what is not right comes with what to do about it. Nothing is
changed, and nothing is written.
"""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from server.config import Config
from swapper.host_frames import available_memory

Verdict = Literal["ok", "note", "problem"]

GPU_DEVICE = Path("/dev/nvidiactl")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
MAP_LIMIT = Path("/proc/sys/vm/max_map_count")
RAY_SHARED_MEMORY = 256 << 20
"""What a private Ray keeps in shared memory for itself."""
OPEN_FILES = 8192
READ_SECONDS, READ_BYTES, READ_THREADS = 2.0, 8 << 20, 8
SLOW_DISK = 0.5e9  # bytes a second


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(config: Config) -> Iterator[Finding]:
    """One finding a check, as it is made."""
    checks: tuple[Callable[[Config], Finding], ...] = (
        driver, reading, storage, free_memory, shared_memory, open_files, memory_maps, disk_space, disk_speed,
        scheduler,
    )  # fmt: skip
    for check in checks:
        yield check(config)


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def driver(config: Config) -> Finding:
    if not GPU_DEVICE.exists():
        if config.cluster.device == "cuda":
            advice = "Install NVIDIA's driver; in a container, run it with --gpus all. Or set cluster.device to cpu."
            return Finding("GPU driver", "problem", "no NVIDIA driver, and cluster.device is cuda", advice)
        return Finding("GPU driver", "note", "no NVIDIA driver: models run on the CPU")
    try:
        version = DRIVER.read_text().splitlines()[0].split("Module")[1].split()[0]
    except (OSError, IndexError):
        version = "of unknown version"
    if find_spec("cuda") is None:
        return Finding("GPU driver", "problem", f"{version}, but cuda-bindings is missing", "pip install 'gswapd[gpu]'")
    return Finding("GPU driver", "ok", version)


def reading(config: Config) -> Finding:
    """The path from storage to a GPU."""
    if not GPU_DEVICE.exists() or config.cluster.reader == "pread":
        return Finding("read path", "ok", "pread")
    if find_spec("kvikio") is None:
        return Finding("read path", "problem", "kvikio is missing", "pip install 'gswapd[gpu]'")
    import kvikio.cufile_driver
    import kvikio.defaults

    from swapper.gds import has_gds

    if has_gds(kvikio):
        return Finding("read path", "ok", "kvikio with GPUDirect Storage")
    advice = "Fine where models fit the page cache or the host tier. Else load nvidia-fs, or see docs/storage.md."
    return Finding("read path", "note", "kvikio by way of host memory: no GPUDirect Storage here", advice)


def storage(config: Config) -> Finding:
    if not (config.store / "models").is_dir():
        advice = "gswapd add CHECKPOINT --name NAME makes it; `store` in gswapd.yaml names another."
        return Finding("store", "note", f"{config.store} is not there yet", advice)
    if not os.access(config.store, os.R_OK | os.X_OK):
        return Finding("store", "problem", f"{config.store} cannot be read", "Give this user the right to.")
    return Finding("store", "ok", f"{config.store}, {len(_shards(config))} shard files")


def _host_tiers(config: Config) -> int:
    """Of every rank that may run here."""
    own = config.memory.host_tier
    return sum(group.ranks * (own if group.host_tier is None else group.host_tier) for group in config.cluster.groups)


def free_memory(config: Config) -> Finding:
    needed, free = _host_tiers(config), available_memory()
    if not GPU_DEVICE.exists() or config.cluster.device == "cpu":
        needed += sum(group.ranks * (group.pool or config.memory.pool) for group in config.cluster.groups)
    found = f"{_size(free)} available, {_size(needed)} wanted for memory.pool and memory.host_tier"
    if needed > 0.9 * free:
        return Finding("memory", "problem", found, "Make memory.pool or memory.host_tier smaller, or free memory.")
    return Finding("memory", "ok", found)


def shared_memory(config: Config) -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = _host_tiers(config) + RAY_SHARED_MEMORY
    found = f"{_size(free)} free in {SHARED_MEMORY}, {_size(needed)} wanted for the host tier and Ray"
    if free < needed:
        gibibytes = -(-needed // 2**30)
        advice = (
            f"docker run --shm-size={gibibytes}g; in Kubernetes, an emptyDir of medium Memory; else remount it larger."
        )
        return Finding("shared memory", "problem", found, advice)
    return Finding("shared memory", "ok", found)


def open_files(config: Config) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(OPEN_FILES, 4 * config.server.max_requests)
    if soft < needed:
        advice = f"ulimit -n {needed}, or LimitNOFILE={needed} in the systemd unit (the hard limit is {hard})."
        return Finding("open files", "problem", f"{soft} allowed", advice)
    return Finding("open files", "ok", f"{soft} allowed")


def memory_maps(config: Config) -> Finding:
    """On a CPU, every frame that is mapped is a mapping of its own for the kernel."""
    limit, frames = int(MAP_LIMIT.read_text()), config.memory.frames
    if 2 * frames > limit:
        advice = f"sysctl vm.max_map_count={4 * frames}, or a larger memory.page."
        return Finding("memory maps", "problem", f"{limit} allowed, memory.pool has {frames} frames", advice)
    return Finding("memory maps", "ok", f"{limit} allowed")


def disk_space(config: Config) -> Finding:
    place = next(path for path in (config.store, *config.store.absolute().parents) if path.exists())
    usage = shutil.disk_usage(place)
    if usage.free < 0.05 * usage.total:
        return Finding("disk space", "note", f"{_size(usage.free)} free", "`gswapd gc` removes what crashed adds left.")
    return Finding("disk space", "ok", f"{_size(usage.free)} free")


def disk_speed(config: Config) -> Finding:
    """Read the largest shard past the page cache, for two seconds."""
    shards = _shards(config)
    if not shards:
        return Finding("disk speed", "note", "not measured: the store has no model")
    shard = max(shards, key=lambda path: path.stat().st_size)
    try:
        speed = _read_speed(shard)
    except OSError as error:
        advice = "The store's file system takes no O_DIRECT: pages are read through the page cache."
        return Finding("disk speed", "note", f"not measured ({error.strerror})", advice)
    found = f"{speed / 1e9:.2f} GB/s: a model of 16 GB takes {16e9 / speed:.0f} s cold"
    if speed < SLOW_DISK:
        return Finding(
            "disk speed", "note", found, "Put the store on a local NVMe disk, or keep models in memory.host_tier."
        )
    return Finding("disk speed", "ok", found)


def scheduler(config: Config) -> Finding:
    """Whether its decisions are made by compiled code (`setup.py`)."""
    core = find_spec("scheduler.core.core")
    is_compiled = core is not None and not (core.origin or "").endswith(".py")
    return Finding("scheduler", "ok", "compiled" if is_compiled else "plain Python, which is enough for some groups")


def _shards(config: Config) -> list[Path]:
    return sorted((config.store / "models").rglob("*.safetensors"))


def _read_speed(path: Path) -> float:
    """Bytes a second, by several threads with O_DIRECT."""
    import mmap

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    began = time.perf_counter()

    def read(offset: int) -> int:
        if time.perf_counter() - began > READ_SECONDS:
            return 0
        with mmap.mmap(-1, READ_BYTES) as page:  # O_DIRECT wants memory that begins at a page
            return os.preadv(descriptor, [page], offset)

    try:
        with ThreadPoolExecutor(READ_THREADS) as threads:
            done = sum(threads.map(read, range(0, os.fstat(descriptor).st_size, READ_BYTES)))
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - began)
