"""CUDA graphs of decode passes: a whole pass recorded once, and replayed with one launch.

A graph is recorded for a model, a KV region and a number of sequences, rounded up to a bucket; what is missing to the
bucket is padding, which writes nowhere. It stays right whatever is paged out and in, because addresses never change. It
runs no Python, so no page gate either: replay one only when the model's whole shard is in.

All graphs of a device share one pool of memory. They may, because passes run one behind the other on one stream, and
nothing of a pass is needed once the next begins; so memory grows with the largest graphs, not with their number. The
number is bounded all the same: the graph that was not used for longest goes first.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from engine.step_inputs import MAX_DECODES
from swapper.cuda_driver import capture_lock

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, MAX_DECODES)
"""Numbers of sequences that graphs are recorded for; more run without a graph."""

MAX_GRAPHS = 96
"""Graphs that a device keeps. One of an 8B model takes a few megabytes of the driver's memory."""


def bucket_of(sequences: int) -> int | None:
    """The bucket that this many sequences are padded to; None if there are too many."""
    return next((bucket for bucket in BUCKETS if bucket >= sequences), None)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was recorded for."""

    owner: object  # of one model; compared by identity
    region: int  # address of the KV region
    bucket: int


@dataclass(slots=True)
class DecodeGraph:
    """One recorded pass, and the logits that it writes."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    nbytes: int  # that the pool and the driver took for it

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class GraphCache:
    """The graphs of one device. Whoever holds the engine's turn records and replays; any thread may forget."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._anchors: list[torch.cuda.CUDAGraph] = []  # a pool ends with its last graph, so each has one that stays
        self._lock = threading.RLock()  # a garbage collection may forget, at any point
        self._graphs: OrderedDict[GraphKey, DecodeGraph] = OrderedDict()
        self._refused: set[object] = set()

    @property
    def nbytes(self) -> int:
        """GPU memory that the graphs hold."""
        with self._lock:
            return sum(graph.nbytes for graph in self._graphs.values())

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: GraphKey) -> DecodeGraph | None:
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
            return graph

    def may_record(self, owner: object) -> bool:
        """Whether no recording of the model has failed yet."""
        return owner not in self._refused

    def record(self, key: GraphKey, name: str, run: Callable[[], torch.Tensor]) -> DecodeGraph | None:
        """Record `run`, which has run before and returns the logits; None if it cannot be recorded.

        The current stream must be the one that all passes use, and no other thread may use it meanwhile. Other threads
        may go on using the GPU on streams of their own.
        """
        while len(self._graphs) >= MAX_GRAPHS:
            with self._lock:
                self._graphs.popitem(last=False)
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with capture_lock:
            if self._pool is None:
                self._begin_pool()
            try:
                logits = self._capture(graph, run)
            except RuntimeError as error:  # it looks at numbers on the host, which a recording has none of
                logger.warning("Decodes of %s cannot be recorded as CUDA graphs, and run slower: %s", name, error)
                self._refused.add(key.owner)
                self._pool = None  # torch takes it to be recording still, and would not begin again
                return None
        left, _ = torch.cuda.mem_get_info(self._device)
        recorded = DecodeGraph(graph, logits, max(0, free - left))
        with self._lock:
            self._graphs[key] = recorded
        return recorded

    def _begin_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        anchor = torch.cuda.CUDAGraph()
        self._capture(anchor, lambda: torch.zeros(1, device=self._device))
        self._anchors.append(anchor)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with suppress(RuntimeError):  # the stream must leave its recording all the same
                graph.capture_end()
            raise
        graph.capture_end()
        return result

    def forget(self, owner: object) -> None:
        """Drop a model's graphs: no pass of it is under way, and its addresses are given away."""
        with self._lock:
            for key in [key for key in self._graphs if key.owner is owner]:
                del self._graphs[key]
            self._refused.discard(owner)


@cache
def graphs_of(device: torch.device) -> GraphCache:
    """The graphs of a device. There is one cache, as there is one memory."""
    return GraphCache(device)


def graph_bytes(device: torch.device) -> int:
    """GPU memory that the graphs of a device hold."""
    return graphs_of(device).nbytes if device.type == "cuda" else 0
