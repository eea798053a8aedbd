"""From an encoder's hidden states to one vector a text, as the checkpoint's own description says.

The description is the one that sentence-transformers writes: `modules.json`, and the configuration of its pooling.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swapper.errors import SourceError, UnsupportedModel
from swapper.image import Embedding, Pooling

MODULES = "modules.json"

_WAYS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_LIMITS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")


def read_embedding(directory: Path) -> Embedding | None:
    """How the checkpoint in a directory embeds; None if it does not say that it does.

    Raises UnsupportedModel if it does so in a way that is not supported, SourceError if its description is broken.
    """
    modules = _read(directory / MODULES)
    if modules is None:
        return None
    try:
        parts = [(str(module["type"]).rpartition(".")[2], directory / module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{directory / MODULES} does not list modules: {error!r}.") from error
    kinds = [kind for kind, _ in parts]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or parts[0][1] != directory:
        raise UnsupportedModel(
            f"{directory / MODULES} has the modules {', '.join(kinds)}; supported are a Transformer, its Pooling, and "
            "Normalize."
        )
    pooling = _read(parts[1][1] / "config.json") or {}
    return Embedding(
        pooling=_way(pooling, parts[1][1]),
        normalize="Normalize" in kinds,
        width=int(pooling["word_embedding_dimension"]),
        max_tokens=_limit(directory),
    )


def _way(pooling: dict[str, Any], directory: Path) -> Pooling:
    chosen = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _WAYS:
        raise UnsupportedModel(
            f"{directory} pools by {' and '.join(chosen) or 'nothing known'}; supported is one of {', '.join(_WAYS)}."
        )
    return _WAYS[chosen[0]]


def _limit(directory: Path) -> int | None:
    """The most tokens of a text that the model's makers have it look at, special ones included."""
    for name in _LIMITS:
        if (values := _read(directory / name)) is not None and values.get("max_seq_length"):
            return int(values["max_seq_length"])
    return None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from error


def pool(hidden: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, how: Embedding) -> torch.Tensor:
    """One vector, in float32, for each text: its hidden states are the rows `[start, start + length)` of `hidden`."""
    hidden = hidden.float()
    if how.pooling == "cls":
        vectors = hidden.index_select(0, starts)
    elif how.pooling == "last":
        vectors = hidden.index_select(0, starts + lengths - 1)
    else:
        texts = torch.repeat_interleave(torch.arange(len(starts), device=hidden.device), lengths)
        vectors = hidden.new_zeros(len(starts), hidden.shape[1])
        if how.pooling == "mean":
            vectors = vectors.index_add_(0, texts, hidden) / lengths[:, None]
        else:
            index = texts[:, None].expand_as(hidden)
            vectors = vectors.scatter_reduce_(0, index, hidden, "amax", include_self=False)
    return torch.nn.functional.normalize(vectors, dim=1) if how.normalize else vectors
