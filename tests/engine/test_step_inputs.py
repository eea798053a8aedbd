"""The numbers of a batch of decodes, in the row that graphs read."""

from __future__ import annotations

import torch

from engine.batch import SequenceSlice, StepBatch
from engine.step_inputs import DecodeStaging, decode_row

CPU = torch.device("cpu")


def decode(token: int, block: int) -> StepBatch:
    """One sequence's second token, whose first block of keys and values is this one."""
    return StepBatch((token,), (1,), (SequenceSlice(0, 1, 2, (block,)),), (0,))


def test_models_share_the_row_and_a_copy_of_it_stays_what_it_was() -> None:
    row = decode_row(CPU, 16)
    one, other = DecodeStaging(row), DecodeStaging(row)
    one.copy(decode(7, block=3), 1)
    seen, kept = one.tensors(1), one.tensors(1, in_copy=True)
    other.copy(decode(9, block=5), 1)
    assert seen.tokens.tolist() == [[9]]
    assert kept.tokens.tolist() == [[7]]
    assert kept.blocks[0] == 3
    one.copy(decode(8, block=3), 1)
    assert seen.tokens.tolist() == [[8]]
    assert seen.blocks[0] == 3, "what the other has put there is written over"


def test_tables_that_grow_are_written_anew() -> None:
    staging = DecodeStaging(decode_row(CPU, 64))
    for blocks in (tuple(range(1, 5)), tuple(range(1, 6)), tuple(range(1, 40))):
        staging.copy(StepBatch((1,), (0,), (SequenceSlice(0, 1, 1, blocks),), (0,)), 2)
        assert tuple(staging.tensors(2).blocks[: len(blocks)].tolist()) == blocks
        assert staging.tensors(2).slots.tolist()[1] == -1, "padding writes nowhere"
