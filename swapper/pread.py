"""The reader for host memory: `preadv` from a few threads, straight into the mapped pages.

A range that the page cache holds is read through it. Any other range is read with `O_DIRECT`, past the cache: a
page-in of gigabytes would push everything useful out of it and copy each byte once more. Where the file system has
no `O_DIRECT`, all reads are buffered.
"""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from swapper import libc
from swapper.errors import ReadError
from swapper.page_cache import CacheProbe
from swapper.readers import ReadResult


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
    """One open shard file: a descriptor each for buffered and for direct reads."""

    def __init__(self, path: Path, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._threads = threads
        self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self._cache = CacheProbe(self._buffered)
        except OSError:
            os.close(self._buffered)
            raise
        self._direct = _open_direct(path)

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        return self._threads.submit(self._read, offset, address, nbytes)

    def close(self) -> None:
        self._cache.close()
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache holds all of a range of the file."""
        return self._cache.holds(offset, nbytes)

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
