"""Frames and regions: physical pieces of memory, and the reserved addresses they are mapped at.

A **frame** is one piece of memory of the pool's page size. A **region** is a range of addresses, reserved
for as long as a model is known, whose pages have a frame behind them or fault. Frames are created once, at
start; paging maps and unmaps them, so addresses never change and nothing ever fragments.

`FramePool` is what everything above is written against. `HostFramePool` (`swapper/host_frames.py`) implements
it in host memory, `CudaFramePool` (`swapper/cuda_frames.py`) on a GPU, both over the books of
`swapper/base_pool.py`. `FrameTable` is the part that counts: which frames are free, and how many hold the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swapper.errors import OutOfFrames


@dataclass(slots=True, eq=False)
class Frame:
    """One physical piece of memory. `references` counts the mappings that hold it; 0 means free."""

    index: int
    references: int = 0


@dataclass(slots=True, eq=False)
class Region:
    """Reserved addresses `[address, address + nbytes)`; `nbytes` is a multiple of the page size."""

    address: int
    nbytes: int
    device: str  # torch's word: "cpu", "cuda:0"


class FramePool(Protocol):
    """Frames of one device, and the regions they are mapped in. Every method may be called from any thread."""

    page_bytes: int
    frames: int  # how many there are in all

    @property
    def free(self) -> int:
        """Frames that nothing holds now."""

    def take(self) -> Frame:
        """A free frame, with one reference. Raises OutOfFrames."""

    def retain(self, frame: Frame) -> None:
        """Count one more holder of a frame that is held. Raises ValueError if it is free."""

    def release(self, frame: Frame) -> None:
        """Count one holder less; the last one's release makes the frame free. Raises ValueError if it is free."""

    def reserve(self, nbytes: int) -> Region:
        """Reserve addresses, rounded up to whole pages. Touching one before `map` faults."""

    def unreserve(self, region: Region) -> None:
        """Give the addresses back. Raises ValueError if a page of it is mapped."""

    def guard(self, region: Region, settle: Callable[[], None]) -> None:
        """Have `settle` called before pages of a region are unmapped.

        It returns once nothing that was submitted so far touches the region; it may be called from any thread.
        """

    def map(self, region: Region, page: int, *frames: Frame) -> None:
        """Put frames behind adjacent pages of a region, all or none. The caller holds a reference for each mapping.

        Raises OutOfFrames if the system cannot make the mappings, ValueError if a page has a frame already.
        """

    def unmap(self, region: Region, page: int, count: int = 1) -> None:
        """Take the frames from behind `count` pages, all or none; touching them faults again.

        On a GPU, work that was submitted before is waited for: what the region's guard says, or else all there is.
        References stay the caller's. Raises ValueError if a page has no frame.
        """

    def peek(self, address: int, nbytes: int) -> memoryview:
        """At most a page of mapped bytes, to be looked at and not written to.

        On a GPU it is a copy, which the same thread's next `peek` overwrites.
        """

    def export(self) -> Iterator[Sequence[int]]:
        """Descriptors of all frames, in order and a few at a time, for other processes (`swapper/peer_frames.py`).

        They are the caller's to close. Raises DeviceError if the device cannot share its memory.
        """

    def close(self) -> None:
        """Give all memory back. Nothing may be mapped or touched any more."""


class FrameTable:
    """Which of a pool's frames are free, and how many references hold each of the others. Thread-safe."""

    def __init__(self, frames: int) -> None:
        self._lock = threading.Lock()
        # A stack: the frame that was freed last is warm in the processor's caches, and is taken first.
        self._free = [Frame(index) for index in reversed(range(frames))]
        self._frames = frames

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Frame:
        with self._lock:
            if not self._free:
                raise OutOfFrames(f"All {self._frames} frames are in use; page something out first.")
            frame = self._free.pop()
            frame.references = 1
            return frame

    def retain(self, frame: Frame) -> None:
        with self._lock:
            _check_held(frame, "retained")
            frame.references += 1

    def release(self, frame: Frame) -> None:
        with self._lock:
            _check_held(frame, "released")
            frame.references -= 1
            if frame.references == 0:
                self._free.append(frame)


def _check_held(frame: Frame, verb: str) -> None:
    if frame.references <= 0:
        raise ValueError(f"Frame {frame.index} was {verb}, but nothing holds it.")
