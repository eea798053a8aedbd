"""Frames and regions: physical pieces of memory, and the reserved addresses they are mapped at.

A **frame** is one piece of memory of the pool's page size. A **region** is a range of addresses, reserved
for as long as a model is known, whose pages have a frame behind them or fault. Frames are created once, at
start; paging maps and unmaps them, so addresses never change and nothing ever fragments.

`FramePool` is what everything above is written against. `HostFramePool` implements it in host memory (one
memfd, `mmap(MAP_FIXED)` page by page), with the same semantics as CUDA's virtual memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
        """Count one more holder of a frame that is held."""

    def release(self, frame: Frame) -> None:
        """Count one holder less; the last one's release makes the frame free. Raises ValueError if it is free."""

    def reserve(self, nbytes: int) -> Region:
        """Reserve addresses, rounded up to whole pages. Touching one before `map` faults."""

    def unreserve(self, region: Region) -> None:
        """Give the addresses back. No page of it may be mapped."""

    def map(self, region: Region, page: int, frame: Frame) -> None:
        """Put a frame behind a page of a region. The caller holds a reference for the mapping."""

    def unmap(self, region: Region, page: int) -> None:
        """Take the frame from behind a page; touching the page faults again. References stay the caller's."""

    def close(self) -> None:
        """Give all memory back. Nothing may be mapped or touched any more."""
