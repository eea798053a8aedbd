"""A model of a real one's shape with random weights, made in GPU memory: nothing is written to a disk.

It is bound and served like any other; only its bytes come from a random number generator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from engine.architecture import DTYPES, build, read_config, trace
from engine.kv_cache import KvLayout
from engine.model import BoundModel
from engine.views import region_bytes, view
from swapper.frames import FramePool, Region
from swapper.header import SAFETENSORS_WORDS, TORCH_WORDS
from swapper.image import FORMAT_VERSION, Image, Manifest, Shard
from swapper.layout import lay_out

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shape of an 8B Llama: 16.06 GB in bfloat16."""


class ResidentShard:
    """A shard over mapped frames of a pool, all of it in."""

    def __init__(self, pool: FramePool, shard: Shard) -> None:
        self.shard = shard
        self.region: Region = pool.reserve(shard.nbytes)
        for page in range(shard.page_count(pool.page_bytes)):
            pool.map(self.region, page, pool.take())

    def is_ready(self, nbytes: int) -> bool:
        return True

    def wait(self, nbytes: int, given_up: Callable[[], bool] | None = None) -> None:
        """Nothing has to be waited for."""

    def wake(self) -> None:
        """Nobody waits."""


def make_model(config: dict[str, object], dtype: str, name: str, pool: FramePool, directory: Path) -> BoundModel:
    """Fill frames of the pool with random weights and bind the model to them. `directory` gets its configuration."""
    (directory / "config.json").write_text(json.dumps(config))
    parsed = read_config(directory)
    module = build(parsed, DTYPES[dtype])
    architecture = trace(module)
    state = module.state_dict(keep_vars=True)
    layout = lay_out(
        (tensor, SAFETENSORS_WORDS[dtype], tuple(state[tensor].shape), unit.path)
        for unit in architecture.units
        for tensor in unit.tensors
    )
    shard = Shard(0, "none", 0, layout.nbytes, (), layout.tensors, layout.layers)
    manifest = Manifest(
        version=FORMAT_VERSION,
        model=name,
        fingerprint="",
        architecture=type(module).__name__,
        dtype=dtype,
        tp=1,
        pp=1,
        context_length=parsed.max_position_embeddings,
        kv_bytes_per_token=KvLayout(architecture.kv, DTYPES[dtype]).bytes_per_token,
        shards=(shard,),
    )
    resident = ResidentShard(pool, shard)
    data = region_bytes(resident.region)
    for entry in shard.tensors:
        weight = view(data, entry.offset, getattr(torch, TORCH_WORDS[entry.dtype]), entry.shape)
        weight.fill_(1) if len(entry.shape) == 1 else weight.normal_(0, 0.02)
    torch.cuda.synchronize()
    return BoundModel.bind(Image(directory, manifest, identity=name), resident)
