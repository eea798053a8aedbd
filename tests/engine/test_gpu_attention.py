"""Passes on a GPU: chunked prefills and decodes in mixed batches give the logits of transformers' eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.model import BoundModel
from tests.engine.memory import Sequences, bind, pack_image
from tests.engine.test_attention import CHUNKS_AND_DECODES, random_prompts
from tests.models import SUPPORTED, make_checkpoint, random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),  # what torch and Triton say of a device is not ours
]

DEVICE = "cuda:0"
TOLERANCE = 1e-3


def bound(directory: Path, architecture: str, dtype: str | None = None, **overrides: object) -> BoundModel:
    make_checkpoint(directory / "checkpoint", architecture, **overrides)
    return bind(pack_image(directory / "checkpoint", directory / "image", dtype), device=DEVICE)[0]


@torch.no_grad()
def eager_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt], device=DEVICE), use_cache=False).logits[0].float()


def largest_difference(model: PreTrainedModel, sequences: Sequences) -> float:
    return max(
        float((sequences.result(index) - eager_logits(model, prompt)).abs().max())
        for index, prompt in enumerate(sequences.prompts)
    )


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_mixed_batches_give_the_logits_of_eager_attention(tmp_path: Path, architecture: str) -> None:
    sequences = Sequences(bound(tmp_path, architecture), random_prompts(50, 37, 21, 30))
    for lengths in CHUNKS_AND_DECODES:
        sequences.step(lengths)
    assert largest_difference(random_model(architecture).to(DEVICE), sequences) < TOLERANCE


def test_attention_step_by_step_gives_the_same_without_our_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "checkpoint", "llama")
    model, _shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"), device=DEVICE, plain=True)
    monkeypatch.delattr("engine.triton_attention.attend")
    sequences = Sequences(model, random_prompts(50, 37, 21, 30))
    for lengths in CHUNKS_AND_DECODES:
        sequences.step(lengths)
    assert largest_difference(random_model("llama").to(DEVICE), sequences) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_half_precision_is_as_close_as_transformers_own(tmp_path: Path, architecture: str, dtype: str) -> None:
    """A recorded decode among them: it computes what it would in float32, to within what transformers is off."""
    sequences = Sequences(bound(tmp_path, architecture, dtype), random_prompts(50, 37, 21, 30))
    for lengths in CHUNKS_AND_DECODES[:-1]:
        sequences.step(lengths)
    for lengths in ({0: 1, 1: 1, 2: 1}, {0: 28, 1: 14, 2: 16}):
        sequences.step(lengths)
    model = random_model(architecture).to(DEVICE)
    exact = [eager_logits(model, prompt) for prompt in sequences.prompts]
    model = model.to(getattr(torch, dtype))
    theirs = [eager_logits(model, prompt) for prompt in sequences.prompts]
    ours_off = median_error([sequences.result(index) for index in range(4)], exact)
    assert ours_off < 2 * median_error(theirs, exact) + 1e-6


def median_error(results: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The usual square error of a token's logits: where experts are a tie, rounding chooses others for a few tokens."""
    errors = [(found - right).square().mean(-1) for found, right in zip(results, exact, strict=True)]
    return float(torch.cat(errors).median())


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_contexts_of_very_different_lengths_in_one_pass(tmp_path: Path, architecture: str) -> None:
    config = {"max_position_embeddings": 1024}
    sequences = Sequences(bound(tmp_path, architecture, **config), random_prompts(601, 331, 22, 10, 7), blocks=100)
    sequences.step({0: 600})
    sequences.step({1: 330, 2: 20, 3: 9})
    sequences.step({2: 1, 0: 1, 4: 7, 1: 1, 3: 1})
    sequences.step({2: 1})
    assert largest_difference(random_model(architecture, **config).to(DEVICE), sequences) < 4 * TOLERANCE


def test_a_decode_beside_a_long_chunk_takes_no_memory_for_each_of_its_tokens(tmp_path: Path) -> None:
    """Partial results are kept of decodes alone: for all tokens of the pass they would be 37 MB here."""
    sequences = Sequences(bound(tmp_path, "llama", max_position_embeddings=4096), random_prompts(2000, 20), blocks=140)
    sequences.step({1: 19})
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sequences.step({1: 1, 0: 2000})
    assert torch.cuda.max_memory_allocated() - before < 24 << 20


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 8, 64), (14, 2, 80), (9, 3, 64), (16, 1, 128)])
def test_head_counts_and_widths_of_real_models(tmp_path: Path, heads: int, kv_heads: int, width: int) -> None:
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "hidden_size": 8 * heads,
    }
    sequences = Sequences(bound(tmp_path, "llama", **config), random_prompts(200, 37), blocks=32)
    for lengths in ({0: 150, 1: 20}, {0: 1, 1: 1}, {0: 1, 1: 15}, {0: 48, 1: 1}):
        sequences.step(lengths)
    assert largest_difference(random_model("llama", **config).to(DEVICE), sequences) < TOLERANCE
