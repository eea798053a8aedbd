"""Is a range of a file in the page cache? Asked before a read, to choose between buffered reading and `O_DIRECT`.

It is asked with `mincore`, over a mapping of the file that is never touched. A trial `preadv2` with `RWF_NOWAIT` starts
the kernel's read-ahead, which fills the cache with what was to be kept out of it, and tmpfs refuses it; `cachestat` is
quicker (1.5 µs instead of 13 for 2 MiB, which takes 300 to read) but needs Linux 6.5. The kernel tells the truth to the
file's owner and to those who may write it; to others it says that everything is cached, and then reads are buffered.
"""

from __future__ import annotations

import os

from swapper import libc

_MEMORY_PAGE = os.sysconf("SC_PAGE_SIZE")


class CacheProbe:
    """The page cache's side of one open file."""

    def __init__(self, fd: int) -> None:
        """The descriptor may be closed afterwards. Raises OSError."""
        self._size = os.fstat(fd).st_size
        self._mapping = libc.mmap(0, max(1, self._size), libc.PROT_READ, libc.MAP_SHARED, fd)

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache holds all of a range of the file."""
        start = offset // _MEMORY_PAGE * _MEMORY_PAGE
        end = min(offset + nbytes, self._size)
        if end <= start:
            return False
        return 0 not in libc.mincore(self._mapping + start, end - start)

    def close(self) -> None:
        libc.munmap(self._mapping, max(1, self._size))
