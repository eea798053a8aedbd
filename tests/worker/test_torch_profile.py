"""torch.profiler beside a recording: work of all threads is in its trace, and NCCL's kernels become spans."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from worker.torch_profile import TorchProfile


def test_a_trace_has_what_other_threads_computed() -> None:
    matrix = torch.ones(8, 8)
    with ThreadPoolExecutor(1) as busy, ThreadPoolExecutor(1) as other:
        busy.submit(torch.mm, matrix, matrix).result()  # it is there before the profiler
        profile = TorchProfile("trace")
        busy.submit(torch.mm, matrix, matrix).result()
        trace, spans = other.submit(profile.end).result()
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    assert spans == (), "there was no collective"


def test_kernels_of_collectives_are_spans_by_the_recording_s_clock() -> None:
    profile = TorchProfile("kernels")
    assert profile.end() == (b"", ())

    def event(name: str, at: int) -> SimpleNamespace:
        start = profile._began + at * 1_000_000
        return SimpleNamespace(name=lambda: name, start_ns=lambda: start, duration_ns=lambda: 2_000_000)

    events = [event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 5), event("gemm", 6)]
    profile._profile.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))  # type: ignore[assignment]
    (span,) = profile._spans()
    assert (span.name, span.at, span.seconds) == ("all_reduce", 0.005, 0.002)
