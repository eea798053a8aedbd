"""Sizes that several rooms must agree on, in one place: granules, pages, KV blocks."""

GRANULE_BYTES = 2 << 20
"""Bytes covered by one hash of a manifest; every page size is a multiple of it."""

DATA_ALIGNMENT = 4096
"""A shard's data starts at a multiple of this in its file, and is a multiple of it long (O_DIRECT's rule)."""

DEFAULT_PAGE_BYTES = 32 << 20

KV_BLOCK_TOKENS = 16
"""Tokens whose keys and values, of all layers, lie side by side in a KV region."""


def pages(nbytes: int, page_bytes: int) -> int:
    """Pages that `nbytes` occupy."""
    return -(-nbytes // page_bytes)


def kv_blocks(tokens: int) -> int:
    """KV blocks that a sequence of `tokens` tokens occupies."""
    return -(-tokens // KV_BLOCK_TOKENS)


def kv_frames(tokens: int, kv_bytes_per_token: int, page_bytes: int) -> int:
    """Frames of a KV region that hold one sequence of `tokens` tokens."""
    return pages(kv_blocks(tokens) * KV_BLOCK_TOKENS * kv_bytes_per_token, page_bytes)


def kv_capacity_blocks(frames: int, kv_bytes_per_token: int, page_bytes: int) -> int:
    """Whole KV blocks in the first `frames` frames of a KV region (a block may straddle two frames)."""
    return frames * page_bytes // (KV_BLOCK_TOKENS * kv_bytes_per_token)
