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
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Numbers of sequences that graphs are recorded for; more run without a graph."""

MAX_GRAPHS = 96
"""Graphs that a device keeps. One of an 8B model takes a few megabytes of the driver's memory."""


def bucket_of(sequences: int) -> int | None:
    """The bucket that this many sequences are padded to; None if there are too many."""
    return next((bucket for bucket in BUCKETS if bucket >= sequences), None)


@dataclass(slots=True)
class DecodeGraph:
    """One recorded pass: the row of numbers that it reads, and the logits that it writes."""

    graph: torch.cuda.CUDAGraph
    row: torch.Tensor
    logits: torch.Tensor
    nbytes: int  # that the pool and the driver took for it

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class GraphCache:
    """The graphs of one device. One pass at a time uses it: whoever holds the engine's turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Hashable, DecodeGraph] = OrderedDict()
        self._refused: set[Hashable] = set()

    @property
    def nbytes(self) -> int:
        """GPU memory that the graphs hold."""
        return sum(graph.nbytes for graph in self._graphs.values())

    def find(self, key: Hashable) -> DecodeGraph | None:
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def may_record(self, model: Hashable) -> bool:
        """Whether no recording of the model has failed yet."""
        return model not in self._refused

    def record(
        self, key: Hashable, model: Hashable, row: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> DecodeGraph | None:
        """Record `run`, which has run before, reads `row`, and returns the logits; None if it cannot be recorded.

        The current stream must be the one that all passes use, and have nothing to do with other threads meanwhile.
        Those may go on using the GPU on streams of their own.
        """
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            logits = run()
        except Exception as error:  # whatever a model does that cannot be recorded, it can still be run
            with suppress(RuntimeError):
                graph.capture_end()
            logger.warning("Decode passes of %s cannot be recorded as CUDA graphs, and run slower: %s", model, error)
            self._refused.add(model)
            return None
        graph.capture_end()
        left, _ = torch.cuda.mem_get_info(self._device)
        self._graphs[key] = DecodeGraph(graph, row, logits, max(0, free - left))
        return self._graphs[key]

    def forget(self, owner: Hashable) -> None:
        """Drop the graphs whose keys begin with `owner`: its addresses are given away."""
        for key in [key for key in self._graphs if isinstance(key, tuple) and key[0] == owner]:
            del self._graphs[key]
        self._refused.discard(owner)


@cache
def graphs_of(device: torch.device) -> GraphCache:
    """The graphs of a device. There is one cache, as there is one memory."""
    return GraphCache(device)


def graph_bytes(device: torch.device) -> int:
    """GPU memory that the graphs of a device hold."""
    return graphs_of(device).nbytes if device.type == "cuda" else 0
