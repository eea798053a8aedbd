"""Replaced kernels: they compute what the model's own code does, and are used where that is so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from engine.model import BoundModel
from tests.engine.test_gpu_attention import DEVICE, bound

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_norms_are_those_of_the_models(dtype: torch.dtype, kind: type[torch.nn.Module], offset: float) -> None:
    from engine.fused import rms_norm

    norm = kind(300, eps=1e-6).to(DEVICE, dtype)
    norm.weight.data = random(300, dtype=dtype)
    x = random(1, 17, 300, dtype=dtype)
    ours = rms_norm(x, norm.weight, 1e-6, offset)
    torch.testing.assert_close(ours, norm(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embeddings_are_no_farther_off(dtype: torch.dtype) -> None:
    from engine.fused import rotary_embedding

    query, key = (random(1, 19, heads, 24, dtype=dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = random(1, 19, 24, dtype=dtype), random(1, 19, 24, dtype=dtype).flip(2)
    arguments = (query, key, cos, sin)
    exact = apply_rotary_pos_emb(*(tensor.double() for tensor in arguments))
    ours, theirs = rotary_embedding(*arguments), apply_rotary_pos_emb(*arguments)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert (mine - right).norm() <= 1.01 * (their - right).norm()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (1000, 300), (7, 2048), (2050, 11008)])
def test_products_with_one_row(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    from engine.fused import row_product

    weight, x, bias = (random(*shape, dtype=dtype) for shape in ((outputs, inputs), (1, 1, inputs), (outputs,)))
    for one in (None, bias):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if one is None else one.double())
        difference = (row_product(x, weight, one).double() - exact).norm() / exact.norm()
        assert difference < torch.finfo(dtype).eps


def replaced(model: BoundModel) -> set[str]:
    return {type(part).__name__ for part in model._module.modules() if "forward" in part.__dict__}


def test_what_is_replaced_in_which_model(tmp_path: Path) -> None:
    """And nothing of transformers itself changes."""
    before = LlamaRMSNorm.forward
    assert replaced(bound(tmp_path / "llama", "llama", "bfloat16")) == {"LlamaRMSNorm", "LlamaAttention", "Linear"}
    assert replaced(bound(tmp_path / "qwen3", "qwen3")) == {"Qwen3RMSNorm", "Qwen3Attention"}
    assert replaced(bound(tmp_path / "gemma3", "gemma3")) == {"Gemma3RMSNorm", "Gemma3Attention"}
    assert replaced(bound(tmp_path / "gpt2", "gpt2")) == set()
    assert LlamaRMSNorm.forward is before
