"""Verification finds the granules that are not what was packed, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.checkpoint import Checkpoint
from swapper.geometry import GRANULE_BYTES
from swapper.image import Image
from swapper.packer import pack
from swapper.verify import verify
from tests.swapper.small_checkpoint import plan_for, write_checkpoint


@pytest.fixture
def image(tmp_path: Path) -> Image:
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "source"))
    pack(plan_for(checkpoint), checkpoint, "model", tmp_path)
    return Image.open(tmp_path)


def flip(image: Image, offset: int) -> None:
    """Change one byte of the data."""
    with image.shard_path(0).open("r+b") as file:
        file.seek(image.manifest.shards[0].data_start + offset)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_whole_image_has_no_bad_granule_and_all_of_it_was_read(image: Image) -> None:
    calls: list[tuple[int, int]] = []
    assert verify(image, lambda done, total: calls.append((done, total))) == ()
    assert calls[-1] == (image.manifest.shards[0].nbytes, image.manifest.shards[0].nbytes)


def test_one_flipped_bit_is_found_where_it_is(image: Image) -> None:
    nbytes = image.manifest.shards[0].nbytes
    flip(image, GRANULE_BYTES)
    flip(image, nbytes - 1)
    first, last = verify(image)
    assert (first.rank, first.start, first.end) == (0, GRANULE_BYTES, 2 * GRANULE_BYTES)
    assert first.file == image.shard_path(0)
    assert "another hash" in first.reason
    assert last.end == nbytes
    assert str(first) == f"{image.shard_path(0)}: data bytes 2,097,152 to 4,194,304: the bytes have another hash"


def test_a_file_cut_after_it_was_opened_is_bad_from_there_on(image: Image) -> None:
    shard = image.manifest.shards[0]
    with image.shard_path(0).open("r+b") as file:
        file.truncate(shard.data_start + 3 * GRANULE_BYTES + 1)
    bad = verify(image)
    assert [granule.start for granule in bad] == list(range(3 * GRANULE_BYTES, shard.nbytes, GRANULE_BYTES))
    assert {granule.reason for granule in bad} == {"the file is too short"}


def test_a_file_that_is_gone_is_bad_everywhere(image: Image) -> None:
    image.shard_path(0).unlink()
    bad = verify(image)
    assert len(bad) == len(image.manifest.shards[0].granules)
    assert {granule.reason for granule in bad} == {"No such file or directory"}
