"""Models that take turns in a GPU's memory: real frames, a real pager, graphs, and answers that never change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.model import BoundModel
from swapper.geometry import GRANULE_BYTES, KV_BLOCK_TOKENS
from swapper.image import Image
from swapper.pager import PagedShard, Pager
from tests.engine.fakes import Reports, request
from tests.engine.memory import Sequences, pack_image
from tests.engine.test_attention import random_prompts
from tests.engine.test_gpu_attention import bound, largest_difference
from tests.engine.test_gpu_graphs import PATIENCE, Replays
from tests.models import make_checkpoint, random_model
from tests.swapper.gpu import needs_gpu, open_device
from tests.swapper.paging import page_in

pytestmark = [*needs_gpu, pytest.mark.filterwarnings("default")]

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 2048}
KV_FRAMES = 4
LENGTH = 20
PROMPTS = ([5, 17, 900], list(range(40, 90)))


@dataclass
class House:
    """Memory for one of two models, and what moves them."""

    engine: Engine
    pager: Pager
    reports: Reports
    shards: dict[str, PagedShard]
    epochs: int = 0
    asked: int = 0

    def add(self, image: Image) -> None:
        name = image.manifest.model
        shard = self.pager.open(name, image.manifest.shards[0], image.shard_path(0))
        self.engine.add(BoundModel.bind(image, shard), shard)
        self.shards[name] = shard

    def grant(self, name: str, frames: int) -> None:
        self.epochs += 1
        self.engine.grant_kv(name, frames, self.epochs)
        self.reports.wait_for_grant(self.epochs)

    def come(self, name: str) -> list[int]:
        """Page a model in; the frames that it got."""
        shard = self.shards[name]
        page_in(self.pager, name, 0, shard.page_count)
        self.grant(name, KV_FRAMES)
        return [content.frame.index for content in shard.table.values()]

    def go(self, name: str) -> None:
        self.grant(name, 0)
        self.engine.fence(name)
        self.pager.page_out(name, 0)

    def answers(self, name: str) -> list[tuple[int, ...]]:
        names = []
        for prompt in PROMPTS:
            self.asked += 1
            names.append(f"{name} {self.asked}")
            self.engine.submit(request(names[-1], prompt, LENGTH, name))
            self.reports.wait_for(names[-1])
        return [self.reports.answer(one) for one in names]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    from swapper.cuda_frames import CudaFramePool
    from swapper.kvikio_reader import KvikioReader

    images = []
    for seed, name in enumerate("ab"):
        make_checkpoint(tmp_path / f"{name} checkpoint", "qwen2", seed=seed, **SHAPE)
        images.append(pack_image(tmp_path / f"{name} checkpoint", tmp_path / name))
    pages = images[0].manifest.shards[0].page_count(GRANULE_BYTES)
    assert pages > 2 * KV_FRAMES
    pool = CudaFramePool(open_device(), pages + KV_FRAMES + 2, GRANULE_BYTES)
    with closing(KvikioReader(4, device="cuda:0", waiters=4)) as reader:
        reports = Reports()
        engine = Engine(pool, reports.emit)
        pager = Pager(pool, reader, quiesce=engine.fence)
        house = House(engine, pager, reports, {})
        for image in images:
            house.add(image)
        yield house
        engine.close()
        pager.shutdown()
        assert pool.free == pool.frames
    pool.close()


def test_graphs_replay_right_after_the_model_was_out_and_came_back_into_other_frames(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.graphs import graphs_of

    frames = house.come("a")
    house.answers("a")
    assert graphs_of(torch.device("cuda:0")).wait_recorded(PATIENCE)
    replays = Replays(monkeypatch)
    expected = house.answers("a")
    assert replays.count >= len(PROMPTS) * (LENGTH - 1)
    house.go("a")
    house.come("b")
    others = house.answers("b")
    assert graphs_of(torch.device("cuda:0")).wait_recorded(PATIENCE)
    house.go("b")
    for _ in range(5):
        other_frames = house.come("a")
        before = replays.count
        assert house.answers("a") == expected
        assert replays.count - before >= len(PROMPTS) * (LENGTH - 1)
        house.go("a")
        house.come("b")
        assert house.answers("b") == others
        house.go("b")
    assert other_frames != frames
    assert others != expected


def test_a_model_that_leaves_as_soon_as_it_has_answered_has_a_graph_the_next_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.come("a")
    house.answers("a")
    house.go("a")
    replays = Replays(monkeypatch)
    house.come("a")
    house.answers("a")
    assert replays.count >= len(PROMPTS) * (LENGTH - 1)
    house.go("a")


def test_a_rehearsal_leaves_the_memory_as_it_was_and_compiles_what_passes_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.rehearsal import Rehearsals
    from engine.triton_kernels import attend_kernel
    from swapper.cuda_frames import CudaFramePool

    make_checkpoint(tmp_path / "checkpoint", "qwen2", **SHAPE, num_attention_heads=8)
    image = pack_image(tmp_path / "checkpoint", tmp_path / "image", "bfloat16")
    pool = CudaFramePool(open_device(), 2, GRANULE_BYTES)
    rehearsals = Rehearsals(pool, batch_tokens=64)
    before = sum(len(kept[0]) for kept in attend_kernel.device_caches.values())
    with caplog.at_level(logging.WARNING):
        rehearsals.ask(image.path).result(PATIENCE)
        rehearsals.ask(image.path).result(PATIENCE)
    assert not caplog.records
    assert sum(len(kept[0]) for kept in attend_kernel.device_caches.values()) > before
    assert pool.free == pool.frames
    pool.close()


def test_the_first_pages_of_the_keys_may_be_out_while_others_are_used(tmp_path: Path) -> None:
    """As when the oldest request ends first. With and without a graph."""
    from engine.graphs import graphs_of
    from swapper.cuda_frames import CudaFramePool

    model = bound(tmp_path, "qwen2", **SHAPE)
    pool = CudaFramePool(open_device(), 1, GRANULE_BYTES)
    region, frame = pool.reserve(3 * GRANULE_BYTES), pool.take()
    pool.map(region, 2, frame)
    blocks = GRANULE_BYTES // (model.kv_bytes_per_token * KV_BLOCK_TOKENS)
    sequences = Sequences(model, random_prompts(40))
    sequences.use(model.kv_cache(region), list(range(2 * blocks + 1, 3 * blocks)))
    sequences.step({0: 30})
    for _ in range(10):
        sequences.step({0: 1})
        assert graphs_of(torch.device("cuda:0")).wait_recorded(PATIENCE)
    torch.cuda.synchronize()
    assert largest_difference(random_model("qwen2", **SHAPE).to("cuda:0"), sequences) < 1e-3
    model.close()
    pool.unmap(region, 2)
    pool.release(frame)
    pool.close()
