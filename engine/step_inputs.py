"""What a forward pass on a GPU needs to know of its batch, packed into one row of numbers and uploaded at once.

The row has the packed tokens, their positions and slots, which rows are sampled, and for each sequence where its
tokens start, its context and its block table. Sequences with one new token ("decodes") come before those with several
("chunks"). Block tables come last and one behind the other, so that all before them lies at fixed places for a given
number of tokens and sequences, and what is uploaded is as long as it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain

import numpy as np
import torch

from engine.batch import StepBatch
from engine.upload import Numbers, Pinned
from swapper.geometry import KV_BLOCK_TOKENS

MAX_DECODES = 256
"""Sequences that a graph takes, at most."""

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
    """Puts rows together, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = Pinned(_START, device)

    def copy(self, batch: StepBatch, known: torch.Tensor | None = None) -> StepTensors:
        """Copy any batch to memory of its own. `known` on the device are the packed tokens, in place of the batch's."""
        decodes = [piece for piece in batch.slices if piece.length == 1]
        chunks = [piece for piece in batch.slices if piece.length > 1]
        pieces = decodes + chunks
        tokens, count = len(batch.tokens), len(pieces)
        sizes = [tokens, tokens, tokens, len(batch.sampled), count, count, count, len(chunks) + 1]
        host = self._pinned.numbers(sum(sizes) + sum(len(piece.blocks) for piece in pieces))
        ids, positions, slots, sampled, starts, contexts, tables, cumulated, blocks = np.split(host, np.cumsum(sizes))
        ids[:], positions[:], sampled[:] = batch.tokens, batch.positions, batch.sampled
        starts[:] = [piece.start for piece in pieces]
        contexts[:] = [piece.context for piece in pieces]
        tables[:] = list(accumulate((len(piece.blocks) for piece in pieces[:-1]), initial=0))
        blocks[:] = np.fromiter(chain.from_iterable(piece.blocks for piece in pieces), np.int64, len(blocks))
        cumulated[:] = list(accumulate((piece.length for piece in chunks), initial=0))
        for piece, first in zip(pieces, tables.tolist(), strict=True):
            own = slice(piece.start, piece.start + piece.length)
            slots[own] = _slots(blocks, first, positions[own])
        row = torch.empty(host.size, dtype=torch.int64, device=self._device)
        self._pinned.upload(row)
        if known is not None:
            row[:tokens].copy_(known)
        return StepTensors.over(row, tokens, len(batch.sampled), len(decodes), len(chunks), int(cumulated[-1]))


class DecodeStaging:
    """Puts one model's decodes together, for the row that decode graphs read.

    Block tables lie at equal distances, so that from step to step only those are written anew that have grown.
    """

    def __init__(self, row: torch.Tensor) -> None:
        """`row`: see `decode_row`."""
        self._row = row
        self._pinned = Pinned(_START, row.device)
        # What is in the pinned memory: for which bucket, at which distance; and its tables.
        self._layout = (0, 0)
        self._tables: list[tuple[int, ...]] = []

    def tensors(self, bucket: int, in_copy: bool = False) -> StepTensors:
        """What was copied last, padded to `bucket`: in the row, or in a copy that other models' decodes leave alone."""
        return StepTensors.over(self._row.clone() if in_copy else self._row, bucket, bucket, bucket, 0, 0)

    def copy(self, batch: StepBatch, bucket: int, known: torch.Tensor | None = None) -> None:
        """Copy a batch of decodes, padded to `bucket`. `known` as in `Staging.copy`."""
        count = len(batch.tokens)
        stride = _rounded(max((len(piece.blocks) for piece in batch.slices), default=1))
        used = 7 * bucket + 1 + bucket * stride
        host = self._pinned.numbers(used)
        grid = host[: 7 * bucket].reshape(7, bucket)
        ids, positions, slots, sampled, starts, contexts, tables = grid
        blocks = host[7 * bucket + 1 :]
        if self._layout != (bucket, stride):
            self._layout, self._tables = (bucket, stride), [()] * bucket
            sampled[:] = starts[:] = np.arange(bucket)
            tables[:] = np.arange(bucket) * stride
        for index, piece in enumerate(batch.slices):
            if self._tables[index] != piece.blocks:  # quick where it is the same tuple
                blocks[index * stride : index * stride + len(piece.blocks)] = piece.blocks
                self._tables[index] = piece.blocks
        ids[:count], positions[:count] = batch.tokens, batch.positions
        contexts[:count] = positions[:count] + 1
        slots[:count] = _slots(blocks, tables[:count], positions[:count])
        contexts[count:] = positions[count:] = ids[count:] = 0
        slots[count:] = -1
        self._pinned.upload(self._row[:used])
        if known is not None:
            self._row[:count].copy_(known)


@cache
def _decode_row(device: torch.device, max_blocks: int) -> torch.Tensor:
    return torch.empty(7 * MAX_DECODES + 1 + MAX_DECODES * _rounded(max_blocks), dtype=torch.int64, device=device)


def decode_row(device: torch.device, max_blocks: int) -> torch.Tensor:
    """A row on the device for `MAX_DECODES` sequences of up to so many blocks.

    It serves all models of about that context: what a pass reads of it was put there just before, in the same stream.
    """
    return _decode_row(device, 1 << (max_blocks - 1).bit_length())


def _slots(blocks: Numbers, tables: Numbers | int, positions: Numbers) -> Numbers:
    slots: Numbers = blocks[tables + positions // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + positions % KV_BLOCK_TOKENS
    return slots


def _rounded(blocks: int) -> int:
    """The distance of block tables that have up to so many blocks: it need not change at each new block."""
    return -(-blocks // 16) * 16
