"""Another worker's frames and host tier, as they are mapped in this process.

A **window** shows all frames of one of a lender's pools at fixed addresses, to be read from. `HostWindow` is one for
frames in host memory, `CudaWindow` (`swapper/cuda_window.py`) for those of a GPU. `StagingSource` is a neighbour's
host tier, to be staged from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from swapper import libc
from swapper.copier import Copier
from swapper.errors import DeviceError, GswapdError
from swapper.peer_protocol import PeerGone

PINNED_AT_ONCE = 64 << 20
"""About how much of a neighbour's tier is pinned in one call to the driver, which holds up others meanwhile."""


class Window(Protocol):
    """Frames of another process, mapped here."""

    def add(self, descriptors: Sequence[int]) -> None:
        """Map the next frames. The descriptors stay the caller's. Raises DeviceError if that cannot be done."""

    def address(self, frame: int) -> int: ...

    def close(self) -> None:
        """Unmap them; nothing is being copied from them any more."""


OpenWindow = Callable[[int, int], Window]
"""Makes a window for that many frames of that many bytes each."""


class HostWindow:
    """A `Window` of a `HostFramePool`, which is one file."""

    def __init__(self, frames: int, page_bytes: int) -> None:
        self._nbytes = frames * page_bytes
        self._page_bytes = page_bytes
        self._base = 0

    def add(self, descriptors: Sequence[int]) -> None:
        (descriptor,) = descriptors
        try:
            self._base = libc.mmap(0, self._nbytes, libc.PROT_READ, libc.MAP_SHARED, descriptor)
        except OSError as error:
            raise DeviceError(f"A neighbour's frames cannot be mapped: {error}") from error

    def address(self, frame: int) -> int:
        return self._base + frame * self._page_bytes

    def close(self) -> None:
        if self._base:
            libc.munmap(self._base, self._nbytes)
            self._base = 0


class StagingSource:
    """An asker's host tier, mapped and pinned.

    The file is opened anew, and not by the owner's descriptor: that would keep the owner's lock on it beyond its death.
    """

    def __init__(
        self, path: Path, start: int, nbytes: int, page_bytes: int, copier: Copier, given_up: Callable[[], bool]
    ) -> None:
        """Takes its time. Raises PeerGone or DeviceError if that memory cannot be had, or nobody wants it any more."""
        self._start = start
        self._nbytes = nbytes
        self._copier = copier
        self._pinned: list[int] = []
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._base = libc.mmap(0, start + nbytes, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise PeerGone(f"Its host tier cannot be mapped: {error}.") from error
        step = max(1, PINNED_AT_ONCE // page_bytes) * page_bytes
        try:
            for first in range(0, nbytes, step):
                if given_up():
                    raise PeerGone("It went before its host tier was pinned.")
                address = self._base + start + first
                copier.pin(address, min(step, nbytes - first))
                self._pinned.append(address)
        except GswapdError:
            self.close()
            raise

    def address(self, offset: int, nbytes: int) -> int | None:
        """Where a range of the tier's slots is. None: it has no such range."""
        return self._base + self._start + offset if 0 <= offset <= offset + nbytes <= self._nbytes else None

    def close(self) -> None:
        """Nothing is being copied from it any more."""
        while self._pinned:
            self._copier.unpin(self._pinned.pop())
        libc.munmap(self._base, self._start + self._nbytes)
