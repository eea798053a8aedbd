"""The reader for host memory: `preadv` from a few threads, straight into the mapped pages.

A range that the page cache holds is read through it. Any other range is read with `O_DIRECT`, past the cache: a
page-in of gigabytes would push everything useful out of it and copy each byte once more. Where the file system has
no `O_DIRECT`, all reads are buffered.

Whether the cache holds a range is asked with `mincore`. A trial `preadv2` with `RWF_NOWAIT`
starts the kernel's read-ahead, which fills the cache with what was to be kept out of it, and tmpfs refuses it;
`cachestat` is quicker (1.5 µs instead of 13 for 2 MiB, which takes 300 to read) but needs Linux 6.5. The kernel
tells the truth to the file's owner and to those who may write it; to others it says that everything is cached, and
then reads are buffered.
"""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from swapper import libc
from swapper.errors import ReadError
from swapper.readers import ReadResult

_MEMORY_PAGE = os.sysconf("SC_PAGE_SIZE")


class PreadReader:
    """A `Reader` with `threads` threads."""

    def __init__(self, threads: int = 4) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="pread")

    def open(self, path: Path) -> PreadFile:
        try:
            return PreadFile(path, self._threads)
        except OSError as error:
            raise ReadError(f"{path} cannot be opened: {error.strerror}.") from error

    def close(self) -> None:
        self._threads.shutdown()


class PreadFile:
    """One open shard file: two descriptors, and a mapping that is never touched, for `mincore`."""

    def __init__(self, path: Path, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._threads = threads
        self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self._size = os.fstat(self._buffered).st_size
            self._mapping = libc.mmap(0, max(1, self._size), libc.PROT_READ, libc.MAP_SHARED, self._buffered)
        except OSError:
            os.close(self._buffered)
            raise
        self._direct = _open_direct(path)

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        return self._threads.submit(self._read, offset, address, nbytes)

    def close(self) -> None:
        libc.munmap(self._mapping, max(1, self._size))
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache holds all of a range of the file."""
        start = offset // _MEMORY_PAGE * _MEMORY_PAGE
        end = min(offset + nbytes, self._size)
        if end <= start:
            return False
        return 0 not in libc.mincore(self._mapping + start, end - start)

    def _read(self, offset: int, address: int, nbytes: int) -> ReadResult:
        begun = time.perf_counter()
        try:
            cached = self.is_cached(offset, nbytes)
            done = 0
            if self._direct is not None and not cached:
                done = _read_direct(self._direct, offset, address, nbytes)
            self._read_buffered(offset, address, nbytes, done)
        except OSError as error:
            raise ReadError(f"{self._path} cannot be read at offset {offset}: {error.strerror}.") from error
        return ReadResult("page_cache" if cached else "disk", nbytes, time.perf_counter() - begun)

    def _read_buffered(self, offset: int, address: int, nbytes: int, done: int) -> None:
        memory = libc.view(address, nbytes)
        while done < nbytes:
            got = os.preadv(self._buffered, [memory[done:]], offset + done)
            if got == 0:
                raise ReadError(
                    f"{self._path} ends at offset {offset + done}, {nbytes - done} bytes short of what was packed: "
                    "add the model again."
                )
            done += got


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has no O_DIRECT
            return None
        raise


def _read_direct(fd: int, offset: int, address: int, nbytes: int) -> int:
    """Read past the page cache; returns how many bytes came before the file ended or an alignment was refused."""
    memory = libc.view(address, nbytes)
    done = 0
    while done < nbytes:
        try:
            got = os.preadv(fd, [memory[done:]], offset + done)
        except OSError as error:
            if error.errno == errno.EINVAL:  # offset or length do not suit the device: the rest goes through the cache
                return done
            raise
        if got == 0:
            return done
        done += got
    return done
