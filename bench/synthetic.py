"""Models of a real one's shape with random weights: in GPU memory, or as images in a store.

They are bound and served like any other; only their bytes come from a random number generator. An image is written page
by page, each of a seed of its own, so that siblings that have some pages in common are made by having some seeds in
common. Its tokens are words (" t17"), so that texts and tokens tell the same.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from engine.architecture import DTYPES, build, read_config, trace
from engine.kv_cache import KvLayout
from engine.model import BoundModel
from engine.plan import pack_plan
from engine.views import region_bytes, view
from swapper import libc
from swapper.checkpoint import Checkpoint
from swapper.frames import FramePool, Region
from swapper.geometry import GRANULE_BYTES
from swapper.header import SAFETENSORS_WORDS, TORCH_WORDS, encode_header, tensor_nbytes
from swapper.image import FORMAT_VERSION, MANIFEST, Image, Manifest, Shard, TensorEntry
from swapper.layout import Layout, lay_out
from swapper.store import Store

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

SMALL_LLAMA = {
    **LLAMA_8B,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A shape of the same kind: 30 MB in float32, to try benches out."""

OPT_13B = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 5120,
    "word_embed_proj_dim": 5120,
    "ffn_dim": 20480,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""The shape of OPT-13B: 25.7 GB in bfloat16."""

BLOCK_STEP, BLOCK_STEPS = 4096, 8192
MOST_IMAGES = 4
"""Images that have no page in common, if each has at most `BLOCK_STEPS / MOST_IMAGES` of them."""


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


def describe(config: dict[str, object], dtype: str, name: str, directory: Path) -> tuple[Layout, Manifest]:
    """Where a model's tensors lie, and its manifest but for the shard. `directory` gets its configuration."""
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
        shards=(),
    )
    return layout, manifest


def make_model(config: dict[str, object], dtype: str, name: str, pool: FramePool, directory: Path) -> BoundModel:
    """Fill frames of the pool with random weights and bind the model to them. `directory` gets its configuration."""
    layout, manifest = describe(config, dtype, name, directory)
    shard = Shard(0, "none", 0, layout.nbytes, (), layout.tensors, layout.layers)
    resident = ResidentShard(pool, shard)
    data = region_bytes(resident.region)
    for entry in shard.tensors:
        weight = view(data, entry.offset, getattr(torch, TORCH_WORDS[entry.dtype]), entry.shape)
        weight.fill_(1) if len(entry.shape) == 1 else weight.normal_(0, 0.02)
    torch.cuda.synchronize()
    return BoundModel.bind(Image(directory, replace(manifest, shards=(shard,)), identity=name), resident)


def make_image(
    store: Store, name: str, config: dict[str, object], dtype: str, seed_of: Callable[[int], int], page_bytes: int
) -> Image:
    """Publish a model of random weights; page `i` is made of `seed_of(i)`. On a GPU, if there is one."""
    with store.adding(name) as directory:
        layout, manifest = describe(config, dtype, name, directory)
        _write_tokenizer(directory, int(str(config["vocab_size"])))
        shard = write_shard(
            directory, 0, layout, dtype, lambda page, n: _random_bytes(seed_of(page), n, DTYPES[dtype]), page_bytes
        )
        (directory / MANIFEST).write_text(replace(manifest, shards=(shard,)).to_json())
    return store.open(name)


