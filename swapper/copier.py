"""Copies between host memory and mapped frames, done in the background: what the host tier moves its pages with.

`Copier` is the protocol; `HostCopier` copies within host memory, from a few threads. `CudaCopier`
(`swapper/cuda_copier.py`) has the GPU's copy engines do it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

Piece = tuple[int, int, int]
"""From where, to where, and how many bytes."""


class Copier(Protocol):
    """Any number of copies may be under way: whoever asks bounds them. Futures tell the seconds a copy took."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make host memory ready to be copied from and to at full speed."""

    def unpin(self, address: int) -> None:
        """Undo `pin`; no copy is under way there."""

    def put(self, source: int, target: int, nbytes: int) -> Future[float]:
        """Copy from pinned host memory to mapped frames. Raises DeviceError, now or later."""

    def fetch(self, source: int, target: int, nbytes: int) -> Future[float]:
        """Copy from mapped frames to pinned host memory. Raises DeviceError, now or later."""

    def across(self, pieces: Sequence[Piece]) -> Future[float]:
        """Copy from a neighbour's frames to mapped ones of our own. Raises DeviceError, now or later."""

    def close(self) -> None:
        """Finish what is under way and stop."""


class HostCopier:
    """A `Copier` for frames in host memory."""

    def __init__(self, threads: int = 4) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="copy")

    def pin(self, address: int, nbytes: int) -> None:
        """Nothing to do: a processor's copies need no pinned memory."""

    def unpin(self, address: int) -> None:
        """Nothing was done."""

    def put(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._threads.submit(_copy, source, target, nbytes)

    def fetch(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._threads.submit(_copy, source, target, nbytes)

    def across(self, pieces: Sequence[Piece]) -> Future[float]:
        return self._threads.submit(lambda: sum(_copy(*piece) for piece in pieces))

    def close(self) -> None:
        self._threads.shutdown()


def _copy(source: int, target: int, nbytes: int) -> float:
    begun = time.perf_counter()
    ctypes.memmove(target, source, nbytes)
    return time.perf_counter() - begun
