"""Images bound over plain memory: what the engine's tests need of a pager, without one."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.batch import SequenceSlice, StepBatch
from engine.kv_cache import PagedKvCache
from engine.model import BoundModel, PageGate
from engine.plan import pack_plan
from engine.support import MemoryShard
from swapper.checkpoint import Checkpoint
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS
from swapper.image import Image
from swapper.packer import pack


def pack_image(checkpoint: Path, directory: Path, dtype: str | None = None) -> Image:
    """Pack a checkpoint into a directory."""
    directory.mkdir()
    source = Checkpoint(checkpoint)
    pack(pack_plan(source, dtype), source, directory.name, directory)
    return Image.open(directory)


def bind(image: Image, load: bool = True, device: str = "cpu", plain: bool = False) -> tuple[BoundModel, MemoryShard]:
    """A model over memory, and its weights."""
    shard = MemoryShard(image, device)
    if load:
        shard.load(shard.shard.nbytes)
    return BoundModel.bind(image, shard, plain=plain), shard


def open_gate(nbytes: int) -> None:
    """All pages are in."""


class Sequences:
    """Runs sequences of known tokens through a model in chunks, and keeps the logits of every token."""

    def __init__(self, model: BoundModel, prompts: list[list[int]], blocks: int = 64) -> None:
        self.model = model
        self.prompts = prompts
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        nbytes = blocks * KV_BLOCK_TOKENS * model.kv_bytes_per_token
        device = model.weights.region.device
        # NaN: what was not written must not be read
        self.memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
        self.cache: PagedKvCache = model.kv_cache(Region(self.memory.data_ptr(), nbytes, device))
        self._free = [*range(0, blocks, 2), *range(1, blocks, 2)]  # so that a sequence's blocks are not neighbours
        self._blocks: list[list[int]] = [[] for _ in prompts]

    def use(self, cache: PagedKvCache, free: list[int]) -> None:
        """Keep keys and values elsewhere, in these blocks."""
        self.cache, self._free = cache, free

    def step(self, lengths: dict[int, int], gate: PageGate = open_gate) -> None:
        """One pass: so many new tokens of each of these sequences."""
        slices, tokens, positions = [], [], []
        for index, length in lengths.items():
            done = len(self.logits[index])
            context = done + length
            while len(self._blocks[index]) * KV_BLOCK_TOKENS < context:
                self._blocks[index].append(self._free.pop())
            slices.append(SequenceSlice(len(tokens), length, context, tuple(self._blocks[index])))
            tokens += self.prompts[index][done:context]
            positions += range(done, context)
        batch = StepBatch(tuple(tokens), tuple(positions), tuple(slices), tuple(range(len(tokens))))
        logits = self.model.forward(batch, self.cache, gate)
        for index, piece in zip(lengths, slices, strict=True):
            self.logits[index] += logits[piece.start : piece.start + piece.length].unbind()

    def result(self, index: int) -> torch.Tensor:
        return torch.stack(self.logits[index])
