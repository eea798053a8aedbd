"""A small checkpoint and its plan, made by hand: what the packer's and the store's tests pack."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from swapper.checkpoint import Checkpoint
from swapper.packer import PackPlan, PlannedTensor

LAYERS = 4
LAYER_SHAPE = (700, 1000)  # 2.8 MB in float32: more than a granule, and no multiple of one


def small_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {"embed.weight": torch.randn(100, 33, generator=generator)}
    for layer in range(LAYERS):
        tensors[f"layers.{layer}.weight"] = torch.randn(*LAYER_SHAPE, generator=generator)
        tensors[f"layers.{layer}.bias"] = torch.randn(7, generator=generator)
    tensors["norm.weight"] = torch.randn(33, generator=generator)
    return tensors


def write_checkpoint(
    directory: Path, tensors: dict[str, torch.Tensor] | None = None, config: dict[str, object] | None = None
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    save_file(small_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def plan_for(checkpoint: Checkpoint, dtype: str = "float32") -> PackPlan:
    """Every tensor as it is, on one rank; the layer is the name without its last part."""
    names = sorted(checkpoint.names, key=lambda name: (name != "embed.weight", name == "norm.weight"))
    rank = tuple(
        PlannedTensor(
            name=name,
            dtype=dtype,
            shape=checkpoint.shape(name),
            layer=name.rpartition(".")[0],
            sources=(name,),
            build=lambda source, name=name: source.tensor(name),
        )
        for name in names
    )
    return PackPlan("LlamaForCausalLM", dtype, 1, 1, 128, 64, (rank,))
