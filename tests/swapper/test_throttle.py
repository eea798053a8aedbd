"""Reads come no faster than they may, in order, with what the reader below said; and nobody waits at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from swapper.errors import ReadError
from swapper.readers import ReadResult, ShardFile
from swapper.throttle import ThrottledReader
from tests.swapper.paging import PATIENCE


class Below:
    """A reader whose reads are there at once, or fail."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.closed = False

    def open(self, path: Path) -> ShardFile:
        return self

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        self.asked.append(offset)
        future: Future[ReadResult] = Future()
        if offset < 0:
            future.set_exception(ReadError("short"))
        else:
            future.set_result(ReadResult("disk", nbytes))
        return future

    def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(below: Below, clock: Clock) -> Iterator[ThrottledReader]:
    """Of ten bytes a second."""
    reader = ThrottledReader(below, 10.0, clock)
    yield reader
    reader.close()


def advance(reader: ThrottledReader, clock: Clock, now: float) -> None:
    clock.now = now
    with reader._changed:
        reader._changed.notify_all()


def test_bytes_come_at_the_pace_that_is_set(reader: ThrottledReader, below: Below, clock: Clock) -> None:
    file = reader.open(Path("shard"))
    first, second = file.read(0, 0, 10), file.read(10, 0, 20)
    assert below.asked == [0, 10], "reads begin at once"
    assert [held.due for held in reader._held] == [101.0, 103.0]
    advance(reader, clock, 101.0)
    assert first.result(PATIENCE) == ReadResult("disk", 10)
    assert not second.done()
    advance(reader, clock, 103.0)
    assert second.result(PATIENCE) == ReadResult("disk", 20)


def test_a_pause_is_not_made_up_for(reader: ThrottledReader, clock: Clock) -> None:
    file = reader.open(Path("shard"))
    clock.now = 500.0
    file.read(0, 0, 10)
    assert reader._held[0].due == 501.0


def test_a_failed_read_fails(reader: ThrottledReader, clock: Clock) -> None:
    failed = reader.open(Path("shard")).read(-1, 0, 10)
    advance(reader, clock, 101.0)
    with pytest.raises(ReadError, match="short"):
        failed.result(PATIENCE)


def test_closing_lets_go_of_everything(below: Below) -> None:
    threads = threading.active_count()
    reader = ThrottledReader(below, 1e-9)
    held = [reader.open(Path("shard")).read(offset, 0, 10) for offset in range(3)]
    reader.close()
    assert all(read.result(0).nbytes == 10 for read in held)
    assert below.closed
    assert threading.active_count() == threads
