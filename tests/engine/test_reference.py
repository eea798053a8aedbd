"""Whole weights out of a mesh's parts, and the same model with weights of another type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.plan import pack_plan
from engine.reference import recast, score, whole_weights
from swapper.checkpoint import Checkpoint
from swapper.image import Image
from swapper.packer import pack
from swapper.store import Store
from tests.models import make_checkpoint, make_tokenizer, random_model


def images(tmp_path: Path, architecture: str, *meshes: tuple[int, int], dtype: str | None = None) -> list[Image]:
    checkpoint = Checkpoint(make_tokenizer(make_checkpoint(tmp_path / "checkpoint", architecture)))
    found = []
    for tp, pp in meshes:
        directory = tmp_path / f"{tp}x{pp}"
        directory.mkdir()
        pack(pack_plan(checkpoint, dtype, tp, pp), checkpoint, "m", directory)
        found.append(Image.open(directory))
    return found


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2", "opt", "mixtral", "deepseek_v3"])
def test_parts_of_a_mesh_make_up_what_was_cut(tmp_path: Path, architecture: str) -> None:
    alone, *meshes = images(tmp_path, architecture, (1, 1), (4, 1), (2, 2))
    whole = whole_weights(alone)
    for mesh in meshes:
        together = whole_weights(mesh)
        assert whole.keys() <= together.keys()  # a tied tensor may have two names, on two stages
        assert all(torch.equal(together[name], tensor) for name, tensor in whole.items())


def test_scores_of_a_mesh_are_transformers_own(tmp_path: Path) -> None:
    (mesh,) = images(tmp_path, "llama", (2, 2))
    tokens = list(range(5, 60, 3))
    with torch.no_grad():
        logits = random_model("llama")(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    logprobs, likeliest = score(mesh, tokens)
    assert likeliest == logits[:-1].argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_a_model_is_recast_with_all_it_needs_to_be_served(tmp_path: Path, mesh: tuple[int, int]) -> None:
    (image,) = images(tmp_path, "llama", mesh, dtype="bfloat16")
    other = recast(image, "float32", Store(tmp_path / "other"), tmp_path / "scratch")
    assert (other.manifest.dtype, other.manifest.tp, other.manifest.pp) == ("float32", *mesh)
    assert {path.name for path in other.path.iterdir()} == {path.name for path in image.path.iterdir()}
    before, after = whole_weights(image), whole_weights(other)
    assert all(torch.equal(after[name], tensor.float()) for name, tensor in before.items())