def make_mesh_image(
    store: Store, name: str, config: dict[str, object], dtype: str, tp: int, pp: int, seed: int, page_bytes: int
) -> Image:
    """Publish a model of random weights, cut for a mesh. What ranks should have in common differs: so do answers.

    Pages are pieces of one block of random numbers, no two the same: large models are made at the speed of memory.
    """
    assert page_bytes % BLOCK_STEP == 0
    block = _random_bytes(0, page_bytes + BLOCK_STEPS * BLOCK_STEP, DTYPES[dtype])
    taken = itertools.count(seed * BLOCK_STEPS // MOST_IMAGES)

    def piece(page: int, nbytes: int) -> memoryview:
        start = next(taken) % BLOCK_STEPS * BLOCK_STEP
        return block[start : start + nbytes]

    with store.adding(name) as directory:
        (directory / "config.json").write_text(json.dumps(config))
        _write_tokenizer(directory, int(str(config["vocab_size"])))
        with tempfile.TemporaryDirectory() as checkpoint:
            plan = pack_plan(_hollow_checkpoint(Path(checkpoint), config, dtype), dtype, tp, pp)
        shards = []
        for rank, tensors in enumerate(plan.ranks):
            layout = lay_out((its.name, SAFETENSORS_WORDS[its.dtype], its.shape, its.layer) for its in tensors)
            shards.append(write_shard(directory, rank, layout, dtype, piece, page_bytes))
        manifest = Manifest(
            version=FORMAT_VERSION,
            model=name,
            fingerprint=str(seed),
            architecture=plan.architecture,
            dtype=dtype,
            tp=tp,
            pp=pp,
            context_length=plan.context_length,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            shards=tuple(shards),
        )
        (directory / MANIFEST).write_text(manifest.to_json())
    return store.open(name)


def _hollow_checkpoint(directory: Path, config: dict[str, object], dtype: str) -> Checkpoint:
    """A checkpoint with all tensors and no numbers: its file is one hole."""
    (directory / "config.json").write_text(json.dumps(config))
    module = build(read_config(directory), DTYPES[dtype])
    entries, offset = [], 0
    for name, weight in module.named_parameters():  # a tied one once
        shape = tuple(weight.shape)
        nbytes = tensor_nbytes(SAFETENSORS_WORDS[dtype], shape)
        entries.append(TensorEntry(name, SAFETENSORS_WORDS[dtype], shape, offset, nbytes))
        offset += nbytes
    header = encode_header(entries)
    path = directory / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + offset)
    return Checkpoint(directory)


def write_shard(
    directory: Path, rank: int, layout: Layout, dtype: str, data: Callable[[int, int], memoryview], page_bytes: int
) -> Shard:
    """Write a rank's file; `data(i, nbytes)` is page `i`."""
    header = encode_header(layout.file_tensors)
    path = directory / f"rank-{rank}.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + layout.nbytes)
    fd = os.open(path, os.O_RDWR)
    base = libc.mmap(0, len(header) + layout.nbytes, libc.PROT_READ, libc.MAP_SHARED, fd)

    def write(start: int) -> None:
        nbytes = min(page_bytes, layout.nbytes - start)
        os.pwrite(fd, data(start // page_bytes, nbytes), len(header) + start)

    def digest(start: int) -> str:
        nbytes = min(GRANULE_BYTES, layout.nbytes - start)
        return blake3(libc.view(base + len(header) + start, nbytes)).hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(write, range(0, layout.nbytes, page_bytes)))
        for entry in layout.tensors:
            if len(entry.shape) == 1:  # of norms
                ones = torch.ones(entry.shape, dtype=DTYPES[dtype]).view(torch.uint8).numpy()
                os.pwrite(fd, memoryview(ones), len(header) + entry.offset)
        granules = tuple(threads.map(digest, range(0, layout.nbytes, GRANULE_BYTES)))
    libc.munmap(base, len(header) + layout.nbytes)
    os.close(fd)
    return Shard(rank, path.name, len(header), layout.nbytes, granules, layout.tensors, layout.layers)


def _random_bytes(seed: int, nbytes: int, dtype: torch.dtype) -> memoryview:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(nbytes // dtype.itemsize, generator=generator, device=device, dtype=dtype).mul_(0.02)
    return memoryview(values.view(torch.uint8).cpu().numpy())


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    words = {f"\u0120t{number}": number for number in range(vocabulary)}  # how byte-level tokenizers write a space
    tokenizer = Tokenizer(WordLevel(words, unk_token="\u0120t0"))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
