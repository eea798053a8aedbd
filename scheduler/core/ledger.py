"""Who holds which frames of one group: exact counts, shared pages counted once a rank.

A page is held by every model that reserved it; its frame is free when the last of them has given it up. KV frames
are counted a model, the same on every rank. Frames are entered here before anything is asked of a worker, and
crossed out only when the worker has said that they are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mypy_extensions import mypyc_attr

Shards = tuple[tuple[int, ...], ...]


@mypyc_attr(allow_interpreted_subclasses=True)
class Ledger:
    """Frames of one group. Invariant: on every rank, distinct held pages + KV frames ≤ `capacity`."""

    def __init__(self, ranks: int, capacity: int) -> None:
        self.capacity = capacity
        self._holders: list[dict[int, int]] = [{} for _ in range(ranks)]  # a rank: page identity → how often held
        self._kv: dict[str, int] = {}  # model → frames
        self._kv_total = 0

    @property
    def holders(self) -> Sequence[Mapping[int, int]]:
        """For each rank, how many times each page is held. To be read only."""
        return self._holders

    @property
    def kv(self) -> Mapping[str, int]:
        return self._kv

    def free(self) -> list[int]:
        """Frames that nobody holds, for each rank."""
        return [self.capacity - len(held) - self._kv_total for held in self._holders]

    @property
    def least_free(self) -> int:
        """Frames free on the fullest rank."""
        holders = self._holders
        fullest = len(holders[0]) if len(holders) == 1 else max(map(len, holders))
        return self.capacity - self._kv_total - fullest

    def missing(self, shards: Shards, first: int = 0, last: int | None = None) -> list[int]:
        """For each rank, how many frames it takes to hold pages `[first, last)` beyond those that are held already."""
        return [len(set(shard[first:last]).difference(held)) for shard, held in zip(shards, self._holders, strict=True)]

    def hold(self, shards: Shards, first: int, last: int) -> None:
        """Reserve pages `[first, last)` of every rank. The caller has made sure that they fit."""
        for rank, held in enumerate(self._holders):
            for page in shards[rank][first:last]:
                held[page] = held.get(page, 0) + 1

    def drop(self, shards: Shards, first: int, last: int) -> None:
        """Give up pages `[first, last)` of every rank."""
        for rank, held in enumerate(self._holders):
            for page in shards[rank][first:last]:
                held[page] -= 1
                if not held[page]:
                    del held[page]

    def set_kv(self, model: str, frames: int) -> None:
        self._kv_total += frames - self._kv.pop(model, 0)
        if frames:
            self._kv[model] = frames


def distinct_pages(models: Sequence[Shards], rank: int) -> int:
    """Frames that all pages of `models` take together on one rank."""
    return len({page for shards in models for page in shards[rank]})
