"""Where the tensors of a shard lie: offsets, pad tensors and layer extents, from names and sizes alone.

Tensors keep the order they are given in, which is execution order. Each starts at an aligned offset; the format
forbids holes, so a gap is a U8 tensor with a name of its own. A layer's extent reaches to where the next layer
starts, so extents follow one another without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swapper.geometry import DATA_ALIGNMENT
from swapper.header import tensor_nbytes
from swapper.image import LayerExtent, TensorEntry

TENSOR_ALIGNMENT = 256
"""What CUDA's own allocator promises, so kernels may load a weight as widely as they like."""

PAD_PREFIX = "__pad__."


@dataclass(frozen=True, slots=True)
class Layout:
    """A shard's data. `file_tensors` is everything in the file, pads included, in order of offset."""

    nbytes: int  # a multiple of 4,096
    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerExtent, ...]
    file_tensors: tuple[TensorEntry, ...]


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> Layout:
    """Place tensors given as (name, safetensors dtype, shape, layer).

    Raises ValueError if a name comes twice or a layer's tensors do not lie side by side: the plan is wrong.
    """
    placed: list[TensorEntry] = []
    filed: list[TensorEntry] = []
    starts: dict[str, int] = {}
    names: set[str] = set()
    end, current = 0, None
    for name, dtype, shape, layer in tensors:
        if name in names:
            raise ValueError(f"tensor {name} is planned twice")
        if layer != current and layer in starts:
            raise ValueError(f"tensor {name} is apart from the other tensors of layer {layer}")
        names.add(name)
        end = _pad(filed, end, TENSOR_ALIGNMENT)
        current = layer
        starts.setdefault(layer, end)
        entry = TensorEntry(name, dtype, shape, end, tensor_nbytes(dtype, shape))
        placed.append(entry)
        filed.append(entry)
        end += entry.nbytes
    end = _pad(filed, end, DATA_ALIGNMENT)
    bounds = [*starts.values(), end]
    layers = tuple(LayerExtent(name, bounds[i], bounds[i + 1]) for i, name in enumerate(starts))
    return Layout(end, tuple(placed), layers, tuple(filed))


def _pad(filed: list[TensorEntry], end: int, alignment: int) -> int:
    """Fill up to the next multiple of `alignment`; returns where that is."""
    gap = -end % alignment
    if gap:
        filed.append(TensorEntry(f"{PAD_PREFIX}{len(filed)}", "U8", (gap,), end, gap))
    return end + gap
