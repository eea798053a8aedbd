"""Numbers that go to a GPU: all of them, in the stream's order, and past copies that are under way."""

from __future__ import annotations

import pytest
import torch

from engine.upload import Pinned, upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 100_000])
def test_every_number_arrives(count: int, dtype: torch.dtype) -> None:
    numbers = torch.arange(-count, 0).to(dtype) * 3
    assert torch.equal(upload(numbers, GPU).cpu(), numbers)


def test_memory_is_written_again_only_once_the_gpu_has_read_it() -> None:
    pinned, targets = Pinned(10, GPU), [torch.empty(10 + size, dtype=torch.int64, device=GPU) for size in range(40)]
    for value, target in enumerate(targets):
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        pinned.numbers(len(target))[:] = value
        pinned.upload(target)
    for value, target in enumerate(targets):
        assert target.tolist() == [value] * len(target)


def test_numbers_are_kept_until_the_gpu_has_read_them() -> None:
    upload(torch.zeros(1000, dtype=torch.int64), GPU)  # compiles the kernel
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    sent = [upload(torch.full((1000,), value), GPU) for value in range(40)]
    for value, target in enumerate(sent):
        assert target.tolist() == [value] * 1000


def test_an_upload_waits_for_no_copies_of_another_stream() -> None:
    """As a decode's numbers beside a neighbour's page-in."""
    page = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    frame = torch.empty_like(page, device=GPU, pin_memory=False)
    numbers = torch.arange(1000)
    upload(numbers, GPU)  # compiles the kernel
    torch.cuda.synchronize()
    pages, copied = torch.cuda.Stream(GPU), torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(pages):
        for _ in range(200):  # a quarter of a second
            frame.copy_(page, non_blocking=True)
        copied.record()
    assert torch.equal(upload(numbers, GPU).cpu(), numbers)
    assert not copied.query()
    copied.synchronize()
