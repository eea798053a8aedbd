"""Groups: the sequences of a pass that attend together, and the indices and masks with which they do.

Sequences of a similar number of new tokens and of a similar context are padded to one another; decodes are groups of
their own. Padding at most doubles each dimension, whatever the mix, and the number of groups is logarithmic. Padding
always repeats a token of the same sequence that is written: other memory may be unmapped, or hold NaN, which no mask
hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import SequenceSlice
from engine.kv_cache import KvLayer, PagedKvCache
from swapper.geometry import KV_BLOCK_TOKENS

_SIMILAR_CONTEXT = 256  # tokens; contexts up to this are not told apart

Indices = npt.NDArray[np.int64]


class Group:
    """Sequences padded to the same number of queries."""

    def __init__(self, slices: Sequence[SequenceSlice], cache: PagedKvCache) -> None:
        self.cache = cache
        self.size = len(slices)
        numbers = np.array([(s.start, s.length, s.context) for s in slices], dtype=np.int64)
        self._starts, self.lengths, self.contexts = numbers[:, 0:1], numbers[:, 1:2], numbers[:, 2:3]
        self.queries = int(self.lengths.max())
        self._blocks = _block_table(slices)
        self._members = np.arange(self.size)[:, None]
        self._offsets = np.minimum(np.arange(self.queries)[None], self.lengths - 1)  # of each query in its slice
        self.packed: Indices = self._starts + self._offsets  # row of each query in the pass
        self.positions: Indices = self.contexts - self.lengths + self._offsets  # of each query in its sequence

    @cached_property
    def even(self) -> bool:
        """Whether there is no padding among the queries."""
        return bool((self.lengths == self.queries).all())

    @cached_property
    def take(self) -> torch.Tensor:
        """The packed row of each query, padding included."""
        return self.to_device(self.packed.ravel())

    @cached_property
    def kept(self) -> torch.Tensor | None:
        """Which queries are not padding; None if all."""
        if self.even:
            return None
        return self.to_device(np.flatnonzero(np.arange(self.queries)[None] < self.lengths))

    @cached_property
    def rows(self) -> torch.Tensor:
        """The packed rows of the queries that are not padding."""
        return self.take if self.kept is None else self.take[self.kept]

    def covers(self, tokens: int) -> bool:
        """Whether the queries are the packed tokens `[0, tokens)`, in order and without padding."""
        return self.even and self.size * self.queries == tokens and bool((np.diff(self._starts[:, 0]) > 0).all())

    def slots(self, row_stride: int, positions: Indices | None = None) -> Indices:
        """Where tokens at those positions (by default the queries) lie in the cache, as `KvLayer.rows` counts."""
        positions = self.positions if positions is None else positions
        blocks = self._blocks[self._members, positions // KV_BLOCK_TOKENS]
        slots: Indices = blocks * self.cache.block_stride + positions % KV_BLOCK_TOKENS * row_stride
        return slots

    def to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.cache.device)


class GroupView:
    """What a group sees through a window of one width (None: everything), in layers of one row stride."""

    def __init__(self, group: Group, window: int | None, row_stride: int) -> None:
        self.size, self.queries = group.size, group.queries
        self._group, self._window = group, window
        first = 0 if window is None else np.maximum(0, group.contexts - group.lengths - window + 1)
        counts = group.contexts - first
        self.keys = int(counts.max())
        steps = np.arange(self.keys)[None]
        self._real = steps < counts
        self._positions: Indices = first + np.where(self._real, steps, 0)
        self.index = group.to_device(group.slots(row_stride, self._positions).ravel())
        """The row of each key, as `KvLayer.rows` counts."""
        self.causal = (
            group.queries > 1
            and group.even
            and bool((group.contexts == group.queries).all())
            and (window is None or window >= group.queries)
        )
        """Whether queries and keys are the same tokens, so that the plain triangular mask is right."""
        self.unmasked = group.queries == 1 and bool(self._real.all())
        """Whether every query sees every key."""

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """0 where a query sees a key, -inf where it does not, shape `[size, 1, queries, keys]`."""
        if self.unmasked:
            return None
        queries, keys = self._group.positions[:, :, None], self._positions[:, None, :]
        seen = self._real[:, None, :] & (keys <= queries)
        if self._window is not None:
            seen &= keys > queries - self._window
        mask = torch.zeros(seen.shape, dtype=self._group.cache.dtype, device=self._group.cache.device)
        return mask.masked_fill_(self._group.to_device(~seen), -torch.inf)[:, None]

    def gather(self, layer: KvLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that the group sees in a layer, shapes `[size, heads, keys, width]`."""
        shape = layer.shape
        rows = layer.rows.index_select(0, self.index).view(self.size, self.keys, layer.width)
        keys = rows[..., : layer.key_width].view(self.size, self.keys, shape.heads, shape.key_width)
        values = rows[..., layer.key_width :].view(self.size, self.keys, shape.heads, shape.value_width)
        return keys.transpose(1, 2), values.transpose(1, 2)


def make_groups(slices: Sequence[SequenceSlice], cache: PagedKvCache) -> list[Group]:
    """Put similar sequences together."""
    alike: dict[tuple[int, int], list[SequenceSlice]] = {}
    for piece in slices:
        context = max(piece.context, _SIMILAR_CONTEXT)
        alike.setdefault(((piece.length - 1).bit_length(), (context - 1).bit_length()), []).append(piece)
    return [Group(members, cache) for members in alike.values()]


def _block_table(slices: Sequence[SequenceSlice]) -> Indices:
    used = [-(-piece.context // KV_BLOCK_TOKENS) for piece in slices]
    table = np.empty((len(slices), max(used)), dtype=np.int64)
    for row, piece, count in zip(table, slices, used, strict=True):
        row[:count] = piece.blocks[:count]
        row[count:] = piece.blocks[0]
    return table
