"""What transformers' models do in many small kernels, or in slow ones, done in one: norms, rotary embeddings, products.

A decode of batch 1 reads each weight once, and every small kernel between two products costs as much time as megabytes
of weights. RMS norms and rotary embeddings take a dozen of them. Products with a single row are limited by how fast
weights are read, at which the usual matrix kernels, made for many rows, are a fifth slower than could be.

No model is known by name here. A norm or a rotary function is replaced where it has the usual form, and only after it
was tried on random numbers and ours gave the same. Replaced are attributes of one model's modules; nothing of
transformers changes for anybody else.

Imported for models on a GPU only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from types import FunctionType, MethodType
from typing import Any

import torch
import triton

from engine.triton_kernels import rms_norm_kernel, rotary_kernel, row_product_kernel

_ROTARY = "apply_rotary_pos_emb"  # what transformers calls it, in every model's file

_OFFSETS = (0.0, 1.0)
"""What RMS norms add to their weights: nothing, or, where weights are kept as differences from it, one."""

_TOLERANCE = 2
"""Mean difference of ours on random numbers, in units of their precision. Ours rounds once, the models' often."""

_SEED = 7

_FEW_PROGRAMS = 512  # about four for each multiprocessor

Forward = Callable[[torch.Tensor], torch.Tensor]


def fuse(module: torch.nn.Module) -> None:
    """Replace what can be replaced in a module that is bound to its weights. Touches no weight."""
    norms: dict[tuple[object, ...], float | None] = {}
    rotaries: dict[Callable[..., Any], bool] = {}
    for part in module.modules():
        if type(part) is torch.nn.Linear and part.weight.dtype in (torch.bfloat16, torch.float16):
            _replace(part, _linear(part))
        elif (parts := _norm_parts(part)) is not None:
            weight, epsilon = parts
            kind = (type(part), epsilon, weight.shape, weight.dtype)
            if kind not in norms:
                norms[kind] = _norm_offset(part, weight, epsilon)
            if (offset := norms[kind]) is not None:
                _replace(part, _norm(part, weight, epsilon, offset))
        forward = inspect.unwrap(type(part).forward)
        rotary = forward.__globals__.get(_ROTARY) if isinstance(forward, FunctionType) else None
        if rotary is not None and _ROTARY in forward.__code__.co_names:
            if rotary not in rotaries:
                rotaries[rotary] = _is_usual_rotary(rotary)
            if rotaries[rotary]:
                _replace(part, MethodType(_with_global(forward, _ROTARY, _rotary_or(rotary)), part))


def _replace(part: torch.nn.Module, forward: Callable[..., Any]) -> None:
    part.__dict__["forward"] = forward


# ---- products with one row


def row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` for an `x` of one row."""
    outputs, inputs = weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    block_n = 4 if outputs >= 4 * _FEW_PROGRAMS else 2 if outputs >= 2 * _FEW_PROGRAMS else 1
    row_product_kernel[(triton.cdiv(outputs, block_n),)](
        x, weight, out if bias is None else bias, out, outputs, inputs,
        BIAS=bias is not None, BLOCK_N=block_n, BLOCK_K=1024, num_warps=4,
    )  # fmt: skip
    return out


def _linear(part: torch.nn.Linear) -> Forward:
    weight, bias = part.weight, part.bias

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.numel() == x.shape[-1] and x.dtype == weight.dtype and x.is_contiguous():
            return row_product(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    return linear


# ---- RMS norms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float) -> torch.Tensor:
    """Rows of `x` over their root mean square, times weight and offset."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, width, epsilon,
        OFFSET=offset, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return out


def _norm(part: torch.nn.Module, weight: torch.Tensor, epsilon: float, offset: float) -> Forward:
    original = type(part).forward

    def norm(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != weight.dtype:
            result: torch.Tensor = original(part, hidden_states)
            return result
        return rms_norm(hidden_states, weight, epsilon, offset)

    return norm


def _norm_parts(part: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of what looks like an RMS norm, and is called one."""
    parameters = dict(part.named_parameters())
    weight = parameters.pop("weight", None)
    epsilon = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not type(part).__name__.endswith("RMSNorm") or parameters or weight is None or weight.ndim != 1:
        return None
    return (weight, epsilon) if isinstance(epsilon, float) else None


def _norm_offset(part: torch.nn.Module, like: torch.Tensor, epsilon: float) -> float | None:
    """The offset with which ours makes the same of random numbers; None if there is none."""
    generator = torch.Generator(like.device).manual_seed(_SEED)
    weight, x = (
        torch.randn(shape, dtype=torch.float32, device=like.device, generator=generator).to(like.dtype)
        for shape in (like.shape, (1, 8, *like.shape))
    )
    twin = copy(part)
    twin._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    with torch.inference_mode():
        expected: torch.Tensor = type(part).forward(twin, x)
        return next((o for o in _OFFSETS if _is_near(rms_norm(x, weight, epsilon, o), expected)), None)


# ---- rotary embeddings


def rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, `[1, heads, tokens, width]`, turned by `[1, tokens, width]` angles; halves go together."""
    (_, heads, tokens, width), key_heads = query.shape, key.shape[1]
    turned = query.new_empty(1, tokens, heads + key_heads, width)
    rotary_kernel[(tokens, heads + key_heads)](
        query, query.stride(1), query.stride(2), key, key.stride(1), key.stride(2), cos, sin, turned,
        HEADS=heads, KEY_HEADS=key_heads, HALF=width // 2, HALF_PAD=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    new_query, new_key = torch.split(turned, [heads, key_heads], dim=2)
    return new_query.transpose(1, 2), new_key.transpose(1, 2)


def _rotary_or(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours where arguments are as usual, else the original."""

    def rotary(query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        usual = (
            not args
            and not kwargs
            and query.ndim == key.ndim == 4
            and cos.shape == sin.shape == (1, query.shape[2], query.shape[3])
            and query.shape[0] == 1
            and query.dtype == key.dtype == cos.dtype
            and query.stride(3) == key.stride(3) == 1
            and cos.is_contiguous()
            and sin.is_contiguous()
        )
        return rotary_embedding(query, key, cos, sin) if usual else original(query, key, cos, sin, *args, **kwargs)

    return rotary


def _is_usual_rotary(original: Callable[..., Any]) -> bool:
    generator = torch.Generator("cuda").manual_seed(_SEED)
    query, key, cos, sin = (
        torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
        for shape in ((1, 4, 3, 16), (1, 2, 3, 16), (1, 3, 16), (1, 3, 16))
    )
    with torch.inference_mode():
        try:
            expected = original(query, key, cos, sin)
        except (RuntimeError, TypeError, ValueError):
            return False
        ours = rotary_embedding(query, key, cos, sin)
    return all(_is_near(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    """The same function, but for what one name outside of it means."""
    other = FunctionType(
        function.__code__, {**function.__globals__, name: value}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    difference = (found.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    return bool(difference < _TOLERANCE * torch.finfo(found.dtype).eps)
