"""`preadv` reads whole ranges: through the page cache where it holds them, past it where it does not."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.errors import ReadError
from swapper.frames import Region
from swapper.host_frames import HostFramePool
from swapper.pread import PreadFile, PreadReader
from tests.swapper.paging import PAGE, PATIENCE, memory, page_bytes


@pytest.fixture
def reader() -> Iterator[PreadReader]:
    reader = PreadReader(2)
    yield reader
    reader.close()


@pytest.fixture
def target() -> Iterator[Region]:
    """Two pages of mapped memory."""
    pool = HostFramePool(2, PAGE)
    region = pool.reserve(2 * PAGE)
    for page in range(2):
        pool.map(region, page, pool.take())
    yield region
    pool.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two pages, on the disk and in the page cache."""
    path = tmp_path / "shard"
    path.write_bytes(page_bytes(1) + page_bytes(2))
    return path


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def has_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def read(reader: PreadReader, path: Path, offset: int, address: int, nbytes: int) -> str:
    file = reader.open(path)
    try:
        result = file.read(offset, address, nbytes).result(PATIENCE)
    finally:
        file.close()
    assert result.nbytes == nbytes
    assert result.seconds > 0
    return result.source


def test_what_the_page_cache_holds_is_read_through_it(reader: PreadReader, path: Path, target: Region) -> None:
    assert read(reader, path, PAGE, target.address, PAGE) == "page_cache"
    assert memory(target.address, PAGE) == page_bytes(2)


def test_what_it_does_not_hold_is_read_past_it(reader: PreadReader, path: Path, target: Region) -> None:
    if not has_direct_reads(path):
        pytest.skip("this file system has no O_DIRECT")
    drop_from_page_cache(path)
    file = reader.open(path)
    assert not file.is_cached(0, 2 * PAGE)
    assert read(reader, path, 0, target.address, 2 * PAGE) == "disk"
    assert memory(target.address, 2 * PAGE) == page_bytes(1) + page_bytes(2)
    assert not file.is_cached(0, PAGE), "neither the question nor the read fills the page cache"
    file.close()


def test_each_range_is_judged_for_itself(reader: PreadReader, path: Path, target: Region) -> None:
    drop_from_page_cache(path)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the second page
        os.pread(file.fileno(), PAGE, 0)
    assert read(reader, path, 0, target.address, PAGE) == "page_cache"
    assert read(reader, path, PAGE, target.address, PAGE) == "disk"
    assert memory(target.address, PAGE) == page_bytes(2)


def test_a_range_that_direct_reads_refuse_is_read_all_the_same(reader: PreadReader, path: Path, target: Region) -> None:
    drop_from_page_cache(path)
    assert read(reader, path, 100, target.address + 3, 5000) == "disk"
    assert memory(target.address + 3, 5000) == page_bytes(1)[100:5100]


def test_a_file_system_without_direct_reads_will_do(
    reader: PreadReader, path: Path, target: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_from_page_cache(path)
    really_open = os.open

    def refuse_direct(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(name, flags)

    monkeypatch.setattr(os, "open", refuse_direct)
    assert read(reader, path, 0, target.address, PAGE) == "disk"
    assert memory(target.address, PAGE) == page_bytes(1)


def test_a_file_in_memory_is_read(reader: PreadReader, target: Region) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(page_bytes(3))
        file.flush()
        assert read(reader, Path(file.name), 0, target.address, PAGE) == "page_cache"
    assert memory(target.address, PAGE) == page_bytes(3)


def test_short_reads_are_continued(
    reader: PreadReader, path: Path, target: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: really_read(fd, [buffers[0][:70_000]], offset))
    for cached in ("page_cache", "disk"):
        if cached == "disk":
            drop_from_page_cache(path)
        assert read(reader, path, 0, target.address, 2 * PAGE) == cached
        assert memory(target.address, 2 * PAGE) == page_bytes(1) + page_bytes(2)


@pytest.mark.parametrize("cached", [True, False])
def test_the_end_of_the_file_is_an_error_that_names_file_and_offset(
    reader: PreadReader, path: Path, target: Region, cached: bool
) -> None:
    os.truncate(path, PAGE + 4096)
    if not cached:
        drop_from_page_cache(path)
    with pytest.raises(ReadError, match=rf"{path} ends at offset {PAGE + 4096}, {PAGE - 4096} bytes short"):
        read(reader, path, PAGE, target.address, PAGE)


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_no_fault(
    reader: PreadReader, path: Path, target: Region
) -> None:
    file = reader.open(path)
    os.truncate(path, 4096)
    assert isinstance(file.read(PAGE, target.address, PAGE).exception(PATIENCE), ReadError)
    file.close()


def test_an_error_of_the_disk_names_file_offset_and_reason(
    reader: PreadReader, path: Path, target: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ReadError, match=rf"{path} cannot be read at offset {PAGE}: Input/output error"):
        read(reader, path, PAGE, target.address, PAGE)


def test_a_missing_file_is_named(reader: PreadReader, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="no-such-file cannot be opened: No such file or directory"):
        reader.open(tmp_path / "no-such-file")


def test_closing_gives_descriptors_and_addresses_back(reader: PreadReader, path: Path) -> None:
    def held() -> tuple[int, bool]:
        return len(os.listdir("/proc/self/fd")), str(path) in Path("/proc/self/maps").read_text()

    before = held()
    file = reader.open(path)
    assert isinstance(file, PreadFile)
    assert held() != before
    file.close()
    assert held() == before
