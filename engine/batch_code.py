"""A forward pass's batch as numbers for the plan channel, short enough to be sent at every step.

Block tables would be most of it, and change little: a table begins with a block that no other table has, so each end
remembers the tables by their first blocks, and only what was added behind is sent.
"""

from __future__ import annotations

from typing import Any

from engine.batch import SequenceSlice, StepBatch

Blocks = tuple[int, ...]


class BatchEncoder:
    """The leader's end, for one model. Every batch is to be decoded, in order."""

    def __init__(self) -> None:
        self._tables: dict[int, Blocks] = {}

    def encode(self, batch: StepBatch) -> list[Any]:
        slices = [[piece.start, piece.length, piece.context, *self._table(piece.blocks)] for piece in batch.slices]
        return [batch.tokens, batch.positions, slices, batch.sampled, batch.in_one]

    def _table(self, blocks: Blocks) -> list[Any]:
        """The first block, how many are known, and those that are not."""
        if not blocks:
            return [-1, 0, ()]
        known = self._tables.get(blocks[0], ())
        if known is not blocks:
            self._tables[blocks[0]] = blocks
        kept = len(known) if known is blocks or blocks[: len(known)] == known else 0
        return [blocks[0], kept, blocks[kept:]]


class BatchDecoder:
    """A follower's end, for one model."""

    def __init__(self) -> None:
        self._tables: dict[int, Blocks] = {}

    def decode(self, code: list[Any]) -> StepBatch:
        tokens, positions, slices, sampled, in_one = code
        pieces = tuple(
            SequenceSlice(start, length, context, self._table(first, kept, added))
            for start, length, context, first, kept, added in slices
        )
        return StepBatch(tuple(tokens), tuple(positions), pieces, tuple(sampled), in_one)

    def _table(self, first: int, kept: int, added: list[int]) -> Blocks:
        if first < 0:
            return ()
        known = self._tables.get(first, ())
        if kept == len(known) and not added:
            return known
        self._tables[first] = (*known[:kept], *added)
        return self._tables[first]
