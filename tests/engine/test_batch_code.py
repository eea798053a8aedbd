"""Batches cross the plan channel as they are, and block tables only as far as they have grown."""

from __future__ import annotations

import orjson

from engine.batch import SequenceSlice, StepBatch
from engine.batch_code import BatchDecoder, BatchEncoder


def batch(*tables: tuple[int, ...]) -> StepBatch:
    """One decode for each block table."""
    count = len(tables)
    slices = tuple(SequenceSlice(index, 1, 16 * len(table), table) for index, table in enumerate(tables))
    return StepBatch(tuple(range(7, 7 + count)), (3,) * count, slices, tuple(range(count)), in_one=bool(count % 2))


def test_batches_arrive_as_they_were() -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    steps = [
        batch((5, 1), (2, 8, 9)),
        batch((5, 1), (2, 8, 9), (4,)),  # the same and a new one
        batch((5, 1, 6), (2, 8, 9, 3)),  # grown
        batch((5, 7), (2,)),  # a preempted sequence's blocks are another's; shorter than before
        batch((5, 7, 8), (2, 8)),
        batch(()),
        batch(),
    ]
    for step in steps:
        assert decoder.decode(orjson.loads(orjson.dumps(encoder.encode(step)))) == step


def test_tables_are_not_sent_twice() -> None:
    encoder = BatchEncoder()
    table = tuple(range(2000))
    first = len(orjson.dumps(encoder.encode(batch(table))))
    again = len(orjson.dumps(encoder.encode(batch(table))))
    grown = len(orjson.dumps(encoder.encode(batch((*table, 2000)))))
    assert again < grown < 100 < first
