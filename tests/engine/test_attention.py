"""Paged attention: chunked prefills and decodes in mixed batches give the logits of transformers' eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch import SequenceSlice
from engine.groups import make_groups
from engine.kv_cache import KvLayerShape, KvLayout, PagedKvCache
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS, pages
from swapper.host_frames import HostFramePool
from tests.engine.memory import Sequences, bind, pack_image
from tests.models import SUPPORTED, VOCABULARY, make_checkpoint, random_model

TOLERANCE = 1e-4

CHUNKS_AND_DECODES = ({0: 19, 1: 5}, {0: 1, 1: 16, 2: 3}, {3: 30, 2: 1, 0: 1, 1: 1}, {0: 29, 1: 15, 2: 17})
"""New tokens of each sequence, pass by pass: chunks beside decodes, sequences that join late, in changing order."""


def random_prompts(*lengths: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def eager_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]


def largest_difference(model: PreTrainedModel, sequences: Sequences) -> float:
    return max(
        float((sequences.result(index) - eager_logits(model, prompt)).abs().max())
        for index, prompt in enumerate(sequences.prompts)
    )


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_mixed_batches_give_the_logits_of_eager_attention(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path / "checkpoint", architecture)
    model, _shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"))
    sequences = Sequences(model, random_prompts(50, 37, 21, 30))
    for lengths in CHUNKS_AND_DECODES:
        sequences.step(lengths)
    assert largest_difference(random_model(architecture), sequences) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "mistral", "deepseek_v3"])
def test_attention_step_by_step_gives_the_same_without_any_kernel(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "checkpoint", architecture)
    model, _shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"), plain=True)
    monkeypatch.delattr("engine.attention.scaled_dot_product_attention")
    sequences = Sequences(model, random_prompts(50, 37, 21, 30))
    for lengths in CHUNKS_AND_DECODES:
        sequences.step(lengths)
    assert largest_difference(random_model(architecture), sequences) < TOLERANCE


def test_a_real_model_gives_the_logits_of_eager_attention(smollm2: Path, tmp_path: Path) -> None:
    model, _shard = bind(pack_image(smollm2, tmp_path / "image", "float32"))
    sequences = Sequences(model, random_prompts(40, 25, vocabulary=40000))
    for lengths in ({0: 33}, {0: 1, 1: 20}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 3, 0: 4}):
        sequences.step(lengths)
    eager = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")
    assert largest_difference(eager, sequences) < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_contexts_of_very_different_lengths_in_one_pass(tmp_path: Path, architecture: str) -> None:
    """They are attended to in several groups: long and short contexts, long and short chunks, and decodes."""
    config = {"max_position_embeddings": 1024}
    make_checkpoint(tmp_path / "checkpoint", architecture, **config)
    model, _shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"))
    sequences = Sequences(model, random_prompts(601, 331, 22, 10, 7), blocks=100)
    sequences.step({0: 600})
    sequences.step({1: 330, 2: 20, 3: 9})
    sequences.step({2: 1, 0: 1, 4: 7, 1: 1, 3: 1})
    sequences.step({2: 1})
    assert largest_difference(random_model(architecture, **config), sequences) < 4 * TOLERANCE


def test_only_blocks_of_the_batch_are_touched(tmp_path: Path) -> None:
    """All other blocks fault: their pages have no frame. Blocks straddle pages."""
    make_checkpoint(tmp_path / "checkpoint", "llama")
    model, _shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"))
    block_bytes = KV_BLOCK_TOKENS * model.kv_bytes_per_token
    pool = HostFramePool(16, 4096)
    region = pool.reserve(256 * block_bytes)
    sequences = Sequences(model, random_prompts(40, 18))
    sequences.use(model.kv_cache(region), free=[200, 17, 40, 3, 99])
    mapped = {
        page
        for block in (3, 17, 40, 99, 200)
        for page in range(block * block_bytes // 4096, pages((block + 1) * block_bytes, 4096))
    }
    for page in mapped:
        pool.map(region, page, pool.take())
    for lengths in ({0: 30, 1: 17}, {0: 1, 1: 1}, {0: 9}):
        sequences.step(lengths)
    assert largest_difference(random_model("llama"), sequences) < TOLERANCE


def cache_of(blocks: int, layers: dict[int, KvLayerShape]) -> tuple[PagedKvCache, torch.Tensor]:
    layout = KvLayout(layers, torch.float32)
    memory = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8)
    return PagedKvCache(Region(memory.data_ptr(), memory.numel(), "cpu"), layout), memory


def test_a_block_holds_all_layers_of_its_tokens_and_nothing_else(tmp_path: Path) -> None:
    """Layers of different widths share blocks; writing one layer's rows of one block changes no other bytes."""
    shapes = {0: KvLayerShape(2, 8, 8), 1: KvLayerShape(1, 24, 8), 5: KvLayerShape(4, 6, 2)}
    cache, memory = cache_of(4, shapes)
    block_bytes = cache.layout.block_bytes
    assert block_bytes == KV_BLOCK_TOKENS * (32 + 32 + 32) * 4
    [group] = make_groups([SequenceSlice(0, KV_BLOCK_TOKENS, KV_BLOCK_TOKENS, (2,))], cache)
    written = torch.zeros_like(memory)
    for number, layer in enumerate(cache.layers.values(), start=1):
        slots = torch.from_numpy(group.slots(layer.row_stride).ravel())
        layer.rows.index_fill_(0, slots, float(number))
        assert bool((memory != written).any())
        changed = (memory.view(torch.float32) == number).nonzero()
        assert changed.numel() == KV_BLOCK_TOKENS * layer.width
        assert 2 * block_bytes <= int(changed.min()) * 4
        assert int(changed.max()) * 4 < 3 * block_bytes
        written = memory.clone()
    assert bool((memory.view(torch.float32)[2 * block_bytes // 4 : 3 * block_bytes // 4] != 0).all())


def test_grouping_wastes_at_most_half_and_keeps_decodes_apart() -> None:
    cache, _memory = cache_of(64, {0: KvLayerShape(1, 8, 8)})
    lengths = [(1, 20), (300, 300), (1, 900), (160, 160), (1, 33), (2, 40), (3, 1000), (1, 1000)]
    slices, start = [], 0
    for length, context in lengths:
        slices.append(SequenceSlice(start, length, context, tuple(range(63))))
        start += length
    groups = make_groups(slices, cache)
    for group in groups:
        assert (group.lengths == 1).all() or (group.lengths > 1).all()
        assert group.queries < 2 * int(group.lengths.min())
        assert int(group.contexts.max()) <= max(256, 2 * int(group.contexts.min()))
    assert sum(group.size for group in groups) == len(lengths)
