"""What `gswapd simulate` runs on: models and groups as the configuration and its store have them, or made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from scheduler.core.config import CoreConfig, PolicyName
from scheduler.core.events import ModelSpec
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.translate import model_spec
from server.backend import EXTENT_SECONDS, core_config, worker_specs
from server.catalog import served_model
from server.config import Config, ModelConfig
from server.profile.document import load as load_profile
from swapper.geometry import pages
from swapper.store import Store

MADE_UP = "model-{:02}"


class Known(NamedTuple):
    spec: ModelSpec
    frame_tokens: int  # whose keys and values fill one frame; 0: they take no memory
    costs: tuple[float, float] | None = None  # of its profile: seconds of a pass, and of each token in it


def stored(config: Config) -> list[Known]:
    """The models of the store. Raises StoreError."""
    store, page = Store(config.store), config.memory.page
    known = []
    for image in map(store.open, store.list()):
        served = served_model(image, page, config.models.get(image.manifest.model, ModelConfig()))
        profile = load_profile(image.path, image.identity)
        costs = profile.costs() if profile is not None else None
        tokens = page // served.kv_bytes_per_token if served.kv_bytes_per_token else 0
        known.append(Known(model_spec(served), tokens, costs))
    return known


def made_up(config: Config, count: int, nbytes: int) -> list[Known]:
    """Models of one size for the first configured group, which share no page."""
    mesh = config.cluster.groups[0]
    size = pages(nbytes // mesh.ranks, config.memory.page)

    def shard(number: int) -> tuple[int, ...]:
        return tuple(range(number * size, (number + 1) * size))

    shards = [tuple(shard(model * mesh.ranks + rank) for rank in range(mesh.ranks)) for model in range(count)]
    return [Known(ModelSpec(MADE_UP.format(model + 1), ranks, pp=mesh.pp), 0) for model, ranks in enumerate(shards)]


def priced(
    config: Config, models: Sequence[Known], pass_seconds: float, token_seconds: float, objective: float
) -> list[SimulatedModel]:
    """With what a pass takes, where a model has no profile; `objective` is for those without one of their own."""
    return [
        SimulatedModel(
            known.spec if known.costs is not None else replace(known.spec, run_seconds=pass_seconds),
            *(known.costs or (pass_seconds, token_seconds)),
            kv_frame_tokens=known.frame_tokens,
            max_batch=config.cluster.max_batch_sequences,
            max_batch_tokens=config.cluster.max_batch_tokens,
            objective=known.spec.slo or objective,
        )
        for known in models
    ]


def group_specs(config: Config, count: int, rate: int, storage_rate: int) -> list[GroupSpec]:
    """The configured groups, or `count` like the first of them."""
    configured = config.cluster.groups
    chosen = [(group.name, group) for group in configured]
    if count:
        chosen = [(f"{configured[0].name}-{number + 1}", configured[0]) for number in range(count)]
    specs = []
    for name, group in chosen:
        ranks = worker_specs(config, group)
        leader = ranks[0]
        specs.append(
            GroupSpec(
                name,
                leader.frames,
                leader.page_bytes,
                host_rate=float(rate),
                storage_rate=float(storage_rate),
                host_pages=leader.tier_bytes // leader.page_bytes,
                node=leader.node or "node",
                ranks=len(ranks),
                pp=leader.pp,
            )
        )
    return specs


def simulated_config(config: Config, groups: Sequence[GroupSpec], policy: PolicyName | None) -> CoreConfig:
    """As the daemon's, with extents that suit the simulated link."""
    extent = max(1, round(groups[0].host_rate * EXTENT_SECONDS / groups[0].page_bytes))
    own = core_config(config)
    return replace(own, extent_pages=extent, policy=policy or own.policy)
