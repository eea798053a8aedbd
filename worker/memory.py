"""What memory a worker uses, as those who give it count it: its frame pool, torch's allocator, the driver, the kernel.

They count different things, so each has its name: `frames` of the pool that are held; `mapped`, shared memory that the
kernel has mapped for this process (on a CPU, frames again, and nothing of ours counted it); `allocated` and `reserved`
by torch on a GPU, outside of the pool; `graphs`, recorded decodes; `device`, all that is taken on the GPU, by whomever,
as CUDA has it, and `nvml` as the driver's management library has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from swapper.frames import FramePool
from worker.nvml import GpuMeter

_STATUS = Path("/proc/self/status")
_SHARED = "RssShmem:"


class MemoryGauge:
    """Peaks since `reset`, in bytes. `now` is called after every pass that is recorded."""

    def __init__(self, pool: FramePool, device: str) -> None:
        self._pool = pool
        self._device = torch.device(device)
        self._meter = GpuMeter(self._device) if self._device.type == "cuda" else None

    def reset(self) -> None:
        if self._meter is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._meter.reset()

    def readings(self) -> Mapping[str, float]:
        """Of the GPU since `reset`; none on a CPU."""
        return self._meter.readings() if self._meter is not None else {}

    def now(self) -> Mapping[str, int]:
        frames = (self._pool.frames - self._pool.free) * self._pool.page_bytes
        if self._device.type != "cuda":
            return {"frames": frames, "mapped": _mapped()}
        from engine.graphs import graph_bytes  # wants a GPU's libraries

        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "frames": frames,
            "pool": self._pool.frames * self._pool.page_bytes,
            "allocated": torch.cuda.max_memory_allocated(self._device),
            "reserved": torch.cuda.max_memory_reserved(self._device),
            "graphs": graph_bytes(self._device),
            "device": total - free,
        }


def _mapped() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(_SHARED))
    return int(line.split()[1]) * 1024
