"""The bytes that loaders are measured on: a model of Llama 8B's shape in bf16, random, as one safetensors file.

The file is a shard as the packer writes it (data from a 4,096-byte offset on, in execution order), so gswapd and every
other loader read the very same file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from blake3 import blake3

from swapper import libc
from swapper.geometry import GRANULE_BYTES
from swapper.header import encode_header, read_header, tensor_nbytes
from swapper.image import Shard, TensorEntry

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 32, 8, 128256
FILE = "model.safetensors"
WRITERS = 16
PIECE = 128 << 20

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    width = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (width, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (width, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_model(directory: Path) -> Path:
    """Write the model; returns its file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    entries, offset = [], 0
    for name, shape in _shapes():
        entries.append(TensorEntry(name, "BF16", shape, offset, tensor_nbytes("BF16", shape)))
        offset += entries[-1].nbytes
    header = encode_header(entries)
    path = directory / FILE
    path.write_bytes(header)
    os.truncate(path, len(header) + offset)
    fd = os.open(path, os.O_RDWR)

    def write(start: int) -> None:
        count = min(PIECE, offset - start)
        generator = torch.Generator("cuda").manual_seed(start)
        values = torch.randn(count // 2, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        data = memoryview(values.view(torch.uint8).cpu().numpy())
        os.pwrite(fd, data, len(header) + start)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, range(0, offset, PIECE)))
    os.close(fd)
    torch.cuda.empty_cache()
    return path


def shard_of(path: Path) -> Shard:
    """What a manifest would say of the file."""
    header = read_header(path)
    nbytes = header.file_bytes - header.data_start
    fd = os.open(path, os.O_RDONLY)
    base = libc.mmap(0, header.file_bytes, libc.PROT_READ, libc.MAP_SHARED, fd)
    os.close(fd)

    def digest(start: int) -> str:
        return blake3(libc.view(base + header.data_start + start, min(GRANULE_BYTES, nbytes - start))).hexdigest()

    with ThreadPoolExecutor(WRITERS) as threads:
        granules = tuple(threads.map(digest, range(0, nbytes, GRANULE_BYTES)))
    libc.munmap(base, header.file_bytes)
    return Shard(0, path.name, header.data_start, nbytes, granules, header.tensors, ())


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """A digest of the bytes of tensors on a GPU, which every loader must agree on: position counts."""
    step = 64 << 20
    weights = torch.arange(step, device="cuda").remainder_(65521).add_(1)
    digest = blake3()
    for name in sorted(tensors):
        words = tensors[name].reshape(-1).view(torch.int32)
        total = sum(
            (words[start : start + step].to(torch.int64) * weights[: len(words[start : start + step])]).sum()
            for start in range(0, len(words), step)
        )
        digest.update(f"{name} {int(total)}\n".encode())
    return digest.hexdigest()
