"""Two things that transformers' models do in a dozen small kernels, done in one each: RMS norms and rotary embeddings.

At batch 1 a decode reads each weight once, and every small kernel between two products costs as much as megabytes of
weights. No model is known by name here: a module or function is replaced where it has the usual form, and only after
it was tried on random numbers and ours gave the same. Replaced are attributes of one model's modules; nothing of
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

from engine.triton_kernels import rms_norm_kernel, rotary_kernel

_ROTARY = "apply_rotary_pos_emb"  # what transformers calls it, in every model's file

_VARIANTS = ((0.0, True), (0.0, False), (1.0, False))
"""RMS norms in use: what is added to the weight, and whether the normed numbers are rounded before they meet it."""

_SEED = 7

Norm = Callable[[torch.Tensor], torch.Tensor]


def fuse(module: torch.nn.Module) -> None:
    """Replace what can be replaced in a module that is bound to its weights. Touches no weight."""
    norms: dict[tuple[object, ...], tuple[float, bool] | None] = {}
    rotaries: dict[Callable[..., Any], bool] = {}
    for part in module.modules():
        if (parts := _norm_parts(part)) is not None:
            weight, epsilon = parts
            kind = (type(part), epsilon, weight.shape, weight.dtype)
            if kind not in norms:
                norms[kind] = _norm_variant(part, weight, epsilon)
            if (variant := norms[kind]) is not None:
                part.forward = _norm(part, weight, epsilon, *variant)
        forward = inspect.unwrap(type(part).forward)
        rotary = forward.__globals__.get(_ROTARY) if isinstance(forward, FunctionType) else None
        if rotary is not None and _ROTARY in forward.__code__.co_names:
            if rotary not in rotaries:
                rotaries[rotary] = _is_usual_rotary(rotary)
            if rotaries[rotary]:
                part.forward = MethodType(_with_global(forward, _ROTARY, _rotary_or(rotary)), part)


# ---- RMS norms


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, rounded: bool) -> torch.Tensor:
    """Rows of `x` over their root mean square, times the weight."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, width, epsilon,
        OFFSET=offset, ROUNDED=rounded, BLOCK=block, num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
    return out


def _norm(part: torch.nn.Module, weight: torch.Tensor, epsilon: float, offset: float, rounded: bool) -> Norm:
    original = type(part).forward

    def norm(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != weight.dtype:
            result: torch.Tensor = original(part, hidden_states)
            return result
        return rms_norm(hidden_states, weight, epsilon, offset, rounded)

    return norm


def _norm_parts(part: torch.nn.Module) -> tuple[torch.Tensor, float] | None:
    """Weight and epsilon of what looks like an RMS norm, and is called one."""
    parameters = dict(part.named_parameters())
    weight = parameters.pop("weight", None)
    epsilon = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    if not type(part).__name__.endswith("RMSNorm") or parameters or weight is None or weight.ndim != 1:
        return None
    return (weight, epsilon) if isinstance(epsilon, float) else None


def _norm_variant(part: torch.nn.Module, like: torch.Tensor, epsilon: float) -> tuple[float, bool] | None:
    """Which variant a norm is: the nearest to what it makes of random numbers, if it is near enough."""
    generator = torch.Generator(like.device).manual_seed(_SEED)
    weight, x = (
        torch.randn(shape, dtype=torch.float32, device=like.device, generator=generator).to(like.dtype)
        for shape in (like.shape, (1, 8, *like.shape))
    )
    twin = copy(part)
    twin._parameters = {"weight": torch.nn.Parameter(weight, requires_grad=False)}
    with torch.inference_mode():
        expected: torch.Tensor = type(part).forward(twin, x)
        off = {variant: _difference(rms_norm(x, weight, epsilon, *variant), expected) for variant in _VARIANTS}
    nearest = min(off, key=lambda variant: off[variant])
    return nearest if off[nearest] <= 2 * torch.finfo(like.dtype).eps else None


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
    return all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    """The same function, but for what one name outside of it means."""
    other = FunctionType(
        function.__code__, {**function.__globals__, name: value}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    other.__kwdefaults__ = function.__kwdefaults__
    return other


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The mean difference, as a part of the numbers' size; infinite if they are of different types."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return float("inf")
    return float((found.float() - expected.float()).abs().mean() / expected.float().abs().mean())
