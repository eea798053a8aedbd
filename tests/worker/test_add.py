"""`add_model` turns a checkpoint directory into a published image, or leaves the store as it was and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from server.demo.checkpoints import sibling
from swapper.errors import ModelExists, SourceError, UnsupportedModel
from swapper.geometry import GRANULE_BYTES
from swapper.image import Image
from swapper.store import Store
from swapper.verify import verify
from worker.add import add_model


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small random Llama in float32, with a head of its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return saved(LlamaForCausalLM(config), tmp_path / "llama")


def saved(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def packed_tensors(image: Image) -> dict[str, torch.Tensor]:
    with safe_open(image.shard_path(0), framework="pt") as file:
        return {entry.name: file.get_tensor(entry.name) for entry in image.manifest.shards[0].tensors}


def assert_holds(image: Image, source: Path, dtype: torch.dtype) -> None:
    """The image has the tensors of the model that transformers loads, and none besides."""
    state = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).state_dict()
    packed = packed_tensors(image)
    assert set(packed) == set(state)
    for name, tensor in packed.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name])


# ---- what is added


def test_a_real_chat_model_is_added_whole(store: Store, smollm2: Path) -> None:
    calls: list[tuple[int, int]] = []
    image = add_model(store, smollm2, "smollm2", progress=lambda done, total: calls.append((done, total)))
    manifest = image.manifest
    (shard,) = manifest.shards
    assert store.list() == ("smollm2",)
    assert (manifest.model, manifest.architecture, manifest.dtype) == ("smollm2", "LlamaForCausalLM", "bfloat16")
    assert (manifest.context_length, manifest.kv_bytes_per_token) == (8192, 30 * 2 * 3 * 64 * 2)
    assert [layer.name for layer in shard.layers] == [
        "model.embed_tokens",
        *(f"model.layers.{layer}" for layer in range(30)),
        "model.norm",
    ]
    assert not any(entry.name == "lm_head.weight" for entry in shard.tensors)  # tied: stored once
    assert calls[-1] == (shard.nbytes, shard.nbytes)
    assert verify(image) == ()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (image.path / name).read_bytes() == (smollm2 / name).read_bytes()


def test_siblings_share_all_pages_outside_the_layers_that_differ(store: Store, smollm2: Path, tmp_path: Path) -> None:
    poet = sibling(smollm2, tmp_path / "poet", layers=range(14, 16), scale=1.5)
    (shard,) = add_model(store, smollm2, "smollm2").manifest.shards
    (other,) = add_model(store, poet, "poet").manifest.shards
    pairs = zip(shard.page_hashes(GRANULE_BYTES), other.page_hashes(GRANULE_BYTES), strict=True)
    differing = [page for page, (a, b) in enumerate(pairs) if a != b]
    extents = {layer.name: layer for layer in shard.layers}
    start, end = extents["model.layers.14"].start, extents["model.layers.15"].end
    assert differing
    assert start // GRANULE_BYTES <= differing[0]
    assert differing[-1] <= end // GRANULE_BYTES
    assert len(differing) < 12 < len(shard.granules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_image_holds_the_model_that_transformers_loads(store: Store, llama: Path, dtype: torch.dtype) -> None:
    image = add_model(store, llama, "llama", dtype=str(dtype).removeprefix("torch."))
    assert_holds(image, llama, dtype)


def test_experts_stored_one_by_one_are_packed_as_the_module_has_them(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    source = saved(MixtralForCausalLM(config), tmp_path / "mixtral")
    with safe_open(source / "model.safetensors", framework="pt") as file:
        assert any("experts.3.w1" in name for name in file.keys())  # noqa: SIM118 (no mapping, it has only keys())
    assert_holds(add_model(store, source, "mixtral"), source, torch.float32)


# ---- what is refused


def test_a_model_is_added_for_a_mesh(store: Store, llama: Path) -> None:
    manifest = add_model(store, llama, "llama", tp=2, pp=2).manifest
    assert (manifest.tp, manifest.pp, len(manifest.shards)) == (2, 2, 4)


def test_a_mesh_that_does_not_fit_the_model_is_refused(store: Store, llama: Path) -> None:
    with pytest.raises(SourceError, match=r"3 does not divide its 4 attention heads.*Degrees that work: 1, 2, 4 "):
        add_model(store, llama, "llama", tp=3)
    with pytest.raises(SourceError, match="no mesh"):
        add_model(store, llama, "llama", tp=0)
    assert store.list() == ()


def test_an_architecture_that_cannot_be_served_leaves_the_store_as_it_was(
    store: Store, llama: Path, tmp_path: Path
) -> None:
    """BLOOM ignores the attention interface, and would give wrong answers in silence."""
    bloom = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModel):
        add_model(store, saved(bloom, tmp_path / "bloom"), "model")
    assert store.list() == ()
    add_model(store, llama, "model")


def test_a_dtype_that_no_weights_have_is_refused(store: Store, llama: Path) -> None:
    with pytest.raises(SourceError, match="int7"):
        add_model(store, llama, "llama", dtype="int7")
    assert store.list() == ()


def test_a_damaged_checkpoint_leaves_the_store_as_it_was(store: Store, llama: Path) -> None:
    with (llama / "model.safetensors").open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(SourceError, match="truncated"):
        add_model(store, llama, "llama")
    assert store.list() == ()
    assert store.gc() == 0


def test_a_name_that_is_taken_is_noticed_before_any_work(store: Store, llama: Path, tmp_path: Path) -> None:
    add_model(store, llama, "llama")
    with pytest.raises(ModelExists):
        add_model(store, tmp_path / "nowhere", "llama")
