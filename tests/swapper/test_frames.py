"""Frames are counted, and addresses without a frame behind them fault."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper import libc
from swapper.errors import ConfigError, OutOfFrames
from swapper.frames import Frame, Region
from swapper.host_frames import HostFramePool, available_memory
from tests.swapper.paging import PAGE, PATIENCE, memory

SMALL = 4096


@pytest.fixture
def pool() -> Iterator[HostFramePool]:
    pool = HostFramePool(4, SMALL)
    yield pool
    pool.close()


def mapped(pool: HostFramePool, region: Region, page: int) -> Frame:
    frame = pool.take()
    pool.map(region, page, frame)
    return frame


def write(region: Region, offset: int, data: bytes) -> None:
    libc.view(region.address + offset, len(data))[:] = data


# ---- references


def test_a_frame_is_free_again_when_its_last_holder_releases_it(pool: HostFramePool) -> None:
    frame = pool.take()
    pool.retain(frame)
    assert (pool.free, frame.references) == (3, 2)
    pool.release(frame)
    assert pool.free == 3
    pool.release(frame)
    assert (pool.free, frame.references) == (4, 0)


def test_an_empty_pool_says_so(pool: HostFramePool) -> None:
    frames = [pool.take() for _ in range(4)]
    assert len({frame.index for frame in frames}) == 4
    with pytest.raises(OutOfFrames, match="All 4 frames are in use"):
        pool.take()


def test_a_frame_that_nobody_holds_can_be_neither_released_nor_retained_nor_mapped(pool: HostFramePool) -> None:
    region = pool.reserve(SMALL)
    frame = pool.take()
    pool.release(frame)
    with pytest.raises(ValueError, match="nothing holds it"):
        pool.release(frame)
    with pytest.raises(ValueError, match="nothing holds it"):
        pool.retain(frame)
    with pytest.raises(ValueError, match="nothing holds it"):
        pool.map(region, 0, frame)
    assert pool.free == 4


def test_threads_never_get_the_same_frame() -> None:
    pool = HostFramePool(64, SMALL)
    taken: list[Frame] = []
    start = threading.Barrier(8)

    def take_and_return() -> None:
        start.wait(PATIENCE)
        for _ in range(200):
            frames = [pool.take() for _ in range(7)]
            assert all(frame.references == 1 for frame in frames)
            for frame in frames:
                pool.release(frame)
        taken.extend(pool.take() for _ in range(8))

    threads = [threading.Thread(target=take_and_return) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(frame.index for frame in taken) == list(range(64))
    assert pool.free == 0
    pool.close()


# ---- mapping


def test_a_region_is_whole_pages(pool: HostFramePool) -> None:
    region = pool.reserve(SMALL + 1)
    assert region.nbytes == 2 * SMALL
    assert region.device == "cpu"


def test_a_frame_keeps_its_bytes_wherever_it_is_mapped(pool: HostFramePool) -> None:
    first, second = pool.reserve(2 * SMALL), pool.reserve(2 * SMALL)
    frame = mapped(pool, first, 1)
    write(first, SMALL, b"weights")
    pool.unmap(first, 1)
    pool.map(second, 0, frame)
    assert memory(second.address, 7) == b"weights"


def test_one_frame_shows_the_same_bytes_at_two_addresses(pool: HostFramePool) -> None:
    first, second = pool.reserve(SMALL), pool.reserve(SMALL)
    frame = mapped(pool, first, 0)
    pool.retain(frame)
    pool.map(second, 0, frame)
    write(first, 10, b"shared")
    assert memory(second.address + 10, 6) == b"shared"


def test_a_run_of_pages_is_mapped_all_or_none(pool: HostFramePool) -> None:
    region = pool.reserve(4 * SMALL)
    third = mapped(pool, region, 2)
    frames = [pool.take() for _ in range(3)]
    with pytest.raises(ValueError, match="Page 2 of a region was mapped twice"):
        pool.map(region, 0, *frames)
    with pytest.raises(ValueError, match="not all were mapped"):
        pool.unmap(region, 0)
    pool.unmap(region, 2)
    pool.map(region, 0, *frames, third)
    write(region, 3 * SMALL, b"third")
    pool.unmap(region, 0, 4)
    pool.map(region, 1, third)
    assert memory(region.address + SMALL, 5) == b"third"


def test_a_run_of_pages_is_unmapped_all_or_none(pool: HostFramePool) -> None:
    region = pool.reserve(4 * SMALL)
    for page in (0, 1, 3):
        mapped(pool, region, page)
    with pytest.raises(ValueError, match="not all were mapped"):
        pool.unmap(region, 0, 3)
    assert memory(region.address + SMALL, 1) == b"\0"  # still there
    pool.unmap(region, 0, 2)
    pool.unmap(region, 3)


def test_a_page_is_not_mapped_twice_nor_outside_its_region(pool: HostFramePool) -> None:
    region = pool.reserve(SMALL)
    mapped(pool, region, 0)
    frame = pool.take()
    with pytest.raises(ValueError, match="mapped twice"):
        pool.map(region, 0, frame)
    with pytest.raises(ValueError, match="not inside"):
        pool.map(region, 1, frame)
    with pytest.raises(ValueError, match="not inside"):
        pool.map(region, -1, frame)


def test_addresses_are_given_back_only_when_nothing_is_mapped(pool: HostFramePool) -> None:
    region = pool.reserve(SMALL)
    mapped(pool, region, 0)
    with pytest.raises(ValueError, match="1 of its pages"):
        pool.unreserve(region)
    pool.unmap(region, 0)
    pool.unreserve(region)
    with pytest.raises(ValueError, match="given back"):
        pool.unreserve(region)


# ---- faults: in a process of their own

FAULT = """
import sys
from swapper import libc
from swapper.host_frames import HostFramePool
pool = HostFramePool(2, 4096)
region = pool.reserve(8192)
pool.map(region, 0, pool.take())
libc.view(region.address, 1)[0] = 7
{then}
print("alive", flush=True)
libc.view(region.address + {offset}, 1)[0] = 7
print("no fault", flush=True)
"""


@pytest.mark.parametrize(
    ("then", "offset"),
    [
        pytest.param("", 4096, id="a page that was never mapped"),
        pytest.param("pool.unmap(region, 0)", 0, id="a page that was unmapped"),
    ],
)
def test_touching_a_page_without_a_frame_is_a_segmentation_fault(then: str, offset: int) -> None:
    program = FAULT.format(then=then, offset=offset)
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "alive\n"
    assert ended.returncode == -signal.SIGSEGV


# ---- making a pool


def test_a_pool_larger_than_memory_is_refused_with_both_numbers() -> None:
    frames = 2 * available_memory() // PAGE
    with pytest.raises(ConfigError, match=rf"wants {frames * PAGE:,} bytes of memory, but only [\d,]+ are available"):
        HostFramePool(frames, PAGE)


@pytest.mark.parametrize(("frames", "page_bytes"), [(0, SMALL), (4, 0), (4, 1000), (4, SMALL + 1)])
def test_a_pool_of_an_impossible_shape_is_refused(frames: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError):
        HostFramePool(frames, page_bytes)


def test_closing_gives_memory_and_addresses_back() -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("gswapd-frames")

    others = mappings()
    pool = HostFramePool(2, SMALL)
    region = pool.reserve(SMALL)
    mapped(pool, region, 0)
    assert mappings() == others + 1
    pool.close()
    pool.close()  # harmless
    assert mappings() == others
