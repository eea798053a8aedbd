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
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from swapper import libc
from swapper.base_pool import BasePool
from swapper.errors import ConfigError, OutOfFrames
from swapper.frames import Frame
from swapper.geometry import DATA_ALIGNMENT

_CGROUP = Path("/sys/fs/cgroup")
_RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE


class HostFramePool(BasePool):
    """A `FramePool` of host memory."""

    device = "cpu"

    def __init__(self, frames: int, page_bytes: int) -> None:
        """Raises ConfigError if the memory is not there, or the page size is not a multiple of 4,096."""
        if page_bytes <= 0 or page_bytes % DATA_ALIGNMENT:
            raise ConfigError(f"The page size must be a multiple of {DATA_ALIGNMENT} bytes, not {page_bytes}.")
        if frames <= 0:
            raise ConfigError(f"A frame pool needs at least one frame, not {frames}.")
        fd = _allocate(frames * page_bytes)  # first, so that a pool far too large costs nothing
        super().__init__(frames, page_bytes)
        self._fd = fd

    def peek(self, address: int, nbytes: int) -> memoryview:
        return libc.view(address, nbytes)

    def export(self) -> Iterator[Sequence[int]]:
        yield [os.dup(self._fd)]

    def close(self) -> None:
        for region, _ in self._forget_regions():
            libc.munmap(region.address, region.nbytes)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, nbytes: int) -> int:
        return libc.mmap(0, nbytes, libc.PROT_NONE, _RESERVED)

    def _unreserve(self, address: int, nbytes: int) -> None:
        libc.munmap(address, nbytes)

    def _map(self, address: int, frames: Sequence[Frame]) -> None:
        try:
            for page, frame in enumerate(frames):
                libc.mmap(
                    address + page * self.page_bytes,
                    self.page_bytes,
                    libc.PROT_READ | libc.PROT_WRITE,
                    libc.MAP_SHARED | libc.MAP_FIXED | libc.MAP_POPULATE,
                    self._fd,
                    frame.index * self.page_bytes,
                )
        except OSError as error:
            if page:
                self._unmap(address, page)
            raise OutOfFrames(
                f"A frame cannot be mapped ({error.strerror}); the system may be out of memory or out of mappings: "
                "see vm.max_map_count."
            ) from error

    def _unmap(self, address: int, count: int) -> None:
        # One call for the whole run: the kernel does it all or not at all, and a thread that competes for the GIL
        # with a busy neighbour waits for it once and not once a page.
        libc.mmap(address, count * self.page_bytes, libc.PROT_NONE, _RESERVED | libc.MAP_FIXED)


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
