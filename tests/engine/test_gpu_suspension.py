"""Keys and values move between a GPU's mapped frames and pinned host memory, and come back byte by byte."""

from __future__ import annotations

import torch

from engine.kv_keeper import HostRoom, KvKeeper
from engine.streams import pass_stream
from engine.views import region_bytes
from tests.swapper.gpu import needs_gpu, open_device

pytestmark = needs_gpu

PAGE = 2 << 20
BLOCK = 3 * PAGE // 4  # blocks straddle frames
FRAMES = 6


def test_blocks_that_straddle_frames_come_back_into_other_frames() -> None:
    from swapper.cuda_frames import CudaFramePool

    pool = CudaFramePool(open_device(), FRAMES, PAGE)
    region = pool.reserve(FRAMES * PAGE)
    frames = [pool.take() for _ in range(FRAMES)]
    pool.map(region, 0, *frames)
    with torch.cuda.stream(pass_stream(torch.device(pool.device))):
        memory = region_bytes(region)
        blocks = memory[: len(memory) // BLOCK * BLOCK].view(-1, BLOCK)
        blocks.copy_(torch.randint(0, 256, blocks.shape, dtype=torch.uint8))
        before = blocks.cpu()
        keeper = KvKeeper(region, BLOCK, HostRoom(1 << 30))
        kept = keeper.keep([1, 2, 3, 6, 0], 80)
        assert kept is not None
        assert kept.data.is_pinned()
        torch.cuda.synchronize()
        pool.unmap(region, 0, FRAMES)
        pool.map(region, 0, *reversed(frames))
        keeper.restore(kept, [7, 4, 5, 0, 1])
        after = blocks.cpu()
    for source, target in zip([1, 2, 3, 6, 0], [7, 4, 5, 0, 1], strict=True):
        assert torch.equal(before[source], after[target])
    pool.unmap(region, 0, FRAMES)
    for frame in frames:
        pool.release(frame)
    pool.unreserve(region)
    pool.close()
