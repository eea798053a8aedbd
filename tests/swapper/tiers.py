"""Arenas of a test's own, and a copier that a test steers."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from swapper import libc
from swapper.contents import ContentKey
from swapper.copier import HostCopier, Piece
from swapper.granules import identity_of
from swapper.host_tier import HostTier
from swapper.tier_arena import Arena
from tests.swapper.paging import PAGE, PATIENCE, page_bytes


def key_of(tag: int, nbytes: int = PAGE) -> ContentKey:
    """What a page of `page_bytes(tag)` is known by."""
    return identity_of(memoryview(page_bytes(tag)[:nbytes])), nbytes


def new_name() -> str:
    return f"test-{uuid.uuid4().hex}"


@contextmanager
def open_tier(
    slots: int, directory: Path, name: str = "tier", copier: HostCopier | None = None, page_bytes: int = PAGE
) -> Iterator[HostTier]:
    """A tier that is ready."""
    tier = HostTier(Arena(name, slots, page_bytes, directory), copier or HostCopier(2))
    assert tier.wait_settled(PATIENCE)
    yield tier
    tier.close()


class Buffer:
    """A page's worth of memory that stands for mapped frames."""

    def __init__(self, tag: int | None = None) -> None:
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
        self.address = libc.mmap(0, PAGE, libc.PROT_READ | libc.PROT_WRITE, flags)
        if tag is not None:
            libc.view(self.address, PAGE)[:] = page_bytes(tag)

    def holds(self, tag: int, nbytes: int = PAGE) -> bool:
        return bytes(libc.view(self.address, nbytes)) == page_bytes(tag)[:nbytes]


class PendingCopy:
    """One copy of a `GatedCopier`: it happens when the test says so."""

    def __init__(self, source: int, target: int, nbytes: int) -> None:
        self.future: Future[float] = Future()
        self._arguments = (source, target, nbytes)

    def finish(self) -> None:
        source, target, nbytes = self._arguments
        libc.view(target, nbytes)[:] = libc.view(source, nbytes)
        self.future.set_result(0.25)


class GatedCopier(HostCopier):
    def __init__(self) -> None:
        super().__init__(1)
        self.pending: queue.SimpleQueue[PendingCopy] = queue.SimpleQueue()

    def next(self) -> PendingCopy:
        """The oldest copy that the test has not seen."""
        return self.pending.get(timeout=PATIENCE)

    def put(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._copy(source, target, nbytes)

    def fetch(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._copy(source, target, nbytes)

    def across(self, pieces: Sequence[Piece]) -> Future[float]:
        ((source, target, nbytes),) = pieces
        return self._copy(source, target, nbytes)

    def _copy(self, source: int, target: int, nbytes: int) -> Future[float]:
        copy = PendingCopy(source, target, nbytes)
        self.pending.put(copy)
        return copy.future
