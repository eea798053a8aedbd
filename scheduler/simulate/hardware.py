"""What a simulated cluster is made of: groups and their links, models and what a forward pass of one costs.

A group's ranks move in lockstep, so one rank stands for all: sizes and rates are those of one rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from scheduler.core.events import ModelSpec


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group: its memory, and the rates at which pages come into it."""

    name: str
    frames: int
    page_bytes: int
    host_rate: float  # bytes a second out of the host tier
    storage_rate: float = 0.0  # and from storage, which the groups of a node share; 0: everything is in the host tier
    host_pages: int = 0  # that the host tier holds
    node: str = "node"
    ranks: int = 1
    pp: int = 1
    page_seconds: float = 0.0  # that a page takes besides its bytes, from whatever source
    way_seconds: float = 0.0  # from a command to its worker and back
    unmap_seconds: float = 0.0  # a page-out takes


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model and what it costs to run. A pass takes `pass_seconds`, and `token_seconds` for each token in it."""

    spec: ModelSpec
    pass_seconds: float
    token_seconds: float = 0.0
    kv_frame_tokens: int = 0  # tokens whose keys and values fill a frame; 0: they need no memory
    max_batch: int = 64  # sequences of a pass
    max_batch_tokens: int = 1 << 30  # of a pass
    objective: float = 10.0  # seconds within which a request should be answered
    max_wait: float | None = None

    @property
    def pages(self) -> int:
        return len(self.spec.shards[0])


@dataclass(slots=True)
class SharedLink:
    """A link whose rate is divided evenly among the transfers under way.

    `virtual` is the work that each transfer has been given since the link's beginning: a transfer of `work` seconds
    that began at virtual time v ends at v + work, whoever else comes and goes.
    """

    virtual: float = 0.0
    at: float = 0.0
    version: int = 0  # of the set of transfers: an end that was foretold for another version is not one
    transfers: list[tuple[float, int, object]] = field(default_factory=list)

    def begin(self, now: float, work: float, what: object) -> float:
        """Add a transfer that would take `work` seconds alone. Returns when the next one ends."""
        self._advance(now)
        self.version += 1
        heapq.heappush(self.transfers, (self.virtual + work, self.version, what))
        return self._next_end()

    def end(self, now: float) -> tuple[object, float | None]:
        """The transfer that ends now, and when the next one ends."""
        self._advance(now)
        self.version += 1
        self.virtual, _, what = heapq.heappop(self.transfers)
        return what, self._next_end() if self.transfers else None

    def _advance(self, now: float) -> None:
        if self.transfers:
            self.virtual += (now - self.at) / len(self.transfers)
        self.at = now

    def _next_end(self) -> float:
        return self.at + max(0.0, self.transfers[0][0] - self.virtual) * len(self.transfers)
