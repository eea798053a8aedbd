"""Frames on a GPU behave as frames in host memory do, and kernels and graphs find them where they are mapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from swapper.errors import ConfigError
from swapper.frames import Frame, Region
from tests.swapper.gpu import device_bytes, needs_gpu, open_device
from tests.swapper.paging import PAGE

if TYPE_CHECKING:
    import torch

    from swapper.cuda_driver import CudaDevice
    from swapper.cuda_frames import CudaFramePool

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return open_device()


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[CudaFramePool]:
    from swapper.cuda_frames import CudaFramePool

    pool = CudaFramePool(device, 6, PAGE)
    yield pool
    pool.close()


def mapped(pool: CudaFramePool, region: Region, page: int) -> Frame:
    frame = pool.take()
    pool.map(region, page, frame)
    return frame


def words(region: Region) -> torch.Tensor:
    """A region as numbers. Making it touches nothing."""
    import torch

    from engine.views import region_bytes

    return region_bytes(region).view(torch.int32)


def page_words(region: Region, page: int) -> torch.Tensor:
    return words(region)[page * PAGE // 4 : (page + 1) * PAGE // 4]


def test_a_frame_keeps_its_bytes_wherever_it_is_mapped(pool: CudaFramePool) -> None:
    first, second = pool.reserve(2 * PAGE), pool.reserve(2 * PAGE)
    assert first.device == "cuda:0"
    frame = mapped(pool, first, 1)
    page_words(first, 1).fill_(7)
    pool.unmap(first, 1)
    pool.map(second, 0, frame)
    assert page_words(second, 0).eq(7).all()
    assert device_bytes(pool, second.address, 8) == b"\7\0\0\0" * 2


def test_one_frame_shows_the_same_bytes_at_two_addresses(pool: CudaFramePool) -> None:
    first, second = pool.reserve(PAGE), pool.reserve(PAGE)
    frame = mapped(pool, first, 0)
    pool.retain(frame)
    pool.map(second, 0, frame)
    page_words(first, 0).fill_(11)
    assert page_words(second, 0).eq(11).all()


def test_a_run_of_pages_is_unmapped_all_or_none(pool: CudaFramePool) -> None:
    region = pool.reserve(4 * PAGE)
    frames = [mapped(pool, region, page) for page in range(3)]
    with pytest.raises(ValueError, match="not all were mapped"):
        pool.unmap(region, 0, 4)
    pool.unmap(region, 0, 3)
    for page, frame in enumerate(frames):
        pool.map(region, page, frame)
    pool.unmap(region, 1)


def test_unmapping_waits_for_the_kernels_before_it(pool: CudaFramePool) -> None:
    import torch

    region, other = pool.reserve(PAGE), pool.reserve(PAGE)
    frame = mapped(pool, region, 0)
    numbers = page_words(region, 0)
    numbers.zero_()
    torch.cuda.synchronize()
    rounds = 2000
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(rounds):
            numbers.add_(1)
    pool.unmap(region, 0)
    pool.map(other, 0, frame)
    assert page_words(other, 0).eq(rounds).all()


def test_a_graph_stays_right_when_other_frames_are_mapped_under_it(pool: CudaFramePool) -> None:
    import torch

    region, elsewhere = pool.reserve(2 * PAGE), pool.reserve(2 * PAGE)
    frames = [mapped(pool, region, page) for page in (0, 1)]
    numbers, total = words(region), torch.zeros((), dtype=torch.int64, device=region.device)
    numbers.fill_(1)
    torch.sum(numbers, 0, out=total)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.sum(numbers, 0, out=total)
    for value in (2, 3):
        others = [mapped(pool, elsewhere, page) for page in (0, 1)]
        words(elsewhere).fill_(value)
        pool.unmap(elsewhere, 0, 2)
        pool.unmap(region, 0, 2)
        for page in (0, 1):
            pool.map(region, page, others[page])
            pool.release(frames[page])
        frames = others
        graph.replay()
        assert total.item() == value * numbers.numel()
    pool.unmap(region, 0, 2)


def test_a_pool_larger_than_free_memory_is_refused_with_both_numbers(device: CudaDevice) -> None:
    from swapper.cuda_frames import CudaFramePool

    frames = 2 * device.free_bytes() // PAGE
    with pytest.raises(ConfigError, match=rf"wants {frames * PAGE:,} bytes of GPU memory, but only [\d,]+ are free"):
        CudaFramePool(device, frames, PAGE)


def test_a_page_must_be_what_the_gpu_can_map(device: CudaDevice) -> None:
    from swapper.cuda_frames import CudaFramePool

    with pytest.raises(ConfigError, match=r"maps memory in pieces of [\d,]+ bytes"):
        CudaFramePool(device, 1, PAGE + 4096)


def test_a_blank_region_can_be_touched_everywhere_and_costs_a_page(device: CudaDevice, pool: CudaFramePool) -> None:
    for _ in range(2):  # the first time, libraries take memory of their own
        before = device.free_bytes()
        with pool.blank(100 * PAGE + 1) as region:
            assert region.nbytes == 101 * PAGE
            taken = before - device.free_bytes()
            assert int(words(region).sum()) == 0
            page_words(region, 3).fill_(7)
            assert page_words(region, 99).eq(7).all()
            assert pool.free == pool.frames
        left = before - device.free_bytes()
    assert taken < 4 * PAGE
    assert left < PAGE


def test_unmapping_waits_for_the_guard_of_the_region_alone(pool: CudaFramePool) -> None:
    """Not for another stream, which is busy all the while."""
    import torch

    region, other = pool.reserve(PAGE), pool.reserve(PAGE)
    mapped(pool, region, 0)
    mapped(pool, other, 0)
    asked = []
    pool.guard(region, lambda: asked.append(region))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # clock cycles: a second
    pool.unmap(region, 0)
    assert not stream.query()
    assert asked == [region]
    pool.unmap(other, 0)
    assert stream.query()


def test_closing_gives_the_memory_back(device: CudaDevice) -> None:
    from swapper.cuda_frames import CudaFramePool

    before = device.free_bytes()
    pool = CudaFramePool(device, 256, PAGE)
    region = pool.reserve(PAGE)
    mapped(pool, region, 0)
    assert before - device.free_bytes() >= 256 * PAGE
    pool.close()
    assert before - device.free_bytes() < 16 * PAGE


def test_a_gpu_that_is_not_there_is_refused() -> None:
    from swapper.cuda_driver import CudaDevice

    with pytest.raises(ConfigError, match="GPU 99 cannot be used"):
        CudaDevice(99)
