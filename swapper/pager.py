"""The pager: which pages of which shard are in, and how they get in and out.

A `PagedShard` is one shard's region and its page table. Its resident pages are always a prefix: pages come
in from page 0 upwards, several in flight, and leave from the tail. Readiness is published page by page, in
order, so a forward pass can run layer *i* while layer *i + 1* is still being read.

A page's content is known by hash before it is read. When a frame of the pool already holds those bytes, or
is being filled with them, the page maps that frame instead of reading again (source `alias`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swapper.frames import Region
from swapper.image import Shard


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """How much of a page-in one source gave."""

    pages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageInResult:
    """What a finished page-in moved. `stages` are seconds of work by stage (map, read, verify), summed over threads."""

    first: int
    last: int  # exclusive
    seconds: float  # wall time from request to the last page
    sources: Mapping[str, SourceBytes]  # alias, page_cache, disk, gds, posix
    stages: Mapping[str, float]


class PagedShard(Protocol):
    """One shard with its region. Attributes may be read from any thread."""

    shard: Shard
    region: Region
    page_count: int

    @property
    def resident(self) -> int:
        """Pages `[0, resident)` are in and stay in until a page-out or a failed page-in."""

    def is_ready(self, nbytes: int) -> bool:
        """Whether data bytes `[0, nbytes)` are in."""

    def wait(self, nbytes: int) -> None:
        """Return once data bytes `[0, nbytes)` are in.

        Raises PageInAborted as soon as that cannot happen without a new page-in being asked for after a
        failure, an `abort`, or a close. Being not yet asked for is no reason to raise: extents are
        asked for one after another. Callers bound the wait by aborting (the worker's stall timer does).
        """


class Pager(Protocol):
    """All shards of one frame pool."""

    def open(self, model: str, shard: Shard, path: Path) -> PagedShard:
        """Reserve a region for a shard; nothing is read yet. Raises CorruptImage if the file is too short."""

    def close(self, model: str) -> None:
        """Page everything out and give the region back."""

    def page_in(self, model: str, first: int, last: int, done: Callable[[PageInResult | Exception], None]) -> None:
        """Start bringing pages `[first, last)` in, in order; `first` must be where the previous page-in ends.

        Returns at once. `done` is called once, from another thread: with a PageInResult, or with the
        exception (ReadError, HashMismatch, OutOfFrames, CorruptImage) after which the whole shard is absent and every
        frame it held was returned. Page-ins of one shard may be queued behind one another; a failure
        fails those behind it too.
        """

    def page_out(self, model: str, keep: int) -> int:
        """Unmap pages `[keep, resident)`; returns how many frames became free (shared ones did not).

        Raises ValueError while a page-in of that shard is under way. The caller has made sure that
        nothing touches those pages any more.
        """

    def abort(self, model: str) -> None:
        """Give up a page-in under way: it ends as failed, with PageInAborted, once its reads are back."""

    @property
    def progress(self) -> int:
        """Pages that ever arrived: moves as long as reading does."""
