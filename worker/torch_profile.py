"""torch.profiler around a recording, when asked: its own trace, and when collectives really ran on a GPU.

Our recorder sees collectives where they are launched, which tells nothing on a GPU, and nothing at all within a CUDA
graph. The profiler hears of every kernel from the driver. NCCL's include the time that they wait for other ranks.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.recorder import Span, TorchProfiler

KERNELS = {
    "ncclDevKernel_AllReduce": "all_reduce",
    "ncclDevKernel_AllGather": "all_gather",
    "ncclDevKernel_Broadcast": "broadcast",
}
"""NCCL's kernels by the beginning of their names. One kernel stands for both sends and receives, so they have none."""


class TorchProfile:
    """Of all threads, from here to `end`."""

    def __init__(self, what: TorchProfiler) -> None:
        self._traced = what == "trace"
        activities = [ProfilerActivity.CPU] if self._traced or not torch.cuda.is_available() else []
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=threads)
        self._profile.start()
        self._began = time.time_ns()

    def end(self) -> tuple[bytes, tuple[Span, ...]]:
        """Chrome's JSON, compressed, which Perfetto opens, if it was asked for; and a span for each collective."""
        self._profile.stop()
        if not self._traced:
            return b"", tuple(self._spans())
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = gzip.compress(path.read_bytes(), compresslevel=1)
        return trace, tuple(self._spans())

    def _spans(self) -> list[Span]:
        assert self._profile.profiler is not None
        results: Any = self._profile.profiler.kineto_results
        return [
            Span(kind, "", (event.start_ns() - self._began) / 1e9, event.duration_ns() / 1e9)
            for event in results.events()
            for name, kind in KERNELS.items()
            if event.name().startswith(name)
        ]
