"""Paged attention's GPU kernels: writing keys and values into the block-major cache, and attending over it.

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
import triton.language as tl

from engine.kv_cache import KvLayer, PagedKvCache
from engine.step_inputs import StepTensors
from swapper.geometry import KV_BLOCK_TOKENS

_MAX_SPLITS = 64  # of a decode's keys; the kernel that combines holds that many at once
_PROGRAMS = 512  # that a launch of decodes should have: about four for each multiprocessor
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _write_kernel(
    keys, values, key_head, key_token, value_head, value_token,
    rows, block_stride, row_width, slots,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEYS_PAD: tl.constexpr, VALUES_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Put one packed token's keys and values of all heads into its row of the cache; slot -1 has none."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = rows + slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * row_width
        i = tl.arange(0, KEYS_PAD)
        key = tl.load(keys + token * key_token + i // KEY * key_head + i % KEY, mask=i < KEYS)
        tl.store(row + i, key.to(rows.dtype.element_ty), mask=i < KEYS)
        i = tl.arange(0, VALUES_PAD)
        value = tl.load(values + token * value_token + i // VALUE * value_head + i % VALUE, mask=i < VALUES)
        tl.store(row + KEYS + i, value.to(rows.dtype.element_ty), mask=i < VALUES)


@triton.jit(do_not_specialize=["sequences", "window"])
def _attend_kernel(
    query, query_head, query_token,
    rows, block_stride, row_width,
    starts, contexts, tables, cumulated, blocks, sequences,
    sinks, scale, softcap, window,
    out, partial, partial_max, partial_sum,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of one key head's queries over one split of the keys. Softmax is in powers of two."""
    TILE: tl.constexpr = BLOCK_M // GROUP  # tokens of a tile
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)

    # Which sequence, and which of its new tokens. Chunk i's tiles begin at cumulated[i] // TILE + i.
    if DECODE:
        sequence = tile
        first = 0
        length = 1
    else:
        sequence = 0
        beyond = sequences
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            if tl.load(cumulated + middle).to(tl.int32) // TILE + middle <= tile:
                sequence = middle
            else:
                beyond = middle
        before = tl.load(cumulated + sequence).to(tl.int32)
        first = (tile - before // TILE - sequence) * TILE
        length = tl.load(cumulated + sequence + 1).to(tl.int32) - before
    if first >= length:
        return
    context = tl.load(contexts + sequence).to(tl.int32)
    start = tl.load(starts + sequence)
    table = blocks + tl.load(tables + sequence)

    m = tl.arange(0, BLOCK_M)
    member = first + m // GROUP
    query_heads = head * GROUP + m % GROUP
    is_row = (m < TILE * GROUP) & (member < length)
    position = context - length + member
    token = start + member

    # The keys that any row of the tile sees, and this split's share of them.
    end = tl.minimum(context, context - length + first + TILE)
    begin = tl.maximum(context - length + first - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, end)

    d = tl.arange(0, KEY_PAD)
    q = tl.load(
        query + token[:, None] * query_token + query_heads[:, None] * query_head + d[None, :],
        mask=is_row[:, None] & (d < KEY)[None, :],
        other=0.0,
    )
    v_d = tl.arange(0, VALUE_PAD)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        if split == 0:
            highest = tl.load(sinks + query_heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
            total += 1.0
    result = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        is_key = n < end
        block = tl.load(table + n // BLOCK_TOKENS, mask=is_key, other=0)
        row = block * block_stride + n % BLOCK_TOKENS * row_width
        k = tl.load(
            rows + row[None, :] + head * KEY + d[:, None], mask=is_key[None, :] & (d < KEY)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh
        seen = is_key[None, :] & (n[None, :] <= position[:, None]) & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * _LOG2E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            rows + row[:, None] + HEADS * KEY + head * VALUE + v_d[None, :],
            mask=is_key[:, None] & (v_d < VALUE)[None, :],
            other=0.0,
        )
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new_highest

    place = token * (HEADS * GROUP) + query_heads
    if DECODE:
        place = place * splits + split
        tl.store(partial_max + place, highest, mask=is_row)
        tl.store(partial_sum + place, total, mask=is_row)
        if (end > begin) | (split == 0):
            tl.store(partial + place[:, None] * VALUE_PAD + v_d[None, :], result, mask=is_row[:, None])
    else:
        result = result / total[:, None]
        tl.store(
            out + place[:, None] * VALUE + v_d[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & (v_d < VALUE)[None, :],
        )


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial, partial_max, partial_sum, out, starts, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Put together what the splits of one decode found for one query head."""
    place = tl.load(starts + tl.program_id(0)) * HEADS + tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    v_d = tl.arange(0, VALUE_PAD)
    highest = tl.load(partial_max + place * splits + split, mask=split < splits, other=float("-inf"))
    total = tl.load(partial_sum + place * splits + split, mask=split < splits, other=0.0)
    overall = tl.max(highest, 0)
    overall = tl.where(overall == float("-inf"), 0.0, overall)
    weight = tl.exp2(highest - overall)
    whole = tl.sum(weight * total, 0)
    whole = tl.where(whole > 0.0, whole, 1.0)  # padding
    found = tl.load(
        partial + (place * splits + split)[:, None] * VALUE_PAD + v_d[None, :],
        mask=(highest > float("-inf"))[:, None],
        other=0.0,
    )
    result = tl.sum(found * weight[:, None], 0) / whole
    tl.store(out + place * VALUE + v_d, result.to(out.dtype.element_ty), mask=v_d < VALUE)


def write(key: torch.Tensor, value: torch.Tensor, layer: KvLayer, cache: PagedKvCache, inputs: StepTensors) -> None:
    """Write the pass's new keys and values, `[1, heads, tokens, width]`, into a layer of the cache."""
    key, value = _dense(key), _dense(value)
    shape = layer.shape
    keys, values = shape.heads * shape.key_width, shape.heads * shape.value_width
    _write_kernel[(key.shape[2],)](
        key, value, key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        layer.rows, cache.block_elements, layer.width, inputs.slots,
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
    head_and_cache = (query, query.stride(1), query.stride(2), layer.rows, cache.block_elements, layer.width)
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
        partial = torch.empty(tokens * heads * splits * (value_pad + 2), dtype=torch.float32, device=query.device)
        results, highest, total = partial.split(
            [tokens * heads * splits * value_pad, tokens * heads * splits, tokens * heads * splits]
        )
        _attend_kernel[(decodes, shape.heads, splits)](
            *head_and_cache,
            inputs.starts, inputs.contexts, inputs.tables, inputs.contexts, inputs.blocks, decodes,
            *extras, out, results, highest, total,
            **common, BLOCK_M=least_rows, BLOCK_N=32, DECODE=True,
            num_warps=4, num_stages=2 if exact or wide else 3,
        )  # fmt: skip
        _combine_kernel[(decodes, heads)](
            results, highest, total, out, inputs.starts, splits,
            HEADS=heads, VALUE=shape.value_width, VALUE_PAD=value_pad, MAX_SPLITS=_MAX_SPLITS,
        )  # fmt: skip
    if chunks:
        block_m = max(32 if exact or wide else 64, least_rows)
        tiles = inputs.chunk_tokens // (block_m // group) + chunks
        _attend_kernel[(tiles, shape.heads, 1)](
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
    wanted = triton.next_power_of_2(triton.cdiv(_PROGRAMS, programs))
    return min(max(wanted, 4), _MAX_SPLITS)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a row side by side; heads and tokens may lie anyhow."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
