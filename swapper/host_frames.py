"""Frames in host memory: one memfd, mapped page by page at fixed addresses.

A region is an anonymous `PROT_NONE` mapping: it costs addresses and no memory, and touching it is a
segmentation fault. `map` lays a frame's range of the memfd over a page of it, `unmap` lays `PROT_NONE` back.
One frame may lie at any number of addresses.

Three choices were measured (258 MiB in pages of 2 MiB, two cores, four threads):
- `MAP_POPULATE`: the kernel fills the page table in one go, and page-in from the page cache takes 32 ms; with a
  fault for each 4 KiB it takes 72 ms.
- Memory is allocated at start (`fallocate`, 0.1 s per GiB), so that a pool that does not fit is refused at start
  and not killed under load. The kernel clears a frame when it is first mapped, which makes each frame's first
  page-in slower; clearing them all at start would take 0.3 to 1 s per GiB of everyone's start-up time.
- Transparent huge pages (`MADV_COLLAPSE`) took 0.4 to 2 s per GiB at start, and made page-in 15 % and a
  matrix-vector product 2 % faster: not worth it.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import psutil

from swapper import libc
from swapper.errors import ConfigError, OutOfFrames
from swapper.frames import Frame, FrameTable, Region
from swapper.geometry import DATA_ALIGNMENT, pages

_CGROUP = Path("/sys/fs/cgroup")
_RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE


class HostFramePool(FrameTable):
    """A `FramePool` of host memory."""

    def __init__(self, frames: int, page_bytes: int) -> None:
        """Raises ConfigError if the memory is not there, or the page size is not a multiple of 4,096."""
        if page_bytes <= 0 or page_bytes % DATA_ALIGNMENT:
            raise ConfigError(f"The page size must be a multiple of {DATA_ALIGNMENT} bytes, not {page_bytes}.")
        if frames <= 0:
            raise ConfigError(f"A frame pool needs at least one frame, not {frames}.")
        super().__init__(frames)
        self.frames = frames
        self.page_bytes = page_bytes
        self._fd = _allocate(frames * page_bytes)
        self._regions: dict[Region, set[int]] = {}  # region → its mapped pages
        self._regions_lock = threading.Lock()

    def reserve(self, nbytes: int) -> Region:
        nbytes = max(1, pages(nbytes, self.page_bytes)) * self.page_bytes
        region = Region(libc.mmap(0, nbytes, libc.PROT_NONE, _RESERVED), nbytes, "cpu")
        with self._regions_lock:
            self._regions[region] = set()
        return region

    def unreserve(self, region: Region) -> None:
        with self._regions_lock:
            if mapped := self._mapped(region):
                raise ValueError(f"A region was given back while {len(mapped)} of its pages were mapped.")
            del self._regions[region]
        libc.munmap(region.address, region.nbytes)

    def map(self, region: Region, page: int, frame: Frame) -> None:
        if frame.references <= 0:
            raise ValueError(f"Frame {frame.index} was mapped, but nothing holds it.")
        with self._regions_lock:
            mapped = self._mapped(region)
            self._check_inside(region, page, 1)
            if page in mapped:
                raise ValueError(f"Page {page} of a region was mapped twice.")
            mapped.add(page)
        try:
            libc.mmap(
                region.address + page * self.page_bytes,
                self.page_bytes,
                libc.PROT_READ | libc.PROT_WRITE,
                libc.MAP_SHARED | libc.MAP_FIXED | libc.MAP_POPULATE,
                self._fd,
                frame.index * self.page_bytes,
            )
        except OSError as error:
            with self._regions_lock:
                mapped.discard(page)
            raise OutOfFrames(
                f"A frame cannot be mapped ({error.strerror}); the system may be out of memory or out of mappings: "
                "see vm.max_map_count."
            ) from error

    def unmap(self, region: Region, page: int, count: int = 1) -> None:
        run = range(page, page + count)
        with self._regions_lock:
            mapped = self._mapped(region)
            self._check_inside(region, page, count)
            if not mapped.issuperset(run):
                raise ValueError(f"Pages [{page}, {page + count}) of a region were unmapped, but not all were mapped.")
        # One call for the whole run: the kernel does it all or not at all, and a thread that competes for the GIL
        # with a busy neighbour waits for it once and not once a page.
        libc.mmap(
            region.address + page * self.page_bytes,
            count * self.page_bytes,
            libc.PROT_NONE,
            _RESERVED | libc.MAP_FIXED,
        )
        with self._regions_lock:
            mapped.difference_update(run)

    def close(self) -> None:
        with self._regions_lock:
            for region in self._regions:
                libc.munmap(region.address, region.nbytes)
            self._regions.clear()
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _mapped(self, region: Region) -> set[int]:
        try:
            return self._regions[region]
        except KeyError:
            raise ValueError("The region is not one of this pool's, or was given back.") from None

    def _check_inside(self, region: Region, page: int, count: int) -> None:
        if not (count > 0 and page >= 0 and (page + count) * self.page_bytes <= region.nbytes):
            raise ValueError(f"Pages [{page}, {page + count}) are not inside a region of {region.nbytes} bytes.")


def _allocate(nbytes: int) -> int:
    """A memfd with memory behind all of it. Raises ConfigError if there is not enough."""
    available = available_memory()
    if nbytes > available:
        raise _too_large(nbytes, available)
    fd = os.memfd_create("gswapd-frames", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise _too_large(nbytes, available) from error
        raise
    return fd


def _too_large(wanted: int, available: int) -> ConfigError:
    return ConfigError(
        f"The frame pool wants {wanted:,} bytes of memory, but only {available:,} are available. "
        "Make the pool smaller, or end other programs."
    )


def available_memory() -> int:
    """Bytes that this process can still get: the machine's, or its control group's where that is less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return available  # the root group, or version 1
    if limit == "max":
        return available
    # File pages that nobody used lately count as used, but the kernel drops them when memory is asked for.
    return min(available, int(limit) - used + int(statistics.get("inactive_file", 0)))
