"""A group's workers are placed together or not at all, and what Ray does not have is told by name at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from swapper.errors import NoPlace
from worker.cluster import NODE_ADDRESS, Cluster
from worker.place import Place, _bundle, _check_existence, _device
from worker.protocol import WorkerSpec

PAIR = [WorkerSpec("pair", rank, 4, 2 << 20, tp=2, compute_threads=3) for rank in range(2)]


def nodes(*resources: dict[str, float]) -> Any:
    return [{f"node:10.0.0.{index}": 1.0, **resource} for index, resource in enumerate(resources)]


def check(device: str, *resources: dict[str, float], node: str | None = None) -> None:
    specs = [replace(spec, node=node) for spec in PAIR]
    _check_existence(specs, [_bundle(spec, device, is_private=False) for spec in specs], nodes(*resources))


def test_what_an_idle_ray_could_give_is_not_refused() -> None:
    check("cuda", {"GPU": 2, "CPU": 6})
    check("cuda", {"GPU": 1, "CPU": 3}, {"GPU": 1, "CPU": 3})
    check("cpu", {"CPU": 6}, node="10.0.0.0")


@pytest.mark.parametrize(
    ("device", "resources", "node", "message"),
    [
        (
            "cuda",
            [{"GPU": 1, "CPU": 64}],
            None,
            "group pair wants 2 workers with 1 GPU and 3 CPU each, but Ray has 1 GPU and 64 CPU in all, on 1 node",
        ),
        ("cuda", [{"CPU": 64}], None, "but Ray has 0 GPU and 64 CPU in all"),
        ("cpu", [{"CPU": 2}] * 4, None, "but Ray has 8 CPU in all, on 4 nodes"),
        ("cpu", [{"CPU": 64}], "10.0.0.9", "wants 2 workers with 3 CPU each on node 10.0.0.9, but Ray has"),
    ],
)
def test_what_ray_does_not_have_is_told_at_once(
    device: str, resources: list[dict[str, float]], node: str | None, message: str
) -> None:
    """Scenario 21: more ranks are asked for than there are."""
    with pytest.raises(NoPlace) as refusal:
        check(device, *resources, node=node)
    assert message in str(refusal.value)


def test_workers_of_a_private_ray_take_no_cpus() -> None:
    assert _bundle(PAIR[0], "cuda", is_private=True) == {"GPU": 1, f"node:{NODE_ADDRESS}": 0.001}


def test_auto_is_a_gpu_only_where_there_is_one() -> None:
    assert _device("auto", has_gpu=False) == "cpu"
    assert _device("cpu", has_gpu=True) == "cpu"
    assert _device("cuda", has_gpu=False) == "cuda"


def test_a_gpu_that_cannot_be_used_for_want_of_packages_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.place._is_installed", lambda package: package != "kvikio")
    assert _device("auto", has_gpu=True) == "cpu"
    assert "kvikio is not installed" in caplog.text
    monkeypatch.setattr("worker.place._is_installed", lambda package: True)
    assert _device("auto", has_gpu=True) == "cuda"


def test_a_real_ray_without_gpus_says_so(cluster: Cluster, loop: asyncio.Runner) -> None:
    spec = WorkerSpec("big", 0, 4, 2 << 20, device="cuda")
    with pytest.raises(NoPlace, match="group big wants 1 worker with 1 GPU, but Ray has 0 GPU in all, on 1 node"):
        loop.run(Place.take(cluster, [spec]))
