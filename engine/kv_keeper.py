"""Keys and values of suspended sequences: kept in host memory, or given up, whichever brings them back sooner.

Two things are measured as the worker goes: what a byte takes that is copied between the KV region and host memory, and
what a token takes in a pass of prompts. A sequence is kept if copying its blocks out and back is quicker than computing
its tokens again, and if there is room: host memory for this is bounded, for all models of a worker together. While one
of the two is not known yet, a sequence is kept, and the copy measured.

On a mesh the leader decides, and every rank copies the same blocks of its own: they have as many bytes on each, so what
the leader has room for, the others have, too.

On a GPU the memory is pinned, by torch's caching allocator, which keeps it for the next time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from engine.views import region_bytes
from swapper.frames import Region

SMOOTHING = 0.3
"""Weight of the latest measurement."""

PROMPT_PASS = 32
"""Tokens of a pass from which on it tells what computing a prompt takes; smaller ones tell of their constant costs."""


class HostRoom:
    """So many bytes of host memory, for the models of a worker. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._free = nbytes
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        return self._free

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._free:
                return False
            self._free -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        with self._lock:
            self._free += nbytes


class KvCopies:
    """Copies of one model's blocks, on the current stream, which nobody waits for."""

    def __init__(self, region: Region, block_bytes: int) -> None:
        memory = region_bytes(region)
        self._blocks = memory[: len(memory) // block_bytes * block_bytes].view(-1, block_bytes)
        self.device = memory.device

    def out(self, blocks: Sequence[int]) -> torch.Tensor:
        """What is in these blocks, one a row, in host memory."""
        on_gpu = self._blocks.is_cuda
        data = torch.empty((len(blocks), self._blocks.shape[1]), dtype=torch.uint8, pin_memory=on_gpu)
        for row, block, count in _runs(blocks):
            data[row : row + count].copy_(self._blocks[block : block + count], non_blocking=True)
        return data

    def back(self, data: torch.Tensor, blocks: Sequence[int]) -> None:
        """Put it into the first of these blocks."""
        for row, block, count in _runs(blocks[: len(data)]):
            self._blocks[block : block + count].copy_(data[row : row + count], non_blocking=True)


class Followers(Protocol):
    """A mesh's other ranks, which do the same with their blocks of that number; see `engine.leader.LedModel`."""

    @property
    def ranks(self) -> int:
        """How many there are, with the leader."""

    def keep(self, blocks: Sequence[int]) -> int:
        """Returns the number by which they know what they have kept."""

    def restore(self, number: int, blocks: Sequence[int]) -> None: ...

    def drop(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class KeptKv:
    """The blocks that hold the first `tokens` tokens of a sequence, one a row."""

    data: torch.Tensor
    tokens: int
    nbytes: int  # on all ranks together
    number: int = 0  # by which followers know it


class KvKeeper:
    """Of one model; used by its thread alone."""

    def __init__(self, region: Region, block_bytes: int, room: HostRoom, followers: Followers | None = None) -> None:
        self._copies = KvCopies(region, block_bytes)
        self._block_bytes = block_bytes
        self._room = room
        self._followers = followers
        self._byte_seconds: float | None = None
        self._token_seconds: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens, of prompts for the most part, took so long."""
        if tokens >= PROMPT_PASS:
            self._token_seconds = _smoothed(self._token_seconds, seconds / tokens)

    def keep(self, blocks: Sequence[int], tokens: int) -> KeptKv | None:
        """Copy blocks to host memory, if that pays; the caller then gives them back."""
        nbytes = len(blocks) * self._block_bytes
        if not blocks or not self._pays(nbytes, tokens) or not self._room.take(nbytes):
            return None
        number, ranks = (self._followers.keep(blocks), self._followers.ranks) if self._followers else (0, 1)
        began = time.perf_counter()
        data = self._copies.out(blocks)
        self._measure(began, nbytes)
        return KeptKv(data, tokens, nbytes * ranks, number)

    def restore(self, kept: KeptKv, blocks: Sequence[int]) -> None:
        """Copy what was kept into these blocks, and let go of it."""
        if self._followers is not None:
            self._followers.restore(kept.number, blocks)
        began = time.perf_counter()
        self._copies.back(kept.data, blocks)
        self._measure(began, kept.data.nbytes)
        self._room.give_back(kept.data.nbytes)

    def drop(self, kept: KeptKv) -> None:
        if self._followers is not None:
            self._followers.drop(kept.number)
        self._room.give_back(kept.data.nbytes)

    def _pays(self, nbytes: int, tokens: int) -> bool:
        if self._byte_seconds is None or self._token_seconds is None:
            return True
        return 2 * nbytes * self._byte_seconds < tokens * self._token_seconds

    def _measure(self, began: float, nbytes: int) -> None:
        if self._copies.device.type == "cuda":
            torch.cuda.current_stream(self._copies.device).synchronize()
        self._byte_seconds = _smoothed(self._byte_seconds, (time.perf_counter() - began) / nbytes)


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours among the blocks are copied at once: (place of the first, its number, how many)."""
    for _, run in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        places = list(run)
        yield places[0][0], places[0][1], len(places)
