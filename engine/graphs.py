"""CUDA graphs of decode passes: a whole pass recorded once, and replayed with one launch.

A graph is recorded for a model, a KV region and a number of sequences, rounded up to a bucket; what is missing to the
bucket is padding, which writes nowhere. It stays right whatever is paged out and in, because addresses never change. It
runs no Python, so no page gate either: replay one only when the model's whole shard is in.

Recording runs nothing and touches no memory, so it needs neither a turn nor the GPU: one thread does it beside the
passes, on a stream of its own, and decodes run without a graph until it is there. No first answer waits for it.

All graphs of a device share one pool of memory. They may, because they are replayed one behind the other on one stream,
and what a pass leaves is copied before the next is launched; so memory grows with the largest graphs, not with their
number. Number and bytes are bounded all the same: the graph that was not used for longest goes first. What they may
take is charged to the workspace that a GPU's frame pool leaves (`engine/workspace.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

from engine.sampling import find_likeliest
from engine.step_inputs import MAX_DECODES
from engine.workspace import GRAPH_BYTES
from swapper.cuda_driver import capture_lock

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_DECODES)
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
    """One recorded pass, and what it writes."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    likeliest: torch.Tensor  # of each row, as `find_likeliest` has it
    nbytes: int  # that the pool and the driver took for it

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class GraphCache:
    """The graphs of one device. Whoever holds the engine's turn replays; any thread may ask for one, and forget."""

    def __init__(self, device: torch.device) -> None:
        self.enabled = True
        self._device = device
        self._changed = threading.Condition(threading.RLock())  # a garbage collection may forget, at any point
        self._graphs: OrderedDict[GraphKey, DecodeGraph] = OrderedDict()
        self._asked: set[GraphKey] = set()  # to be recorded
        self._refused: set[object] = set()  # owners of what cannot be recorded
        self._recorder = ThreadPoolExecutor(1, thread_name_prefix="graphs")  # has no more to do than `_asked`
        self._stream: torch.cuda.Stream | None = None  # the recorder's, like the next two
        self._pool: Any = None
        self._anchors: list[torch.cuda.CUDAGraph] = []  # a pool ends with its last graph, so each has one that stays

    @property
    def nbytes(self) -> int:
        """GPU memory that the graphs hold."""
        with self._changed:
            return sum(graph.nbytes for graph in self._graphs.values())

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, key: GraphKey) -> DecodeGraph | None:
        with self._changed:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
            return graph

    def may_record(self, owner: object) -> bool:
        """Whether graphs are wanted, and no recording of the model has been refused yet."""
        return self.enabled and owner not in self._refused

    def ask(self, key: GraphKey, name: str, run: Callable[[], torch.Tensor]) -> None:
        """Have `run` recorded, unless it is there, was asked for already or refused. It returns the logits.

        It has run before, in this shape, so that all it needs is compiled and loaded.
        """
        with self._changed:
            if key in self._graphs or key in self._asked or key.owner in self._refused:
                return
            self._asked.add(key)
        self._recorder.submit(self._record, key, name, run)

    def wait_recorded(self, timeout: float, owner: object | None = None) -> bool:
        """Wait until all that was asked for, or what a model asked for, is recorded or refused."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(owner is None or key.owner is owner for key in self._asked), timeout
            )

    def forget(self, owner: object) -> None:
        """Drop a model's graphs: no pass of it is under way, and its addresses are given away."""
        with self._changed:
            for key in [key for key in self._graphs if key.owner is owner]:
                del self._graphs[key]
            self._asked = {key for key in self._asked if key.owner is not owner}
            self._refused.discard(owner)
            self._changed.notify_all()

    # ---- the recorder's thread

    def _record(self, key: GraphKey, name: str, run: Callable[[], torch.Tensor]) -> None:
        recorded: DecodeGraph | None = None
        try:
            if key in self._asked:
                recorded = self._recorded(run)
        except ValueError as error:
            # Triton asks the driver about each address, which knows none of a page that has gone meanwhile. The next
            # decode asks again.
            logger.info("A decode of %s was not recorded now: %s", name, error)
            self._pool = None
        except RuntimeError as error:  # it looks at numbers on the host, which a recording has none of
            logger.warning("Decodes of %s cannot be recorded as CUDA graphs, and run slower: %s", name, error)
            self._pool = None  # torch takes it to be recording still, and would not begin again
            with self._changed:
                if key in self._asked:
                    self._refused.add(key.owner)
        finally:
            with self._changed:
                if recorded is not None and key in self._asked:
                    self._keep(key, recorded)
                self._asked.discard(key)
                self._changed.notify_all()

    def _keep(self, key: GraphKey, graph: DecodeGraph) -> None:
        self._graphs[key] = graph
        while len(self._graphs) > 1 and (len(self._graphs) > MAX_GRAPHS or self.nbytes > GRAPH_BYTES):
            self._graphs.popitem(last=False)

    def _recorded(self, run: Callable[[], torch.Tensor]) -> DecodeGraph:
        stream = self._prepared_stream()
        free, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(stream), capture_lock:
            if self._pool is None:
                self._begin_pool()
            logits, likeliest = self._capture(graph, lambda: _with_likeliest(run()))
        left, _ = torch.cuda.mem_get_info(self._device)
        return DecodeGraph(graph, logits, likeliest, max(0, free - left))

    def _prepared_stream(self) -> torch.cuda.Stream:
        """The stream that all graphs are recorded on, with what libraries allocate for it and for this thread."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                for dtype in (torch.bfloat16, torch.float32):
                    row = torch.zeros(16, 16, device=self._device, dtype=dtype)
                    torch.nn.functional.linear(row, row, row[0])
            self._stream.synchronize()
        return self._stream

    def _begin_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        anchor = torch.cuda.CUDAGraph()
        self._capture(anchor, lambda: torch.zeros(1, device=self._device))
        self._anchors.append(anchor)

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Callable[[], T]) -> T:
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = run()
        except BaseException:
            with suppress(RuntimeError):  # the stream must leave its recording all the same
                graph.capture_end()
            raise
        graph.capture_end()
        return result


def _with_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits, find_likeliest(logits)


@cache
def graphs_of(device: torch.device) -> GraphCache:
    """The graphs of a device. There is one cache, as there is one memory."""
    return GraphCache(device)


def graph_bytes(device: torch.device) -> int:
    """GPU memory that the graphs of a device hold."""
    return graphs_of(device).nbytes if device.type == "cuda" else 0
