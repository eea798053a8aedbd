"""Paging into a GPU: byte for byte from storage and from the host tier, for ever, and out again at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from swapper.errors import HashMismatch
from swapper.granules import identity_of
from swapper.host_tier import HostTier
from swapper.pager import PagedShard, Pager
from swapper.readers import Reader
from swapper.tier_arena import Arena, remove_arena
from tests.swapper.gpu import needs_gpu, open_device, resident_on
from tests.swapper.paging import DATA_START, PAGE, PATIENCE, data_of, page_in, write_shard
from tests.swapper.tiers import new_name

if TYPE_CHECKING:
    from swapper.cuda_driver import CudaDevice
    from swapper.cuda_frames import CudaFramePool

pytestmark = needs_gpu

SWAPS = 100
FRAMES = 24


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return open_device()


@pytest.fixture(scope="module")
def reader(device: CudaDevice) -> Iterator[Reader]:
    from swapper.kvikio_reader import KvikioReader

    with closing(KvikioReader(4, device="cuda:0", waiters=4)) as reader:
        yield reader


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[CudaFramePool]:
    from swapper.cuda_frames import CudaFramePool

    pool = CudaFramePool(device, FRAMES, PAGE)
    yield pool
    assert pool.free == FRAMES
    pool.close()


@pytest.fixture
def tier(device: CudaDevice) -> Iterator[HostTier]:
    from swapper.cuda_copier import CudaCopier

    name = new_name()
    tier = HostTier(Arena(name, 32, PAGE), CudaCopier(device))
    assert tier.wait_settled(PATIENCE)
    yield tier
    tier.close()
    assert not remove_arena(name)


def open_shard(pager: Pager, model: str, tags: list[int], directory: Path) -> PagedShard:
    path = directory / f"{model}.safetensors"
    return pager.open(model, write_shard(path, tags, tail=8192), path)


def check_on_device(pool: CudaFramePool, shard: PagedShard) -> None:
    """Every page of the shard, as it is on the GPU, has the hash that the manifest has."""
    assert shard.resident == shard.page_count
    for page in range(shard.page_count):
        start, nbytes = shard.extent(page)
        assert identity_of(pool.peek(shard.region.address + start, nbytes)) == shard.hashes[page]


def test_pages_come_from_storage_byte_for_byte(pool: CudaFramePool, reader: Reader, tmp_path: Path) -> None:
    pager = Pager(pool, reader, verify=True)
    paged = open_shard(pager, "model", [1, 2, 1, 3], tmp_path)
    result = page_in(pager, "model", 0, 4)
    assert {source: its.pages for source, its in result.sources.items()} in (
        {"posix": 3, "alias": 1},
        {"gds": 3, "alias": 1},
    )
    assert resident_on(pool, paged) == data_of([1, 2, 1, 3], tail=8192)
    pager.shutdown()


def test_pages_come_from_the_host_tier_byte_for_byte(
    pool: CudaFramePool, reader: Reader, tier: HostTier, tmp_path: Path
) -> None:
    pager = Pager(pool, reader, tier=tier)
    paged = open_shard(pager, "model", [1, 2, 1, 3], tmp_path)
    page_in(pager, "model", 0, 4)
    assert tier.wait_settled(PATIENCE, 3)
    pager.page_out("model", 0)
    open_shard(pager, "other", [5, 6, 7, 8], tmp_path)  # other bytes in those frames
    page_in(pager, "other", 0, 4)
    result = page_in(pager, "model", 0, 4)
    assert {source: its.pages for source, its in result.sources.items()} == {"host": 3, "alias": 1}
    assert resident_on(pool, paged) == data_of([1, 2, 1, 3], tail=8192)
    pager.shutdown()


def test_changed_bytes_are_found_on_the_way_to_the_gpu(pool: CudaFramePool, reader: Reader, tmp_path: Path) -> None:
    pager = Pager(pool, reader, verify=True)
    paged = open_shard(pager, "model", [1, 2], tmp_path)
    content = bytearray(paged.path.read_bytes())
    content[DATA_START + PAGE + 77] ^= 1
    paged.path.write_bytes(content)
    with pytest.raises(HashMismatch):
        page_in(pager, "model", 0, 2)
    assert pool.free == FRAMES
    pager.shutdown()


def test_models_can_be_swapped_for_ever(
    device: CudaDevice, pool: CudaFramePool, reader: Reader, tier: HostTier, tmp_path: Path
) -> None:
    """Two models in turns, the first half of the time from storage, then from the host tier."""
    from_storage, from_host = Pager(pool, reader), Pager(pool, reader, tier=tier)
    models = ("a", "b")
    tags = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 2, 13, 14, 5, 16, 17, 18])
    process = psutil.Process()
    seen = []
    for pager in (from_storage, from_host):
        shards = [open_shard(pager, model, its, tmp_path) for model, its in zip(models, tags, strict=True)]
        for swap in range(SWAPS // 2):
            shard = shards[swap % 2]
            page_in(pager, shard.model, 0, shard.page_count)
            check_on_device(pool, shard)
            if swap < 2 and pager is from_host:
                assert tier.wait_settled(PATIENCE, (9, 15)[swap])  # they have two pages in common
            pager.page_out(shard.model, 0)
            assert pool.free == FRAMES
            seen.append((device.free_bytes(), process.memory_info().rss, process.num_fds()))
        pager.shutdown()
    assert tier.status.hits >= 48 * 8
    warm, last = seen[SWAPS // 2 + 4], seen[-1]
    assert last[0] == warm[0], "device memory is flat"
    assert last[1] - warm[1] < 8 << 20, "so is the process's own"
    assert last[2] == warm[2], "and no descriptor is left open"


def test_a_large_model_leaves_at_once(device: CudaDevice) -> None:
    from swapper.cuda_frames import CudaFramePool

    page_bytes, pages = 32 << 20, 480
    if device.free_bytes() < (pages + 32) * page_bytes:
        pytest.skip(f"it takes {pages * page_bytes >> 30} GiB of GPU memory")
    pool = CudaFramePool(device, pages, page_bytes)
    region = pool.reserve(pages * page_bytes)
    seconds = []
    for _ in range(3):
        frames = [pool.take() for _ in range(pages)]
        for page, frame in enumerate(frames):
            pool.map(region, page, frame)
        begun = time.perf_counter()
        pool.unmap(region, 0, pages)
        for frame in frames:
            pool.release(frame)
        seconds.append(time.perf_counter() - begun)
    pool.close()
    print(f"page-out of {pages * page_bytes / 1e9:.1f} GB: {[round(its * 1e3, 2) for its in seconds]} ms")
    assert min(seconds) <= 0.020
