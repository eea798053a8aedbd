"""A manifest comes back as it was written, and an image that is not whole does not open."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from blake3 import blake3

from swapper.errors import CorruptImage
from swapper.image import FORMAT_VERSION, Image, LayerExtent, Manifest, Shard, TensorEntry

MIB = 1 << 20
GRANULES = tuple(blake3(bytes([i])).hexdigest() for i in range(5))

SHARD = Shard(
    rank=0,
    file="rank-0.safetensors",
    data_start=4096,
    nbytes=9 * MIB,
    granules=GRANULES,
    tensors=(TensorEntry("w", "BF16", (3, 2), 0, 12), TensorEntry("scale", "F32", (), 256, 4)),
    layers=(LayerExtent("layers.0", 0, 9 * MIB),),
)
MANIFEST = Manifest(
    version=FORMAT_VERSION,
    model="meta/llama",
    fingerprint="f" * 64,
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    tp=1,
    pp=1,
    context_length=8192,
    kv_bytes_per_token=23_040,
    shards=(SHARD,),
)


def write_image(directory: Path, manifest: Manifest = MANIFEST) -> Path:
    (directory / "manifest.json").write_text(manifest.to_json())
    for shard in manifest.shards:
        with (directory / shard.file).open("wb") as file:
            file.truncate(shard.data_start + shard.nbytes)
    return directory


def test_a_manifest_survives_the_way_through_json() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_an_image_opens_with_its_shards(tmp_path: Path) -> None:
    image = Image.open(write_image(tmp_path))
    assert image.manifest == MANIFEST
    assert image.shard_path(0) == tmp_path / "rank-0.safetensors"


# ---- pages


@pytest.mark.parametrize(("page", "count"), [(2 * MIB, 5), (4 * MIB, 3), (8 * MIB, 2), (32 * MIB, 1)])
def test_a_page_is_identified_by_its_granules(page: int, count: int) -> None:
    hashes = SHARD.page_hashes(page)
    assert len(hashes) == SHARD.page_count(page) == count
    assert len(set(hashes)) == count
    step = page // (2 * MIB)
    assert hashes[-1] == blake3("".join(GRANULES[(count - 1) * step :]).encode()).hexdigest()


@pytest.mark.parametrize("page", [0, -2 * MIB, MIB, 3 * MIB])
def test_a_page_size_that_cuts_granules_is_an_error(page: int) -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        SHARD.page_hashes(page)


# ---- images that are not whole


def test_a_missing_manifest_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptImage, match=r"manifest\.json cannot be read \(No such file"):
        Image.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 1}'])
def test_a_manifest_that_does_not_parse_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (write_image(tmp_path) / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptImage, match=r"manifest\.json is not a manifest"):
        Image.open(tmp_path)


def test_another_format_version_is_refused_with_the_cure() -> None:
    text = json.dumps({**json.loads(MANIFEST.to_json()), "version": FORMAT_VERSION + 1})
    with pytest.raises(CorruptImage, match=rf"version {FORMAT_VERSION + 1}.*Add the model again"):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [{"granules": GRANULES[:-1]}, {"nbytes": 9 * MIB + 1}, {"data_start": 8}, {"file": "../rank-0"}, {"rank": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_shard_whose_parts_do_not_fit_together_is_corrupt(changes: dict[str, object]) -> None:
    broken = dataclasses.replace(MANIFEST, shards=(dataclasses.replace(SHARD, **changes),))
    with pytest.raises(CorruptImage, match="is not a manifest"):
        Manifest.from_json(broken.to_json())


def test_a_mesh_needs_a_shard_for_each_rank() -> None:
    with pytest.raises(CorruptImage, match="1 shards for a mesh of 2 × 1"):
        Manifest.from_json(dataclasses.replace(MANIFEST, tp=2).to_json())


def test_a_shard_file_shorter_than_packed_is_corrupt(tmp_path: Path) -> None:
    with (write_image(tmp_path) / "rank-0.safetensors").open("r+b") as file:
        file.truncate(4096 + 9 * MIB - 1)
    with pytest.raises(CorruptImage, match=r"rank-0\.safetensors has 9,441,279 bytes of the 9,441,280"):
        Image.open(tmp_path)


def test_a_missing_shard_file_is_corrupt(tmp_path: Path) -> None:
    (write_image(tmp_path) / "rank-0.safetensors").unlink()
    with pytest.raises(CorruptImage, match=r"rank-0\.safetensors cannot be read"):
        Image.open(tmp_path)
