"""A model bound to its region: a transformers module whose weights are views of paged memory.

`BoundModel.forward` is the only way to run it. It waits for a layer's pages before it runs the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.batch import StepBatch

if TYPE_CHECKING:
    import torch

    from swapper.frames import Region


@dataclass(frozen=True, slots=True)
class KvLayerShape:
    """What one layer keeps of one token: `heads` keys of `key_width` and values of `value_width` elements."""

    heads: int
    key_width: int
    value_width: int


class KvCache(Protocol):
    """A KV region seen as blocks. Which blocks are mapped and who owns them is `engine/blocks.py`'s business."""

    region: Region


class PageGate(Protocol):
    """How a forward pass waits for pages: returns once shard bytes `[0, nbytes)` are in.

    The engine's gate gives the processor away meanwhile. Raises PageInAborted if they will not come.
    """

    def __call__(self, nbytes: int) -> None: ...


class ModelRunnerProtocol(Protocol):
    """What the batching engine needs of a bound model."""

    name: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int

    def forward(self, batch: StepBatch, kv: KvCache, gate: PageGate) -> torch.Tensor:
        """Logits of the sampled rows, shape `[len(batch.sampled), vocab]`, float32, on the model's device."""

    def kv_cache(self, region: Region) -> KvCache:
        """See a reserved region as this model's KV blocks. Touches no memory."""


Bind = Callable[..., ModelRunnerProtocol]
