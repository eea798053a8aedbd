"""A checkpoint reads what safetensors wrote, and says in a sentence what is wrong with a directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swapper.checkpoint import Checkpoint
from swapper.errors import SourceError
from tests.swapper.small_checkpoint import small_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def write_sharded(directory: Path, with_index: bool = True) -> Path:
    """The small checkpoint in two numbered files."""
    write_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    names = sorted(small_tensors())
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: small_tensors()[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if with_index:
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(SourceError) as caught:
        Checkpoint(directory)
    return str(caught.value)


# ---- reading


def test_tensors_are_what_was_saved(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    assert checkpoint.names == tuple(sorted(small_tensors()))
    for name, expected in small_tensors().items():
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert checkpoint.dtype(name) == expected.dtype
        assert checkpoint.nbytes(name) == expected.nbytes
        assert torch.equal(checkpoint.tensor(name), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([[-(2**40)]]),
        torch.tensor([1.5, -2.0], dtype=torch.float16),
    ],
    ids=["scalar", "empty", "bool", "int64", "float16"],
)
def test_every_shape_and_dtype_is_read_exactly(tmp_path: Path, tensor: torch.Tensor) -> None:
    read = Checkpoint(write_checkpoint(tmp_path, {"odd": tensor})).tensor("odd")
    assert read.dtype == tensor.dtype
    assert read.shape == tensor.shape
    assert torch.equal(read, tensor)


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_checkpoints_are_read_with_and_without_an_index(tmp_path: Path, with_index: bool) -> None:
    checkpoint = Checkpoint(write_sharded(tmp_path, with_index))
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in small_tensors().items())


def test_other_safetensors_beside_the_index_are_left_alone(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path)
    save_file({"tok_embeddings.weight": torch.zeros(3)}, directory / "consolidated.safetensors")
    assert "tok_embeddings.weight" not in Checkpoint(directory).names


def test_a_directory_of_links_is_read_like_one_of_files(tmp_path: Path, directory: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in directory.iterdir():
        (linked / file.name).symlink_to(file)
    assert torch.equal(Checkpoint(linked).tensor("norm.weight"), small_tensors()["norm.weight"])


def test_an_unknown_tensor_is_an_error_that_names_it(directory: Path) -> None:
    with pytest.raises(SourceError, match=r"no tensor named lm_head\.weight"):
        Checkpoint(directory).tensor("lm_head.weight")


def test_a_file_that_shrinks_after_opening_is_an_error(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(SourceError, match="changed while it was being read"):
        checkpoint.tensor("layers.3.weight")


# ---- the fingerprint


def test_the_fingerprint_outlives_a_move_and_changes_with_names_sizes_and_headers(directory: Path) -> None:
    first = Checkpoint(directory).fingerprint()
    moved = directory.rename(directory.with_name("moved"))
    assert Checkpoint(moved).fingerprint() == first
    (moved / "model.safetensors").rename(moved / "other.safetensors")
    assert Checkpoint(moved).fingerprint() != first

    tensors = small_tensors()
    tensors["norm.weight"] = tensors["norm.weight"].reshape(3, 11)
    assert Checkpoint(write_checkpoint(directory, tensors)).fingerprint() != first


# ---- refusals: the cause and the cure


def test_a_path_that_is_not_there_is_refused_with_the_way_to_fetch_one(tmp_path: Path) -> None:
    message = refusal(tmp_path / "meta-llama" / "Llama-3.2-1B")
    assert "does not exist" in message
    assert "hf download" in message


def test_a_file_is_refused(directory: Path) -> None:
    assert "is not a directory" in refusal(directory / "config.json")


def test_a_missing_config_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "config.json cannot be read: No such file" in refusal(directory)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text, encoding="latin-1")
    assert "config.json is not" in refusal(directory)


def test_a_directory_without_weights_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_files_are_refused_unread(directory: Path, name: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / name).symlink_to("/nonexistent")  # opening it would fail otherwise
    message = refusal(directory)
    assert "pickle" in message
    assert name in message
    assert "save_pretrained" in message


def test_pickle_files_beside_safetensors_do_no_harm(directory: Path) -> None:
    (directory / "pytorch_model.bin").symlink_to("/nonexistent")
    assert Checkpoint(directory).names


def test_gguf_is_refused_as_directory_and_as_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refusal(tmp_path)
    assert "GGUF" in refusal(tmp_path / "model.gguf")


def test_lora_adapters_are_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    message = refusal(directory)
    assert "LoRA adapter" in message
    assert "merge_and_unload" in message


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_checkpoints_are_refused_by_method(directory: Path, nested: bool) -> None:
    config: dict[str, object] = {"quantization_config": {"quant_method": "gptq"}}
    write_checkpoint(directory, config={"text_config": config} if nested else config)
    assert "quantised (gptq)" in refusal(directory)


def test_dtypes_of_quantisation_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"w": torch.zeros(4, dtype=torch.float8_e4m3fn)})
    assert "Tensor w of" in refusal(tmp_path)
    assert "F8_E4M3" in refusal(tmp_path)


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shards_are_refused_by_name(tmp_path: Path, with_index: bool) -> None:
    directory = write_sharded(tmp_path, with_index)
    (directory / "model-00002-of-00002.safetensors").unlink()
    message = refusal(directory)
    assert "lacks 1 of its 2 weight files: model-00002-of-00002.safetensors" in message
    assert "incomplete" in message


def test_an_index_alone_is_an_incomplete_download(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    assert "lacks 2 of its 2" in refusal(directory)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"w": "../other.safetensors"}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    directory = write_sharded(tmp_path)
    (directory / INDEX).write_text(index)
    assert INDEX in refusal(directory)


def test_an_index_that_names_tensors_no_file_holds_is_refused(tmp_path: Path) -> None:
    directory = write_sharded(tmp_path)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    assert "ghost" in refusal(directory)


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    assert "in two files" in refusal(directory)


def test_a_truncated_file_is_refused_with_both_sizes(directory: Path) -> None:
    file = directory / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1)
    message = refusal(directory)
    assert "truncated" in message
    assert f"{size:,}" in message
    assert f"{size - 1:,}" in message


def header_of(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(64)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "does not begin with a safetensors header"),
        (b"\x10\0\0", "does not begin with a safetensors header"),
        (b"<html>Not found</html>", "does not begin with a safetensors header"),
        ((1000).to_bytes(8, "little") + b"{", "truncated inside its header"),
        (header_of("{]"), "does not parse"),
        (header_of("[]"), "does not parse"),
        (header_of('{"w": {"dtype": "F32", "shape": [4]}}'), "does not parse"),
        (header_of('{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}'), "cannot hold F32 [4]"),
        (header_of('{"w": {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}}'), "cannot hold"),
        (header_of('{"w": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}'), "cannot hold"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
    ],
    ids=["empty", "stub", "html", "cut", "json", "array", "offsets", "size", "negative", "before", "lfs"],
)
def test_a_corrupt_header_is_refused(directory: Path, content: bytes, says: str) -> None:
    (directory / "model.safetensors").write_bytes(content)
    message = refusal(directory)
    assert says in message
    assert "model.safetensors" in message
