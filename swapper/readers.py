"""Readers: bytes of a shard file into memory that is mapped already.

`Reader` is the protocol the pager is written against: `open` a file, then `read` ranges of it, several in
flight. A read that comes back is whole: a short one is an error. Readers queue what they are asked for without
a bound of their own: the pager bounds how many reads are in flight (`Pager(depth=…)`).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Where one range came from, and how long one thread worked at it.

    Sources: `page_cache` (it was in the page cache), `disk` (it was not), `gds` or `posix` (kvikio); besides readers,
    `peer` (a neighbour's frame), `host` (the host tier), `fan_in` (the host tier, over a neighbour's link).
    """

    source: str
    nbytes: int
    seconds: float = 0.0


class ShardFile(Protocol):
    """One open shard file."""

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        """Start reading file bytes `[offset, offset + nbytes)` to `address`.

        The future raises ReadError (naming file and offset) on an I/O error or a short read.
        """

    def close(self) -> None:
        """Close the file. Its reads are done: the caller sees to that."""


class Reader(Protocol):
    """Opens shard files; owns the threads that read them."""

    def open(self, path: Path) -> ShardFile:
        """Raises ReadError if the file cannot be opened."""

    def close(self) -> None:
        """Finish what is being read and stop the threads."""
