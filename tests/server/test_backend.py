"""What workers are started with, out of the configuration."""

from __future__ import annotations

import os
from typing import Any

from server.backend import worker_specs
from server.config import Config
from worker.protocol import WorkerSpec

PAGE = 2 << 20


def specs(memory: dict[str, Any], *groups: dict[str, Any]) -> list[WorkerSpec]:
    config = Config(memory={"page": PAGE, **memory}, cluster={"groups": groups})  # type: ignore[arg-type]
    return [spec for group in config.cluster.groups for spec in worker_specs(config, group)]


def test_every_rank_has_its_place_in_the_mesh_and_a_host_tier_of_its_own() -> None:
    found = specs({"pool": "1GiB"}, {"name": "square", "tp": 2, "pp": 2}, {"name": "one"})
    assert [(spec.group, spec.rank, spec.tp, spec.pp) for spec in found] == [
        *(("square", rank, 2, 2) for rank in range(4)),
        ("one", 0, 1, 1),
    ]
    assert all(spec.tiers == {spec.tier_name for spec in found} for spec in found)
    assert len(found[0].tiers) == 5


def test_a_size_is_each_workers_and_a_share_is_all_workers() -> None:
    sized = specs({"pool": "1GiB"}, {"name": "pair", "tp": 2}, {"name": "large", "pool": "2GiB"})
    assert [spec.frames * PAGE for spec in sized] == [1 << 30, 1 << 30, 2 << 30]
    assert [spec.pool_share for spec in sized] == [None] * 3
    [alone] = specs({"pool": "50%"}, {})
    shared = specs({"pool": "50%"}, {"name": "pair", "tp": 2}, {"name": "one"})
    assert all(0.9 < 3 * spec.frames / alone.frames < 1.1 for spec in shared)
    assert [spec.pool_share for spec in shared] == [0.5] * 3, "a GPU belongs to one worker"


def test_the_cores_are_shared_among_the_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [spec.compute_threads for spec in specs({}, {"tp": 2})] == [max(1, (cores - 1) // 2)] * 2


def test_gpus_of_one_daemon_meet_in_one_place_and_a_lone_one_or_a_cpu_nowhere() -> None:
    pair, one, cpu = {"name": "pair", "tp": 2, "device": "cuda"}, {"device": "cuda"}, {"name": "cpu", "device": "cpu"}
    found = specs({}, pair, one, cpu)
    assert len({spec.peers for spec in found[:3]}) == 1
    assert [bool(spec.peers) for spec in found] == [True, True, True, False]
    assert not any(spec.peers for spec in specs({}, one) + specs({"peers": "off"}, pair))
