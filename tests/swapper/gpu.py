"""What the tests that need a GPU share. Importing it touches none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from swapper.cuda_driver import CudaDevice
    from swapper.cuda_frames import CudaFramePool
    from swapper.pager import PagedShard


def _lacking() -> str | None:
    if not Path("/dev/nvidiactl").exists():
        return "this host has no NVIDIA GPU"
    try:
        missing = [name for name in ("cuda.bindings.driver", "kvikio") if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:
        return f"gswapd[gpu] is not installed: {error}"
    return f"gswapd[gpu] is not installed: {missing[0]} is missing" if missing else None


LACKING = _lacking()
needs_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(LACKING is not None or not Path("/dev/nvidia1").exists(), reason=LACKING or "one GPU only"),
]
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(LACKING is not None, reason=LACKING or "")]


def open_device() -> CudaDevice:
    from swapper.cuda_driver import CudaDevice

    return CudaDevice()


def device_bytes(pool: CudaFramePool, address: int, nbytes: int) -> bytes:
    """A copy of mapped bytes, whatever their length."""
    step = pool.page_bytes
    return b"".join(bytes(pool.peek(address + start, min(step, nbytes - start))) for start in range(0, nbytes, step))


def resident_on(pool: CudaFramePool, shard: PagedShard) -> bytes:
    return device_bytes(pool, shard.region.address, min(shard.resident * pool.page_bytes, shard.shard.nbytes))
