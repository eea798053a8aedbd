"""What every frame pool shares: the books of its regions, kept around the few calls that differ from memory to memory.

A pool of one kind of memory says how to reserve addresses and how to put a frame behind them; which pages are mapped,
and what may not be asked, is written once, here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from swapper.frames import Frame, FrameTable, Region
from swapper.geometry import pages


class BasePool(FrameTable, ABC):
    """A `FramePool` but for the memory itself."""

    device: str  # torch's word for where the regions are

    def __init__(self, frames: int, page_bytes: int) -> None:
        super().__init__(frames)
        self.frames = frames
        self.page_bytes = page_bytes
        self._regions: dict[Region, set[int]] = {}  # region → its mapped pages
        self._guards: dict[Region, Callable[[], None]] = {}
        self._regions_lock = threading.Lock()

    # ---- the memory

    @abstractmethod
    def _reserve(self, nbytes: int) -> int:
        """Reserve addresses; returns the first."""

    @abstractmethod
    def _unreserve(self, address: int, nbytes: int) -> None:
        """Give addresses back; nothing is mapped there, or the pool is closed."""

    @abstractmethod
    def _map(self, address: int, frames: Sequence[Frame]) -> None:
        """Put frames behind the addresses of adjacent pages. Raises OutOfFrames, and then nothing has changed."""

    def _settle(self) -> None:
        """Return once nothing that was submitted so far is at work: there is nothing, in memory that only hosts use."""

    @abstractmethod
    def _unmap(self, address: int, count: int) -> None:
        """Take the frames from behind `count` adjacent pages, all or none."""

    # ---- the books

    def reserve(self, nbytes: int) -> Region:
        nbytes = max(1, pages(nbytes, self.page_bytes)) * self.page_bytes
        region = Region(self._reserve(nbytes), nbytes, self.device)
        with self._regions_lock:
            self._regions[region] = set()
        return region

    def unreserve(self, region: Region) -> None:
        with self._regions_lock:
            if mapped := self._mapped(region):
                raise ValueError(f"A region was given back while {len(mapped)} of its pages were mapped.")
            del self._regions[region]
            self._guards.pop(region, None)
        self._unreserve(region.address, region.nbytes)

    def guard(self, region: Region, settle: Callable[[], None]) -> None:
        with self._regions_lock:
            self._guards[region] = settle

    def map(self, region: Region, page: int, *frames: Frame) -> None:
        for frame in frames:
            if frame.references <= 0:
                raise ValueError(f"Frame {frame.index} was mapped, but nothing holds it.")
        run = range(page, page + len(frames))
        with self._regions_lock:
            mapped = self._mapped(region)
            self._check_inside(region, page, len(frames))
            if twice := mapped.intersection(run):
                raise ValueError(f"Page {min(twice)} of a region was mapped twice.")
            mapped.update(run)
        try:
            self._map(region.address + page * self.page_bytes, frames)
        except BaseException:
            with self._regions_lock:
                mapped.difference_update(run)
            raise

    def unmap(self, region: Region, page: int, count: int = 1) -> None:
        run = range(page, page + count)
        with self._regions_lock:
            mapped = self._mapped(region)
            self._check_inside(region, page, count)
            if not mapped.issuperset(run):
                raise ValueError(f"Pages [{page}, {page + count}) of a region were unmapped, but not all were mapped.")
            settle = self._guards.get(region, self._settle)
        settle()
        self._unmap(region.address + page * self.page_bytes, count)
        with self._regions_lock:
            mapped.difference_update(run)

    def _forget_regions(self) -> list[tuple[Region, set[int]]]:
        """All regions with their mapped pages, which are the pool's no more: for `close`."""
        with self._regions_lock:
            regions = list(self._regions.items())
            self._regions.clear()
            self._guards.clear()
        return regions

    def _mapped(self, region: Region) -> set[int]:
        try:
            return self._regions[region]
        except KeyError:
            raise ValueError("The region is not one of this pool's, or was given back.") from None

    def _check_inside(self, region: Region, page: int, count: int) -> None:
        if not (count > 0 and page >= 0 and (page + count) * self.page_bytes <= region.nbytes):
            raise ValueError(f"Pages [{page}, {page + count}) are not inside a region of {region.nbytes} bytes.")
