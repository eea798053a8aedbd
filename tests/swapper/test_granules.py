"""Granule hashes do not depend on how the data was cut into pieces."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3

from swapper.geometry import GRANULE_BYTES
from swapper.granules import GranuleHasher


@pytest.mark.parametrize("extra", [0, 1, 4096])
def test_any_cut_gives_the_hashes_of_the_granules(extra: int) -> None:
    chance = random.Random(extra)
    data = memoryview(chance.randbytes(2 * GRANULE_BYTES + extra))
    expected = tuple(blake3(data[i : i + GRANULE_BYTES]).hexdigest() for i in range(0, len(data), GRANULE_BYTES))
    for largest in (len(data), GRANULE_BYTES, 300_000):
        hasher = GranuleHasher()
        start = 0
        while start < len(data):
            end = start + chance.randint(1, largest)
            hasher.update(data[start:end])
            start = end
        assert hasher.finish() == expected


def test_no_data_has_no_granules() -> None:
    assert GranuleHasher().finish() == ()
