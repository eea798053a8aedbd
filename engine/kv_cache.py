"""KV blocks in a region: how the keys and values of a model's tokens lie in memory.

Block-major: block `b` is the region's bytes `[b * block_bytes, (b + 1) * block_bytes)` and holds keys and values of
all layers for 16 tokens, so a KV cache grows and shrinks by whole frames. Within a block, layer after layer; within a
layer, one row a token: its keys of all heads, then its values.

A layer's rows lie at a regular distance from the region's start, so a layer is one strided table, and one index per
token finds its row in every layer of the same width. Reading or writing a layer is one index operation, which touches
the rows it names and nothing else: other blocks may be unmapped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.views import region_bytes
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KvLayerShape:
    """What one layer keeps of one token: `heads` keys of `key_width` and values of `value_width` elements."""

    heads: int
    key_width: int
    value_width: int


def row_width(shape: KvLayerShape) -> int:
    """Elements that a layer keeps of one token."""
    return shape.heads * (shape.key_width + shape.value_width)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where keys and values lie in a block, by the layer index that the model's attention modules carry."""

    layers: Mapping[int, KvLayerShape]
    dtype: torch.dtype
    bytes_per_token: int = 0
    """What blocks have room for; on all ranks of a mesh as much as on the one that needs most, so that all have the
    same blocks in the same frames."""

    def __post_init__(self) -> None:
        if not self.bytes_per_token:
            object.__setattr__(self, "bytes_per_token", self.used_bytes_per_token)

    @property
    def used_bytes_per_token(self) -> int:
        return sum(map(row_width, self.layers.values())) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.bytes_per_token * KV_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's rows: token `t` of block `b` has row `b * PagedKvCache.block_stride + t * row_stride` of `rows`."""

    shape: KvLayerShape
    rows: torch.Tensor  # [any, width]; rows may overlap, and most belong to other layers or to no mapped block
    width: int
    key_width: int  # of all heads together
    row_stride: int
    offset: int  # of its rows from the cache's anchor, in elements


class PagedKvCache:
    """A KV region seen as blocks. Making it touches no memory."""

    def __init__(self, region: Region, layout: KvLayout) -> None:
        self.region = region
        self.layout = layout
        self.dtype = layout.dtype
        self.blocks = region.nbytes // layout.block_bytes
        usable = region.nbytes - region.nbytes % layout.dtype.itemsize
        elements = region_bytes(region)[:usable].view(layout.dtype)
        self.device = elements.device
        # All distances are multiples of the unit, so tables of every row width can be indexed in it.
        self.block_elements = layout.block_bytes // layout.dtype.itemsize
        unit = math.gcd(self.block_elements, *map(row_width, layout.layers.values()))
        self.block_stride = self.block_elements // unit
        # Memory of the same type that is always there, for kernels to count from.
        self.anchor = torch.empty(16, dtype=layout.dtype, device=self.device)
        self.layers: dict[int, KvLayer] = {}
        start = 0
        for index, shape in layout.layers.items():
            width = row_width(shape)
            count = max(0, (elements.numel() - start - width) // unit + 1)
            rows = elements.as_strided((count, width), (unit, 1), start)
            offset = (rows.data_ptr() - self.anchor.data_ptr()) // layout.dtype.itemsize
            self.layers[index] = KvLayer(shape, rows, width, shape.heads * shape.key_width, width // unit, offset)
            start += width * KV_BLOCK_TOKENS
