"""Small shards of known bytes, and readers that tests steer: parts shared by the tests of frames, readers and pager."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from blake3 import blake3

from swapper import libc
from swapper.errors import ReadError
from swapper.geometry import GRANULE_BYTES
from swapper.image import Shard
from swapper.pager import PagedShard, PageInResult, Pager
from swapper.readers import ReadResult

PAGE = GRANULE_BYTES
PATIENCE = 20.0  # seconds after which a wait is a failed test
DATA_START = 4096


@cache
def page_bytes(tag: int, nbytes: int = PAGE) -> bytes:
    """A page's worth of bytes; equal tags are equal bytes."""
    return random.Random(tag).randbytes(nbytes)


def data_of(tags: Sequence[int], tail: int = PAGE) -> bytes:
    """A shard's data: one page a tag, the last one cut to `tail` bytes."""
    whole = b"".join(page_bytes(tag) for tag in tags)
    return whole[: len(whole) - PAGE + tail] if tags else b""


def write_shard(path: Path, tags: Sequence[int], tail: int = PAGE) -> Shard:
    """Write a shard file and return what its manifest would say of it."""
    data = data_of(tags, tail)
    path.write_bytes(bytes(DATA_START) + data)
    granules = tuple(
        blake3(data[start : start + GRANULE_BYTES]).hexdigest() for start in range(0, len(data), GRANULE_BYTES)
    )
    return Shard(0, path.name, DATA_START, len(data), granules, (), ())


def memory(address: int, nbytes: int) -> bytes:
    """A copy of the bytes at an address."""
    return bytes(libc.view(address, nbytes))


def resident_bytes(shard: PagedShard) -> bytes:
    return memory(shard.region.address, min(shard.resident * shard.page_bytes, shard.shard.nbytes))


class Outcome:
    """A `done` callback that can be waited for."""

    def __init__(self) -> None:
        self._outcomes: queue.SimpleQueue[PageInResult | Exception] = queue.SimpleQueue()

    def __call__(self, outcome: PageInResult | Exception) -> None:
        self._outcomes.put(outcome)

    def get(self) -> PageInResult | Exception:
        return self._outcomes.get(timeout=PATIENCE)

    def result(self) -> PageInResult:
        outcome = self.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @property
    def came(self) -> bool:
        return not self._outcomes.empty()


def page_in(pager: Pager, model: str, first: int, last: int) -> PageInResult:
    """Page in and wait; raises what the page-in failed with."""
    outcome = Outcome()
    pager.page_in(model, first, last, outcome)
    return outcome.result()


class PendingRead:
    """One read of a `GatedReader`: it ends when the test says so."""

    def __init__(self, path: Path, offset: int, address: int, nbytes: int) -> None:
        self.path = path
        self.offset = offset
        self.page = (offset - DATA_START) // PAGE
        self.future: Future[ReadResult] = Future()
        self._address = address
        self._nbytes = nbytes

    def finish(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            libc.view(self._address, self._nbytes)[:] = file.read(self._nbytes)
        self.future.set_result(ReadResult("disk", self._nbytes, 0.25))

    def fail(self, message: str = "The disk is on fire.") -> None:
        self.future.set_exception(ReadError(message))


class GatedReader:
    """A reader whose reads end one by one, in the order the test wants. It may be told to let all of them through."""

    def __init__(self) -> None:
        self.pending: queue.SimpleQueue[PendingRead] = queue.SimpleQueue()
        self.started = 0
        self.open_files = 0
        self._lock = threading.Lock()

    def open(self, path: Path) -> _GatedFile:
        with self._lock:
            self.open_files += 1
        return _GatedFile(self, path)

    def next(self) -> PendingRead:
        """The oldest read that the test has not seen."""
        return self.pending.get(timeout=PATIENCE)

    def close(self) -> None: ...


class _GatedFile:
    def __init__(self, reader: GatedReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        read = PendingRead(self._path, offset, address, nbytes)
        self._reader.started += 1
        self._reader.pending.put(read)
        return read.future

    def close(self) -> None:
        with self._reader._lock:
            self._reader.open_files -= 1


class FaultyReader(GatedReader):
    """Reads at once, except where `fault(path, page)` is true: those reads fail."""

    def __init__(self, fault: Callable[[Path, int], bool]) -> None:
        super().__init__()
        self.fault = fault

    def open(self, path: Path) -> _FaultyFile:
        super().open(path)
        return _FaultyFile(self, path)


class _FaultyFile(_GatedFile):
    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        assert isinstance(self._reader, FaultyReader)
        read = PendingRead(self._path, offset, address, nbytes)
        self._reader.started += 1
        if self._reader.fault(self._path, read.page):
            read.fail(f"Page {read.page} cannot be read.")
        else:
            read.finish()
        return read.future
