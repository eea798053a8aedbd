"""Rehearsals: a model's first passes on a GPU, run on blank memory before anybody asks for the model.

The first pass of a shape compiles kernels, loads libraries' code and creates their handles, which takes a second. A
rehearsal has that done in the background when a worker learns of a model. It needs none of the model's pages: a twin of
the module is bound to a region all of whose pages are one blank page (`CudaFramePool.blank`), and run on a stream of
its own, beside other models' passes. Models of one shape have one rehearsal.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3

from engine.batch import SequenceSlice, StepBatch
from engine.kv_cache import PagedKvCache
from engine.model import BoundModel
from engine.request import SamplingParams
from engine.sampling import SamplingRow, sample
from swapper.cuda_frames import CudaFramePool
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS, kv_blocks
from swapper.image import Image, Shard

logger = logging.getLogger(__name__)

MOST_SHAPES = 64
"""Rehearsals that a worker holds, at most: compiled code is kept for good."""


class BlankShard:
    """Blank memory in the place of a shard's pages; all of them are in."""

    def __init__(self, shard: Shard, region: Region) -> None:
        self.shard = shard
        self.region = region

    def is_ready(self, nbytes: int) -> bool:
        return True


class Rehearsals:
    """Rehearses models in a thread of its own, in the order in which they were asked for."""

    def __init__(self, pool: CudaFramePool, batch_tokens: int) -> None:
        self._pool = pool
        self._batch_tokens = batch_tokens
        self._device = torch.device(pool.device)
        self._seen: set[str] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rehearsal")  # a task for each model that is known

    def ask(self, path: Path) -> Future[None]:
        """Rehearse the model at `path`, which may be wrong or gone by then."""
        return self._thread.submit(self._try, path)

    def _try(self, path: Path) -> None:
        try:
            began = time.perf_counter()
            if self._rehearse(Image.open(path)):
                logger.info("The model at %s was rehearsed in %.2f s.", path, time.perf_counter() - began)
        except Exception:  # whatever a model's code may raise: its own bind and passes will tell
            logger.warning("The model at %s could not be rehearsed.", path, exc_info=True)

    def _rehearse(self, image: Image) -> bool:
        """Returns whether it had to be done."""
        if image.manifest.embedding is not None:
            return False
        shape = blake3((image.path / "config.json").read_bytes() + image.manifest.dtype.encode()).hexdigest()
        if shape in self._seen or len(self._seen) >= MOST_SHAPES or len(image.manifest.shards) > 1:
            return False  # a pass of several ranks needs all of them
        self._seen.add(shape)
        shard = image.manifest.shards[0]
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with self._pool.blank(shard.nbytes) as region, torch.cuda.stream(stream):
            try:
                twin = BoundModel.bind(image, BlankShard(shard, region))
                self._run(twin)
                twin.close()
            finally:
                stream.synchronize()
        return True

    def _run(self, twin: BoundModel) -> None:
        """A long prompt, one decode and several, and every way to sample."""
        prompt = max(2, min(self._batch_tokens, twin.context_length - 1) - 1)
        blocks = kv_blocks(prompt + 1)
        nbytes = (blocks + 1) * KV_BLOCK_TOKENS * twin.kv_bytes_per_token
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        cache = twin.kv_cache(Region(memory.data_ptr(), nbytes, self._pool.device))
        own, other = tuple(range(blocks)), (blocks,)
        self._pass(twin, cache, [(0, prompt, own)])
        self._pass(twin, cache, [(prompt, 1, own)])
        self._pass(twin, cache, [(prompt, 1, own), (0, 1, other)])
        logits = self._pass(twin, cache, [(0, 1, other), (0, prompt, own)])
        kinds = [SamplingParams(temperature=0), SamplingParams(top_p=0.9, top_k=40, logprobs=1)]
        sample(logits, [SamplingRow(params, 1) for params in kinds])

    def _pass(
        self, twin: BoundModel, cache: PagedKvCache, parts: list[tuple[int, int, tuple[int, ...]]]
    ) -> torch.Tensor:
        """A pass of zeros: for each sequence, tokens that it has, new ones, and its blocks."""
        slices, positions, sampled = [], list[int](), list[int]()
        for done, length, blocks in parts:
            context = done + length
            slices.append(SequenceSlice(len(positions), length, context, blocks[: kv_blocks(context)]))
            positions += range(done, context)
            sampled.append(len(positions) - 1)
        batch = StepBatch((0,) * len(positions), tuple(positions), tuple(slices), tuple(sampled))
        return twin.rehearse(batch, cache)
