"""What a step of a mesh costs beside its forward pass: from the leader's plan to the start of the last rank's pass.

    python -m bench.mesh_step

Two processes with the leader's and a follower's real engine parts and a model that computes nothing, for batches of
decodes. No collective can begin before that, so it is what a mesh adds to a step, together with the collectives
themselves. One block table in sixteen grows at each step, as they do.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.report import Bar, report
from engine.batch import SequenceSlice, StepBatch
from engine.blocks import BlockChanges
from engine.follower import FollowerEngine
from engine.leader import Leader
from engine.mesh import Mesh, MeshRank
from swapper.frames import Region
from swapper.geometry import GRANULE_BYTES, KV_BLOCK_TOKENS
from swapper.host_frames import HostFramePool
from swapper.image import LayerExtent, Shard

BAR_US = 1000.0
STEPS, WARM_UP = 300, 50
CASES = ((1, 1024), (32, 1024), (64, 1024), (64, 32768))
"""Sequences, and tokens that each has."""


class _Weights:
    """A shard of one layer whose pages are all in."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.shard = Shard(0, "", 0, 4096, (), (), (LayerExtent("layer", 0, 4096),))

    def is_ready(self, nbytes: int) -> bool:
        return True

    def wait(self, nbytes: int, given_up: Callable[[], bool], also: Callable[[], bool] = lambda: True) -> None:
        while not also():
            time.sleep(1e-4)

    def wake(self) -> None: ...


class _Nothing:
    """A model whose forward pass takes no time, and notes when it began."""

    name, context_length, kv_bytes_per_token = "nothing", 4096, 64

    def __init__(self) -> None:
        self.began: list[float] = []

    def kv_cache(self, region: Region) -> Region:
        return region

    def forward(self, batch: StepBatch, kv: object, gate: Callable[[int], None], tokens: object = None) -> None:
        gate(4096)
        self.began.append(time.monotonic())

    def close(self) -> None: ...


def _batches(sequences: int, tokens: int) -> list[StepBatch]:
    blocks = tokens // KV_BLOCK_TOKENS
    tables = [tuple(range(own * 10_000, own * 10_000 + blocks)) for own in range(sequences)]
    batches = []
    for step in range(WARM_UP + STEPS):
        for own in range(step % 16, sequences, 16):
            tables[own] = (*tables[own], tables[own][-1] + 1)
        slices = tuple(SequenceSlice(own, 1, tokens + step, tables[own]) for own in range(sequences))
        batches.append(StepBatch((7,) * sequences, (tokens,) * sequences, slices, tuple(range(sequences))))
    return batches


def _follow(rendezvous: str, pipe: Connection) -> None:
    mesh = Mesh.join(MeshRank(2, 1, 1), rendezvous, torch.device("cpu"), 60)
    pool = HostFramePool(4, GRANULE_BYTES)
    engine = FollowerEngine(pool, lambda reports: None, mesh)
    model = _Nothing()
    engine.add(model, _Weights(pool.reserve(4096)))  # type: ignore[arg-type]
    while pipe.recv():
        began, model.began = model.began, []
        pipe.send(began)
    engine.close()


def _lead(mesh: Mesh, pipe: Connection) -> dict[str, list[float]]:
    pool = HostFramePool(4, GRANULE_BYTES)
    leader = Leader(mesh)
    weights: Any = _Weights(pool.reserve(4096))
    led = leader.lead("nothing", weights, BlockChanges())
    led.begin(_batches(1, 16)[0])
    led.wait(4096, lambda: False)
    samples: dict[str, list[float]] = {}
    for sequences, tokens in CASES:
        planned, told = [], []
        for batch in _batches(sequences, tokens):
            planned.append(time.monotonic())
            led.begin(batch)
            assert led.go_on(4096)
            told.append(time.monotonic())
            leader.sync()  # as collectives would
        pipe.send(True)
        began = pipe.recv()[-STEPS:]
        name = f"{sequences} × {tokens:,}"
        samples[f"{name}, leader"] = [(b - a) * 1e6 for a, b in zip(planned, told, strict=True)][-STEPS:]
        samples[f"{name}, until all run"] = [
            (max(b, c) - a) * 1e6 for a, b, c in zip(planned[-STEPS:], told[-STEPS:], began, strict=True)
        ]
    return samples


def main() -> int:
    rendezvous = "127.0.0.1:29741"
    processes = multiprocessing.get_context("spawn")
    own, its = processes.Pipe()
    follower = processes.Process(target=_follow, args=(rendezvous, its), daemon=True)
    follower.start()
    mesh = Mesh.join(MeshRank(2, 1, 0), rendezvous, torch.device("cpu"), 60)
    samples = _lead(mesh, own)
    own.send(False)
    follower.join(60)
    mesh.close()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    bars = [
        Bar(
            f"{sequences} decodes of {tokens:,} tokens",
            medians[f"{sequences} × {tokens:,}, until all run"],
            BAR_US,
            "µs",
        )
        for sequences, tokens in CASES
    ]
    return report("mesh_step", bars, samples)


if __name__ == "__main__":
    sys.exit(main())
