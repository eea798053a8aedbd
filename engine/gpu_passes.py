"""Forward passes of one model on a GPU: attention by Triton kernels, and decodes as CUDA graphs where they can be.

A pass is launched and not waited for. It runs on the device's pass stream; whoever needs its end, or is about to take
memory from under it, waits for that stream. Imported for models on a GPU only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine import triton_attention
from engine.attention import PagedPass
from engine.batch import StepBatch
from engine.graphs import GraphKey, bucket_of, graphs_of
from engine.kv_cache import PagedKvCache
from engine.step_inputs import DecodeStaging, Staging, StepTensors, decode_row, decodes_only
from engine.streams import pass_stream
from swapper.geometry import kv_blocks

if TYPE_CHECKING:
    from engine.attention import Pass
    from engine.mesh import Traffic
    from engine.model import PageGate

RECORD_TIMEOUT = 30.0
"""Seconds that a pass with other ranks waits for the recording of its graph."""

RECORDING_TIMEOUT = 1.0
"""Seconds that a model's pages stay for a recording, which takes about a tenth of that."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Pass"], torch.Tensor]
"""Runs a module on token ids, positions and sampled rows; logits of the sampled rows out."""


class TritonPass:
    """The attention of one forward pass over a paged KV cache on a GPU."""

    def __init__(self, inputs: StepTensors, cache: PagedKvCache, gate: PageGate) -> None:
        self.gate = gate
        self._inputs = inputs
        self._cache = cache

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
        triton_attention.write(key, value, layer, self._cache, self._inputs)
        return triton_attention.attend(query, layer, self._cache, self._inputs, scaling, window, softcap, sinks)


class GpuPasses:
    """Runs one model's passes. Not for several threads at once."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        run: Run,
        is_ready: Callable[[int], bool],
        nbytes: int,
        context_length: int,
        traffic: Traffic | None = None,
        plain: bool = False,
    ) -> None:
        """`is_ready` tells whether so many bytes of the model's weights are in; it has `nbytes`. `traffic` counts the
        collectives of its passes, if it has other ranks. With `plain`, nothing runs through kernels or graphs of ours.
        """
        self._name = name
        self._run = run
        self._is_ready = is_ready
        self._nbytes = nbytes
        self._device = device
        self._traffic = traffic
        self._plain = plain
        self._moved: dict[int, Traffic] = {}  # by a decode, by bucket
        self._staging = Staging(device)
        self._graphs = graphs_of(device)
        self._decodes = DecodeStaging(decode_row(device, kv_blocks(context_length)))
        self._owner = object()  # of the graphs; another model may come to have this one's name and addresses
        weakref.finalize(self, self._graphs.forget, self._owner)
        self.likeliest: torch.Tensor | None = None
        """The likeliest token of each row of the last pass, as `find_likeliest` has it, if a graph has found them."""

    def forward(
        self, batch: StepBatch, cache: PagedKvCache, gate: PageGate, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """Launch a pass. Logits are of the model's own type, and good until the next pass."""
        stream, caller = pass_stream(self._device), torch.cuda.current_stream(self._device)
        assert stream is not None
        if caller == stream:
            return self._forward(batch, cache, gate, tokens)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            logits = self._forward(batch, cache, gate, tokens)
        caller.wait_stream(stream)
        return logits

    def _forward(
        self, batch: StepBatch, cache: PagedKvCache, gate: PageGate, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        self.likeliest = None
        if self._plain:
            inputs = self._staging.copy(batch, tokens)
            return self._run(inputs.tokens, inputs.positions, inputs.sampled, PagedPass(batch, cache, gate, True))
        bucket = bucket_of(len(batch.slices)) if decodes_only(batch) and batch.in_one else None
        if bucket is not None and (self._is_decided or self._may_replay()):
            gate(self._nbytes)  # a graph has no gates
            self._decodes.copy(batch, bucket, tokens)
            return self._decode(bucket, cache, gate)[: len(batch.slices)]
        return self._eager(self._staging.copy(batch, tokens), cache, gate)

    @property
    def _is_decided(self) -> bool:
        """Whether a batch tells by itself that a graph may run it. Ranks of a mesh must not differ in that: graphs pad
        batches, and so what their collectives move."""
        return self._traffic is not None

    def _may_replay(self) -> bool:
        return self._graphs.may_record(self._owner) and self._is_ready(self._nbytes)

    def _decode(self, bucket: int, cache: PagedKvCache, gate: PageGate) -> torch.Tensor:
        """A pass over the row's decodes: replayed, or run in the same shape until there is a graph of it."""
        key = GraphKey(self._owner, cache.region.address, bucket)
        graph = self._graphs.find(key)
        if graph is not None:
            self.likeliest = graph.likeliest
            if self._traffic is not None:
                self._traffic.add(self._moved[bucket])
            return graph.replay()
        before = None if self._traffic is None else self._traffic.copy()
        # A copy of the row: between two layers others may launch decodes of theirs.
        logits = self._eager(self._decodes.tensors(bucket, in_copy=True), cache, gate)
        inputs = self._decodes.tensors(bucket)
        self._graphs.ask(key, self._name, lambda: self._eager(inputs, cache, _open))
        if self._traffic is not None and before is not None:
            self._moved[bucket] = self._traffic.since(before)
            # A recording's collectives must not mix with a pass's, so nothing is launched meanwhile; nor do they count.
            after = self._traffic.copy()
            self._graphs.wait_recorded(RECORD_TIMEOUT)
            self._traffic.add(self._traffic.since(after), -1)
        return logits

    def _eager(self, inputs: StepTensors, cache: PagedKvCache, gate: PageGate) -> torch.Tensor:
        return self._run(inputs.tokens, inputs.positions, inputs.sampled, TritonPass(inputs, cache, gate))

    def rehearse(self, batch: StepBatch, cache: PagedKvCache) -> torch.Tensor:
        """Run a pass on the current stream, beside all others: for a model that serves nobody, on memory of its own."""
        return self._eager(self._staging.copy(batch), cache, _open)

    def settle(self) -> None:
        """Let a recording of the model's end, for which its pages must be in: or a model that leaves as soon as it has
        answered would never have a graph."""
        self._graphs.wait_recorded(RECORDING_TIMEOUT, self._owner)

    def close(self) -> None:
        """Drop the model's graphs."""
        self._graphs.forget(self._owner)


def _open(nbytes: int) -> None:
    """The gate of what waits for nothing: a recording, a rehearsal."""
