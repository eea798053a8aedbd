"""What a forward pass on a GPU needs to know of its batch, packed into one row of numbers and copied at once.

The row has the packed tokens, their positions and slots, which rows are sampled, and for each sequence where its
tokens start, its context and its block table. Sequences with one new token ("decodes") come before those with several
("chunks"). Block tables come last and one behind the other, so that all before them lies at fixed places for a given
number of tokens and sequences, and what is copied is as long as it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import SequenceSlice, StepBatch
from swapper.geometry import KV_BLOCK_TOKENS

Numbers = npt.NDArray[np.int64]

_START = 1 << 14  # numbers that the pinned memory first has room for


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of the row on the GPU. Padding has slot -1 and context 0."""

    tokens: torch.Tensor  # [1, tokens]
    positions: torch.Tensor  # [1, tokens]
    slots: torch.Tensor  # of each token: block * KV_BLOCK_TOKENS + its place in the block
    sampled: torch.Tensor
    starts: torch.Tensor  # of each sequence, decodes first: its first packed token
    contexts: torch.Tensor
    tables: torch.Tensor  # where its block table begins in `blocks`
    cumulated: torch.Tensor  # [chunks + 1], new tokens of the chunks before
    blocks: torch.Tensor
    decodes: int
    chunks: int
    chunk_tokens: int

    @staticmethod
    def over(row: torch.Tensor, tokens: int, sampled: int, decodes: int, chunks: int, chunk_tokens: int) -> StepTensors:
        sequences = decodes + chunks
        sizes = [tokens, tokens, tokens, sampled, sequences, sequences, sequences, chunks + 1]
        ids, positions, slots, rows, starts, contexts, tables, cumulated, blocks = torch.split(
            row, [*sizes, row.numel() - sum(sizes)]
        )
        return StepTensors(
            ids[None], positions[None], slots, rows, starts, contexts, tables, cumulated, blocks,
            decodes, chunks, chunk_tokens,
        )  # fmt: skip


def decodes_only(batch: StepBatch) -> bool:
    """Whether every sequence has one new token, in order, and all are sampled: a pass that a graph can stand for."""
    count = len(batch.tokens)
    return len(batch.slices) == count and batch.sampled == tuple(range(count))


class Staging:
    """Pinned memory in which rows are put together. One pass at a time; its copy has ended before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._make_room(_START)

    def copy_decodes(self, batch: StepBatch, bucket: int, target: torch.Tensor) -> bool:
        """Copy a batch of decodes, padded to `bucket`, to the row of a graph; False if that has no room for it."""
        used = self._decodes(batch, bucket, target.numel())
        if not used:
            return False
        target[:used].copy_(self._pinned[:used], non_blocking=True)
        return True

    def copy(self, batch: StepBatch) -> StepTensors:
        """Copy any batch to memory of its own."""
        decodes = [piece for piece in batch.slices if piece.length == 1]
        chunks = [piece for piece in batch.slices if piece.length > 1]
        pieces = decodes + chunks
        tokens, count = len(batch.tokens), len(pieces)
        blocks = sum(len(piece.blocks) for piece in pieces)
        host = self._row(3 * tokens + len(batch.sampled) + 3 * count + len(chunks) + 1 + blocks)
        ids, positions, slots, sampled, starts, contexts, tables, cumulated, table = np.split(
            host, np.cumsum([tokens, tokens, tokens, len(batch.sampled), count, count, count, len(chunks) + 1])
        )
        ids[:], positions[:], sampled[:] = batch.tokens, batch.positions, batch.sampled
        starts[:] = [piece.start for piece in pieces]
        contexts[:] = [piece.context for piece in pieces]
        _put_tables(pieces, tables, table)
        cumulated[0] = 0
        np.cumsum([piece.length for piece in chunks], out=cumulated[1:])
        for piece, first in zip(pieces, tables.tolist(), strict=True):
            own = slice(piece.start, piece.start + piece.length)
            places = positions[own]
            slots[own] = table[first + places // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + places % KV_BLOCK_TOKENS
        row = self._pinned[: host.size].to(self._device, non_blocking=True)
        return StepTensors.over(row, tokens, len(batch.sampled), len(decodes), len(chunks), int(cumulated[-1]))

    def pad(self, bucket: int, target: torch.Tensor) -> None:
        """Copy a batch of nothing but padding to the row of a graph."""
        self.copy_decodes(StepBatch((), (), (), ()), bucket, target)

    def _decodes(self, batch: StepBatch, bucket: int, room: int) -> int:
        """Put a batch of decodes together, as `StepTensors.over` takes them apart; its size, 0 if there is no room."""
        count = len(batch.tokens)
        blocks = sum(len(piece.blocks) for piece in batch.slices)
        fixed = 7 * bucket + 1
        if fixed + blocks > room:
            return 0
        host = self._row(fixed + blocks)
        grid = host[: 7 * bucket].reshape(7, bucket)
        ids, positions, slots, sampled, starts, contexts, tables = grid
        grid[:, count:] = 0
        slots[count:] = -1
        sampled[:] = starts[:] = np.arange(bucket)
        ids[:count], positions[:count] = batch.tokens, batch.positions
        contexts[:count] = [piece.context for piece in batch.slices]
        host[7 * bucket] = 0
        table = host[fixed:]
        _put_tables(batch.slices, tables[:count], table)
        places = contexts[:count] - 1
        slots[:count] = table[tables[:count] + places // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + places % KV_BLOCK_TOKENS
        return fixed + blocks

    def _row(self, size: int) -> Numbers:
        if size > self._host.size:
            self._make_room(2 * size)
        return self._host[:size]

    def _make_room(self, size: int) -> None:
        self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._host: Numbers = self._pinned.numpy()


def _put_tables(pieces: Sequence[SequenceSlice], tables: Numbers, table: Numbers) -> None:
    """Write the sequences' blocks one behind the other, and where each begins."""
    sizes = [len(piece.blocks) for piece in pieces]
    if pieces:
        tables[0] = 0
        np.cumsum(sizes[:-1], out=tables[1:])
        table[:] = np.fromiter(chain.from_iterable(piece.blocks for piece in pieces), np.int64, len(table))
