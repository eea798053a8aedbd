"""Kernels for GPUs: fetching a batch's numbers, writing keys and values into the block-major cache, attending over it.

`engine/triton_attention.py` launches those of attention, and says how they go together. A layer's rows are given as an
offset from an anchor, a tensor of their type: of a tensor's own address Triton asks the driver, which knows none of an
unmapped page.
What a batch's numbers are, and where they lie in their row, does not matter to a kernel: for each kind of alignment
there would be another one, and a second of waiting for it in the middle of an answer.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["source", "target", "count"])
def fetch_kernel(source, target, count, BLOCK: tl.constexpr):
    """Copy numbers from pinned memory of the host."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit(do_not_specialize=["slots"])
def write_kernel(
    keys, values, key_head, key_token, value_head, value_token,
    anchor, rows_offset, block_stride, row_width, slots,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEYS_PAD: tl.constexpr, VALUES_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Put one packed token's keys and values of all heads into its row of the cache; slot -1 has none."""
    rows = anchor + rows_offset
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


@triton.jit(do_not_specialize=["starts", "contexts", "tables", "cumulated", "blocks", "sequences", "window"])
def attend_kernel(
    query, query_head, query_token,
    anchor, rows_offset, block_stride, row_width,
    starts, contexts, tables, cumulated, blocks, sequences,
    sinks, scale, softcap, window,
    out, partial, partial_max, partial_sum,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of one key head's queries over one split of the keys. Softmax is in powers of two."""
    rows = anchor + rows_offset
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
    if SINKS:  # noqa: SIM102, it is known when the kernel is compiled
        if split == 0:
            highest = tl.load(sinks + query_heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
            total += 1.0
    result = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        is_key = n < end
        block = tl.load(table + n // BLOCK_TOKENS, mask=is_key, other=0)
        row = block * block_stride + n % BLOCK_TOKENS * row_width
        k = tl.load(rows + row[None, :] + head * KEY + d[:, None], mask=is_key[None, :] & (d < KEY)[:, None], other=0.0)
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
    if DECODE:  # by the number of the decode: chunks beside it have no partial results
        place = (sequence.to(tl.int64) * (HEADS * GROUP) + query_heads) * splits + split
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


@triton.jit(do_not_specialize=["starts", "splits"])
def combine_kernel(
    partial, partial_max, partial_sum, out, starts, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Put together what the splits of one decode found for one query head."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
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
    place = tl.load(starts + tl.program_id(0)) * HEADS + tl.program_id(1)
    tl.store(out + place * VALUE + v_d, result.to(out.dtype.element_ty), mask=v_d < VALUE)


@triton.jit
def rms_norm_kernel(
    x, weight, out, width, epsilon, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Norm one row."""
    start = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    row = tl.load(x + start + i, mask=i < width, other=0.0).to(tl.float32)
    scale = tl.load(weight + i, mask=i < width, other=0.0).to(tl.float32) + OFFSET
    row = row * tl.rsqrt(tl.sum(row * row, 0) / width + epsilon)
    tl.store(out + start + i, (row * scale).to(out.dtype.element_ty), mask=i < width)


@triton.jit
def rotary_kernel(
    query, query_head, query_token, key, key_head, key_token, cos, sin, out,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Turn one head of one token; query heads come first, then key heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < HEADS:
        source = query + token * query_token + head * query_head
    else:
        source = key + token * key_token + (head - HEADS) * key_head
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    kind = out.dtype.element_ty
    low = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + i, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * HALF + i
    low_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * (HEADS + KEY_HEADS) + head) * 2 * HALF + i
    tl.store(target, (low * low_cos - high * low_sin).to(kind), mask=inside)
    tl.store(target + HALF, (high * high_cos + low * high_sin).to(kind), mask=inside)


@triton.jit
def row_product_kernel(
    x, weight, bias, out, outputs, inputs, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Some outputs of a linear layer of one row: each weight is read once, by whole rows, and summed in float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rows = weight + n.to(tl.int64)[:, None] * inputs
    for k0 in range(0, inputs, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        w = tl.load(rows + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0.0)
        v = tl.load(x + k, mask=k < inputs, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < outputs)
