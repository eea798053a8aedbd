"""Paged attention: the function that transformers' models call instead of their own.

It is registered under one name. Which tokens belong to which sequence, and where their keys and values lie, is not
among its arguments: every forward pass puts a `Pass` into a context variable, so passes of several models may run in
several threads at once, and models that do not hand keyword arguments down work too.

`PagedPass` writes the new keys and values of all sequences and then attends group by group (`engine/groups.py`), in
batched calls; no loop runs over sequences. Indices and masks are made once a pass and shared by all layers.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from engine.batch import StepBatch
from engine.groups import GroupView, Indices, make_groups
from engine.kv_cache import KvLayer, PagedKvCache

if TYPE_CHECKING:
    from engine.model import PageGate

NAME = "gswapd_paged"


class Pass(Protocol):
    """One forward pass under way."""

    gate: PageGate

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer: queries `[1, heads, tokens, width]` in, results `[1, tokens, heads, value width]` out."""


current_pass: ContextVar[Pass] = ContextVar("current_pass")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, with its names for things."""
    return current_pass.get().attend(module, query, key, value, scaling, sliding_window, softcap, s_aux), None


# No mask function goes with it: without one, transformers makes no masks at all.
AttentionInterface.register(NAME, paged_attention)


class PagedPass:
    """The attention of one forward pass over a paged KV cache."""

    def __init__(self, batch: StepBatch, cache: PagedKvCache, gate: PageGate, plain: bool = False) -> None:
        """`plain`: step by step, without fused kernels."""
        self.gate = gate
        self._plain = plain
        self._cache = cache
        self._tokens = len(batch.tokens)
        self._groups = make_groups(batch.slices, cache)
        self._whole = len(self._groups) == 1 and self._groups[0].covers(self._tokens)
        self._slots: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int | None, int], list[GroupView]] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        layer = self._cache.layers[module.layer_idx]  # type: ignore[index]
        tokens = self._tokens
        new = torch.cat((key.transpose(1, 2).reshape(tokens, -1), value.transpose(1, 2).reshape(tokens, -1)), 1)
        layer.rows.index_copy_(0, self._slots_in(layer), new)
        packed = query[0].transpose(0, 1)  # [tokens, heads, width]
        views = self._views_of(layer, window)
        if self._whole:
            whole = _attend(packed, views[0], layer, scaling, softcap, sinks, self._plain)
            return whole.reshape(1, tokens, packed.shape[1], layer.shape.value_width)
        result = query.new_empty(tokens, packed.shape[1], layer.shape.value_width)
        for group, view in zip(self._groups, views, strict=True):
            queries = packed.index_select(0, group.take)
            part = _attend(queries, view, layer, scaling, softcap, sinks, self._plain)
            part = part.reshape(-1, *result.shape[1:])
            result.index_copy_(0, group.rows, part if group.kept is None else part.index_select(0, group.kept))
        return result[None]

    def _slots_in(self, layer: KvLayer) -> torch.Tensor:
        """Where each packed token's own row is."""
        slots = self._slots.get(layer.row_stride)
        if slots is None:
            host: Indices = np.empty(self._tokens, dtype=np.int64)
            for group in self._groups:  # padding repeats a token and its slot
                host[group.packed] = group.slots(layer.row_stride)
            slots = self._slots[layer.row_stride] = self._groups[0].to_device(host)
        return slots

    def _views_of(self, layer: KvLayer, window: int | None) -> list[GroupView]:
        views = self._views.get((window, layer.row_stride))
        if views is None:
            views = [GroupView(group, window, layer.row_stride) for group in self._groups]
            self._views[(window, layer.row_stride)] = views
        return views


def _attend(
    query: torch.Tensor,
    view: GroupView,
    layer: KvLayer,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    plain: bool,
) -> torch.Tensor:
    """Attention of a group: queries `[size * queries, heads, width]` in, `[size, queries, heads, value width]` out."""
    keys, values = view.gather(layer)
    shared = query.shape[1] // layer.shape.heads  # query heads that share a key head
    query = query.reshape(view.size, view.queries, layer.shape.heads, shared, layer.shape.key_width)
    if plain or softcap is not None or sinks is not None:
        return _explicit(query, keys, values, view.mask, scaling, softcap, sinks)
    if view.queries == 1:
        # Heads that share keys are queries of one head, which needs no repeated keys and is what kernels are quick at.
        attended = scaled_dot_product_attention(query[:, 0], keys, values, attn_mask=view.mask, scale=scaling)
        return attended[:, None]
    attended = scaled_dot_product_attention(
        query.flatten(2, 3).transpose(1, 2),
        keys,
        values,
        attn_mask=None if view.causal else view.mask,
        is_causal=view.causal,
        scale=scaling,
        enable_gqa=shared > 1,
    )
    return attended.transpose(1, 2)


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step, for what no kernel offers, capped logits and sinks, and to compare kernels with.

    A sink is one more logit a head, which takes its share of the softmax and has no value.
    """
    size, queries, heads, shared, width = query.shape
    stacked = query.permute(0, 2, 3, 1, 4).reshape(size, heads, shared * queries, width)
    scores = (stacked @ keys.transpose(2, 3)).view(size, heads, shared, queries, -1)
    scores.mul_(width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.add_(mask[:, None])
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, heads, shared, 1, 1).expand(size, -1, -1, queries, -1)), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    attended = weights.reshape(size, heads, shared * queries, -1) @ values
    return attended.view(size, heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
