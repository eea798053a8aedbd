"""Real models behind a real pager and engine, for tests of answers and of streaming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.engine import Engine
from engine.model import BoundModel
from engine.plan import pack_plan
from swapper.checkpoint import Checkpoint
from swapper.geometry import GRANULE_BYTES, kv_frames
from swapper.host_frames import HostFramePool
from swapper.image import Image
from swapper.packer import pack
from swapper.pager import Pager
from swapper.pread import PreadReader
from swapper.readers import Reader
from swapper.store import Store
from tests.engine.fakes import Reports

KV_PAGE = 16 * 1024  # small, so that small models come under pressure


def pack_image(store: Store, checkpoint: Path, name: str, dtype: str | None = None) -> Image:
    source = Checkpoint(checkpoint)
    with store.adding(name) as directory:
        pack(pack_plan(source, dtype), source, name, directory)
    return store.open(name)


class Serving:
    """An engine and a pager. Weights and KV have a pool each, because tests want KV frames smaller than any page."""

    def __init__(self, frames: int, reader: Reader, kv_pool_frames: int = 2048, **engine: int) -> None:
        self.pool = HostFramePool(frames, GRANULE_BYTES)
        self.kv_pool = HostFramePool(kv_pool_frames, KV_PAGE)
        self.pager = Pager(self.pool, reader, quiesce=lambda model: self.engine.fence(model))
        self.reports = Reports()
        self.engine = Engine(self.kv_pool, self.reports.emit, **engine)
        self._epochs = 0

    def add(self, image: Image) -> BoundModel:
        """Bind a model; none of its pages are in."""
        shard = image.manifest.shards[0]
        paged = self.pager.open(image.manifest.model, shard, image.shard_path(0))
        bound = BoundModel.bind(image, paged)
        self.engine.add(bound, paged)
        return bound

    def grant(self, model: BoundModel, tokens: int) -> None:
        """As many KV frames as one sequence of this many tokens needs."""
        self._epochs += 1
        self.engine.grant_kv(model.name, kv_frames(tokens, model.kv_bytes_per_token, KV_PAGE), self._epochs)
        self.reports.wait_for_grant(self._epochs)

    def close(self) -> None:
        self.engine.close()
        assert self.kv_pool.free == self.kv_pool.frames, "the engine kept frames"
        self.pager.shutdown()
        assert self.pool.free == self.pool.frames, "the pager kept frames"
        self.pool.close()
        self.kv_pool.close()


@contextmanager
def serving(frames: int, reader: Reader | None = None, **engine: int) -> Iterator[Serving]:
    own = reader or PreadReader(2)
    parts = Serving(frames, own, **engine)
    try:
        yield parts
    finally:
        parts.close()
        own.close()


def generate(model: PreTrainedModel, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What transformers answers, greedily, end-of-text token or not."""
    config = model.generation_config
    assert config is not None
    config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return tuple(answer[0, len(prompt) :].tolist())
