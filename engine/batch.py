"""One forward pass of one model: which tokens, of which sequences, over which KV blocks.

Tokens of all sequences are packed into one row, sequence after sequence, prefill chunks and decodes alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a pass: packed tokens `[start, start + length)`.

    They are tokens `[context - length, context)` of the sequence; keys and values of all `context` tokens are in
    `blocks` once the pass has written its own (block `i` holds tokens `[16 i, 16 i + 16)`).
    """

    start: int
    length: int
    context: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A packed forward pass. `sampled` are the packed rows whose logits are wanted, in the order of the result.

    `in_one` says that it may run as one piece, without a wait between layers: on a mesh, everything is in on all ranks.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slices: tuple[SequenceSlice, ...]
    sampled: tuple[int, ...]
    in_one: bool = True
