"""What the ranks of a mesh must move in a pass, by the arithmetic of a model's shape. Counters are checked against it.

Ranks of a stage sum hidden states, `tokens × hidden size`, behind the embedding and twice a layer or as often as the
model's plan says, and gather logits, `rows × vocabulary`. Stages hand hidden states on, and the last one sends the
leader its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from engine.architecture import build, read_config
from engine.mesh import MeshRank
from engine.partition import collectives
from swapper.image import Image

Kind = Literal["all_reduce", "all_gather", "send", "receive"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a pass: so many bytes for each of its tokens, and for each row of logits that is wanted."""

    kind: Kind
    token_bytes: int = 0
    row_bytes: int = 0

    def nbytes(self, tokens: int, rows: int) -> int:
        return tokens * self.token_bytes + rows * self.row_bytes


def calls(image: Image, rank: int) -> Sequence[Call]:
    """All calls that a pass makes on one rank; none without a mesh."""
    manifest = image.manifest
    at = MeshRank(manifest.tp, manifest.pp, rank)
    return tuple(_calls(image, at)) if at.size > 1 else ()


def _calls(image: Image, at: MeshRank) -> Iterator[Call]:
    config = read_config(image.path).get_text_config()
    dtype: torch.dtype = getattr(torch, image.manifest.dtype)
    hidden = config.hidden_size * dtype.itemsize
    if not at.is_first:
        yield Call("receive", hidden)
    if at.tp > 1:
        own = tuple(f"{layer.name}." for layer in image.manifest.shards[at.rank].layers)
        for path, kind in collectives(build(config, dtype)):
            if kind == "all_gather" and at.is_last:  # of parts that are as long as the longest
                yield Call(kind, row_bytes=-(-config.vocab_size // at.tp) * at.tp * dtype.itemsize)
            elif kind == "all_reduce" and f"{path}.".startswith(own):
                yield Call(kind, hidden)
    if not at.is_last:
        yield Call("send", hidden)
    logits = config.vocab_size * dtype.itemsize
    if at.pp > 1 and at.is_last and at.tp_rank == 0:
        yield Call("send", row_bytes=logits)
    if at.pp > 1 and at.is_leader:
        yield Call("receive", row_bytes=logits)
