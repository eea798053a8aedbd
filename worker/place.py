"""Where a life of a group runs: a Ray placement group with a bundle for each rank.

The bundles are had all together or not at all, so two groups that want the last GPUs never hold half of them each. Ray
packs them on one node where it can. What can never be had as Ray is now (more GPUs than there are) is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swapper.errors import NoPlace
from worker.client import WorkerClient
from worker.cluster import NODE_ADDRESS, Cluster
from worker.protocol import WorkerSpec

PLACE_TIMEOUT = 30.0
"""Seconds to wait for what there is enough of, but others have now."""

WAIT_STEP = 1
"""Second: Ray counts in whole ones. Whoever stops waiting leaves Ray's call behind for so long."""

GIVE_BACK_TIMEOUT = 2.0  # seconds; a Ray that takes longer is dying

GPU_PACKAGES = ("cuda.bindings", "kvikio")

Resources = dict[str, float]

logger = logging.getLogger(__name__)


class Place:
    """Implements `worker.group.Place`."""

    def __init__(self, cluster: Cluster, bundles: Sequence[Resources], device: str, placement: PlacementGroup) -> None:
        self._cluster = cluster
        self._bundles = bundles
        self._device = device
        self._placement = placement

    @staticmethod
    async def take(cluster: Cluster, specs: Sequence[WorkerSpec]) -> Place:
        """Reserve room for all ranks of a group. Raises NoPlace when there is none, within PLACE_TIMEOUT."""
        nodes = await cluster.call(_resources_of_nodes)
        device = _device(specs[0].device, has_gpu=any("GPU" in node for node in nodes))
        bundles = [_bundle(spec, device, cluster.is_private) for spec in specs]
        _check_existence(specs, bundles, nodes)
        placement: PlacementGroup = await cluster.call(placement_group, bundles, "PACK")
        place = Place(cluster, bundles, device, placement)
        try:
            async with asyncio.timeout(PLACE_TIMEOUT):
                while not await cluster.call(placement.wait, WAIT_STEP):
                    pass
        except TimeoutError:
            await place.give_back()
            message = f"{_wish(specs, bundles)}, which did not get free within {PLACE_TIMEOUT:g} s"
            raise NoPlace(message) from None
        except BaseException:
            await place.give_back()
            raise
        return place

    def worker(self, spec: WorkerSpec) -> WorkerClient:
        """A worker for one of the ranks; not started yet."""
        bundle = self._bundles[spec.rank]
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, spec.rank),
        }
        return WorkerClient(self._cluster, replace(spec, device=self._device), options)

    async def give_back(self) -> None:
        """Let others have the room."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_TIMEOUT):
                await self._cluster.call(remove_placement_group, self._placement)


def _bundle(spec: WorkerSpec, device: str, is_private: bool) -> Resources:
    """What one rank takes. A private Ray has no CPUs to share out; a joined one must know what we take."""
    bundle: Resources = {"GPU": 1.0} if device == "cuda" else {}
    if not is_private:
        bundle["CPU"] = float(spec.compute_threads)
    if node := NODE_ADDRESS if is_private else spec.node:
        bundle[f"node:{node}"] = 0.001  # Ray gives each node one of these: a little of it means being there
    return bundle


def _resources_of_nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_existence(specs: Sequence[WorkerSpec], bundles: Sequence[Resources], nodes: Sequence[Resources]) -> None:
    """Raises NoPlace if not even an idle Ray, as it is now, could give all that."""
    wanted = _sum(bundles)
    there = _sum(nodes)
    fits_a_node = all(any(_covers(node, bundle) for node in nodes) for bundle in bundles)
    if fits_a_node and _covers(there, wanted):
        return
    has = _words({kind: there.get(kind, 0) for kind in wanted})
    raise NoPlace(f"{_wish(specs, bundles)}, but Ray has {has} in all, on {_count(len(nodes), 'node')}")


def _sum(parts: Sequence[Resources]) -> Resources:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _covers(there: Resources, wanted: Resources) -> bool:
    return all(there.get(kind, 0) >= amount for kind, amount in wanted.items())


def _wish(specs: Sequence[WorkerSpec], bundles: Sequence[Resources]) -> str:
    """`group pair wants 2 workers with 1 GPU and 8 CPU each`."""
    words = f" with {what}" if (what := _words(bundles[0])) else ""
    each = " each" if what and len(specs) > 1 else ""
    where = f" on node {specs[0].node}" if specs[0].node else ""
    return f"group {specs[0].group} wants {_count(len(specs), 'worker')}{words}{each}{where}"


def _words(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if not kind.startswith("node:"))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _device(wanted: str, has_gpu: bool) -> str:
    """What `auto` means here; anything else means what it says."""
    if wanted != "auto" or not has_gpu:
        return "cpu" if wanted == "auto" else wanted
    if missing := [package for package in GPU_PACKAGES if not _is_installed(package)]:
        logger.warning(
            "There is a GPU, but %s is not installed: workers use the CPU. Install it with: pip install 'gswapd[gpu]'",
            " and ".join(missing),
        )
        return "cpu"
    return "cuda"


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it is part of
        return False
