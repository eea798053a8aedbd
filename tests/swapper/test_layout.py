"""A layout keeps the order, aligns every tensor, and leaves no byte of a shard without an owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapper.layout import PAD_PREFIX, TENSOR_ALIGNMENT, lay_out

Planned = tuple[str, str, tuple[int, ...], str]

dtypes = st.sampled_from(["U8", "BF16", "F32"])
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
layers = st.lists(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=4), min_size=1, max_size=5)


def named(layers: list[list[tuple[str, tuple[int, ...]]]]) -> list[Planned]:
    return [
        (f"layers.{i}.{j}", dtype, shape, f"layers.{i}")
        for i, tensors in enumerate(layers)
        for j, (dtype, shape) in enumerate(tensors)
    ]


@given(layers)
def test_tensors_are_aligned_and_in_order_and_pads_fill_every_gap(layers: list) -> None:
    planned = named(layers)
    layout = lay_out(planned)
    assert [(entry.name, entry.dtype, entry.shape) for entry in layout.tensors] == [entry[:3] for entry in planned]
    assert all(entry.offset % TENSOR_ALIGNMENT == 0 for entry in layout.tensors)
    assert layout.nbytes % 4096 == 0
    end = 0
    for entry in layout.file_tensors:
        assert entry.offset == end
        end += entry.nbytes
    assert end == layout.nbytes
    names = [entry.name for entry in layout.file_tensors]
    assert len(set(names)) == len(names)
    assert {entry.dtype for entry in layout.file_tensors if entry.name.startswith(PAD_PREFIX)} <= {"U8"}


@given(layers)
def test_layer_extents_follow_one_another_and_hold_their_tensors(layers: list) -> None:
    layout = lay_out(named(layers))
    assert [extent.name for extent in layout.layers] == [f"layers.{i}" for i in range(len(layers))]
    bounds = [0, *(extent.end for extent in layout.layers)]
    assert [extent.start for extent in layout.layers] == bounds[:-1]
    assert bounds[-1] == layout.nbytes
    extents = {extent.name: extent for extent in layout.layers}
    for entry in layout.tensors:
        extent = extents[entry.name.rpartition(".")[0]]
        assert extent.start <= entry.offset
        assert entry.offset + entry.nbytes <= extent.end


def test_a_tensor_planned_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="planned twice"):
        lay_out([("w", "F32", (1,), "a"), ("w", "F32", (1,), "a")])


def test_a_layer_in_two_places_is_an_error() -> None:
    with pytest.raises(ValueError, match="apart from the other tensors of layer a"):
        lay_out([("x", "F32", (1,), "a"), ("y", "F32", (1,), "b"), ("z", "F32", (1,), "a")])
