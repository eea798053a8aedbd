"""How fast an 8B-shaped model decodes on a GPU: milliseconds a step through the engine, beside limit and peer.

    python -m bench.decode

Random weights in bfloat16, prompts of about a thousand random tokens. A step's time is from one report of tokens to the
next, once all sequences decode; what the graph took on the GPU is measured by events around it, and the rest is called
overhead, whether host or GPU spent it. The limit is the time in which the weights alone can be read, at the rate at
which the GPU copies memory (bytes read and written). The peer is transformers' static cache with scaled dot product
attention, captured in a CUDA graph, on the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, StaticCache

from bench.report import Bar, report
from bench.synthetic import LLAMA_8B, make_model
from engine.engine import Engine
from engine.graphs import DecodeGraph, graph_bytes, graphs_of
from engine.model import BoundModel
from engine.request import EngineReport, GenerationRequest, RequestFailed, SamplingParams, Tokens
from swapper.cuda_driver import CudaDevice
from swapper.cuda_frames import CudaFramePool
from swapper.geometry import DEFAULT_PAGE_BYTES, kv_frames, pages

CONTEXT, STEPS, WARM_UP = 1024, 64, 8
BATCHES = (1, 32)
STEP_MS = {1: 6.0, 32: 10.0}
OVERHEAD_MS = 0.5
WEIGHT_FRAMES = pages(17 << 30, DEFAULT_PAGE_BYTES)
PATIENCE = 300.0


class GraphTimes:
    """How long each replayed graph took on the GPU."""

    def __init__(self) -> None:
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        replay = DecodeGraph.replay

        def timed(graph: DecodeGraph) -> torch.Tensor:
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            logits = replay(graph)
            ended.record()
            self._events.append((len(logits), began, ended))
            return logits

        DecodeGraph.replay = timed  # type: ignore[method-assign]

    def take(self, bucket: int) -> list[float]:
        """Milliseconds of each replay of a bucket since the last call; graphs that were missed are there afterwards."""
        graphs_of(torch.device("cuda:0")).wait_recorded(PATIENCE)  # nobody may wait for the device meanwhile
        events, self._events = self._events, []
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) for size, began, ended in events if size == bucket]


class Steps:
    """When the engine reported tokens, and of how many sequences."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._times: list[tuple[float, int]] = []
        self._ended = 0

    def emit(self, reports: Sequence[EngineReport]) -> None:
        now = time.perf_counter()
        with self._changed:
            tokens = [one for one in reports if isinstance(one, Tokens)]
            self._times.append((now, len(tokens)))
            self._ended += sum(isinstance(one, RequestFailed) or bool(getattr(one, "finish", None)) for one in reports)
            self._changed.notify_all()

    def take(self, batch: int) -> list[float]:
        """Milliseconds between reports of the whole batch, once all of it has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended >= batch, PATIENCE):
                raise TimeoutError("The engine did not answer.")
            times = [when for when, count in self._times if count == batch]
            self._times, self._ended = [], 0
        return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def copy_rate() -> float:
    """Bytes read and written a second, by the GPU's own copy."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), 10)) / 1e3
    return 2 * source.numel() / seconds


def timed(run: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` runs, by events."""
    run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for began, ended in events:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return [began.elapsed_time(ended) for began, ended in events]


def decode(engine: Engine, steps: Steps, graphs: GraphTimes, model: BoundModel, batch: int) -> dict[str, list[float]]:
    """Run a batch; milliseconds of its steps, of their graphs, and of the rest."""
    generator = torch.Generator().manual_seed(batch)
    for index in range(batch):
        prompt = torch.randint(model.vocab_size, (CONTEXT - STEPS // 2,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + batch)
        engine.submit(GenerationRequest(f"{batch}-{index}", model.name, tuple(prompt), params))
    whole = steps.take(batch)[WARM_UP:]
    on_gpu = graphs.take(batch)[WARM_UP:]
    usual = statistics.median(on_gpu)
    return {"step": whole, "graph": on_gpu, "overhead": [step - usual for step in whole]}


@torch.inference_mode()
def peer(model: BoundModel, batch: int) -> list[float]:
    """Milliseconds a step of transformers over the same weights: static cache, CUDA graph."""
    own = model._module
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(deepcopy(own.config), attn_implementation="sdpa")
    module.load_state_dict(own.state_dict(), assign=True)
    module.model.rotary_emb = own.model.rotary_emb
    module.eval()
    cache = StaticCache(config=module.config, max_cache_len=CONTEXT)
    tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    place = torch.full((batch, 1), CONTEXT - 1, device="cuda")

    def run() -> torch.Tensor:
        return module(input_ids=tokens, position_ids=place, cache=cache, use_cache=True).logits

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    stream.synchronize()
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return timed(graph.replay, 20)


def main() -> int:
    options = argparse.ArgumentParser(description="Measure decode steps of an 8B-shaped model on a GPU.")
    options.add_argument("--no-peer", action="store_true", help="leave transformers' own decode out")
    arguments = options.parse_args()
    rate = copy_rate()
    torch.cuda.empty_cache()
    kv = kv_frames(CONTEXT + 2 * STEPS, 131072, DEFAULT_PAGE_BYTES) * max(BATCHES) + 64
    device = CudaDevice()
    pool = CudaFramePool(device, WEIGHT_FRAMES + kv, DEFAULT_PAGE_BYTES)
    steps, graphs = Steps(), GraphTimes()
    samples: dict[str, list[float]] = {}
    details: dict[str, object] = {"context": CONTEXT, "copy_bytes_per_second": round(rate)}
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(LLAMA_8B, "bfloat16", "8b", pool, Path(directory))
    nbytes = model.weights.shard.nbytes
    samples["limit"] = [1e3 * nbytes / rate]
    engine = Engine(pool, steps.emit, max_batch_tokens=2048)
    engine.add(model, model.weights)  # type: ignore[arg-type]
    engine.grant_kv("8b", kv, 1)
    for batch in BATCHES:
        decode(engine, steps, graphs, model, batch)  # kernels are compiled and graphs recorded
        for name, values in decode(engine, steps, graphs, model, batch).items():
            samples[f"{name}_{batch}"] = values
            print(f"{name}_{batch}: {statistics.median(values):.3f} ms", flush=True)
    details |= {"weight_bytes": nbytes, "graph_bytes": graph_bytes(torch.device("cuda:0"))}
    engine.close()
    if not arguments.no_peer:
        for batch in BATCHES:
            samples[f"peer_{batch}"] = peer(model, batch)
            print(f"peer_{batch}: {statistics.median(samples[f'peer_{batch}']):.3f} ms", flush=True)
    bars = [Bar(f"decode step, batch {n}", statistics.median(samples[f"step_{n}"]), STEP_MS[n], "ms") for n in BATCHES]
    bars += [
        Bar(f"step but for its graph, batch {n}", statistics.median(samples[f"overhead_{n}"]), OVERHEAD_MS, "ms")
        for n in BATCHES
    ]
    return report("decode", bars, samples, details)


if __name__ == "__main__":
    sys.exit(main())
