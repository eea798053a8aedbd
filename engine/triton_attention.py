"""Paged attention on a GPU: keys and values written to the block-major cache, and attended to, by Triton kernels.

One kernel attends, for prefill and decode alike. A program has a tile of rows of one sequence: some of its new tokens,
times all query heads that share one key head, so that a key is read once for all of them. It walks the sequence's keys
block by block, through the block table, from the window's edge to the tile's last token, and keeps the softmax running.

A decode has one token, and so too few programs to fill a GPU: its keys are split among several programs, and a second
kernel combines what they found. Nothing in a launch depends on how long contexts are. Programs read lengths from the
GPU's memory, so that one captured launch serves them all; a sequence of context 0 is padding and reads nothing.

Imported for models on a GPU only: Triton is not there without one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from engine.kv_cache import KvLayer, PagedKvCache
from engine.step_inputs import StepTensors
from engine.triton_kernels import attend_kernel, combine_kernel, write_kernel
from swapper.geometry import KV_BLOCK_TOKENS

_MAX_SPLITS = 64  # of a decode's keys; the kernel that combines holds that many at once
_PROGRAMS = 512  # that a launch of decodes should have: about four for each multiprocessor


def write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, cache: PagedKvCache, inputs: StepTensors) -> None:
    """Write the pass's new keys and values, `[1, heads, tokens, width]`, into a layer of the cache."""
    key, value = _dense(key), _dense(value)
    shape = layer.shape
    keys, values = shape.heads * shape.key_width, shape.heads * shape.value_width
    write_kernel[(key.shape[2],)](
        key, value, key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        cache.anchor, layer.offset, cache.block_elements, layer.width, inputs.slots,
        KEY=shape.key_width, VALUE=shape.value_width, KEYS=keys, VALUES=values,
        KEYS_PAD=triton.next_power_of_2(keys), VALUES_PAD=triton.next_power_of_2(values),
        BLOCK_TOKENS=KV_BLOCK_TOKENS,
    )  # fmt: skip


def attend(
    query: torch.Tensor,
    layer: KvLayer,
    cache: PagedKvCache,
    inputs: StepTensors,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Queries `[1, heads, tokens, key width]` in, results `[1, tokens, heads, value width]` out."""
    query = _dense(query)
    shape = layer.shape
    heads, tokens = query.shape[1:3]
    group = heads // shape.heads
    out = query.new_empty(1, tokens, heads, shape.value_width)
    value_pad = max(16, triton.next_power_of_2(shape.value_width))
    common: dict[str, Any] = {
        "HEADS": shape.heads,
        "GROUP": group,
        "KEY": shape.key_width,
        "VALUE": shape.value_width,
        "KEY_PAD": max(16, triton.next_power_of_2(shape.key_width)),
        "VALUE_PAD": value_pad,
        "CAPPED": softcap is not None,
        "SINKS": sinks is not None,
        "BLOCK_TOKENS": KV_BLOCK_TOKENS,
    }
    least_rows = max(16, triton.next_power_of_2(group))
    head_and_cache = (
        query,
        query.stride(1),
        query.stride(2),
        cache.anchor,
        layer.offset,
        cache.block_elements,
        layer.width,
    )
    extras = (
        out if sinks is None else sinks,
        shape.key_width**-0.5 if scaling is None else scaling,
        1.0 if softcap is None else softcap,
        1 << 30 if window is None else window,
    )
    exact = query.dtype == torch.float32  # whose tiles take twice the room, and whose products take no matrix unit
    wide = max(common["KEY_PAD"], value_pad) > 128
    decodes, chunks = inputs.decodes, inputs.chunks
    if decodes:
        splits = _splits(decodes * shape.heads)
        parts = decodes * heads * splits
        partial = torch.empty(parts * (value_pad + 2), dtype=torch.float32, device=query.device)
        results, highest, total = torch.split(partial, [parts * value_pad, parts, parts])
        attend_kernel[(decodes, shape.heads, splits)](
            *head_and_cache,
            inputs.starts, inputs.contexts, inputs.tables, inputs.contexts, inputs.blocks, decodes,
            *extras, out, results, highest, total,
            **common, BLOCK_M=least_rows, BLOCK_N=32, DECODE=True,
            num_warps=4, num_stages=2 if exact or wide else 3,
        )  # fmt: skip
        combine_kernel[(decodes, heads)](
            results, highest, total, out, inputs.starts, splits,
            HEADS=heads, VALUE=shape.value_width, VALUE_PAD=value_pad, MAX_SPLITS=_MAX_SPLITS,
        )  # fmt: skip
    if chunks:
        block_m = max(32 if exact or wide else 64, least_rows)
        tiles = inputs.chunk_tokens // (block_m // group) + chunks
        attend_kernel[(tiles, shape.heads, 1)](
            *head_and_cache,
            inputs.starts[decodes:], inputs.contexts[decodes:], inputs.tables[decodes:], inputs.cumulated,
            inputs.blocks, chunks,
            *extras, out, out, out, out,
            **common, BLOCK_M=block_m, BLOCK_N=32 if exact or wide else 64, DECODE=False,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def _splits(programs: int) -> int:
    """Among how many programs the keys of each decode are split, when there are so many without."""
    wanted = _PROGRAMS // programs
    return min(max(1 << wanted.bit_length(), 4), _MAX_SPLITS)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a row side by side; heads and tokens may lie anyhow."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
