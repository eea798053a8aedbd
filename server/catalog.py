"""The models of the store as the server sees them, kept up to date while it serves.

A cheap version of the store is compared every second, and when a name is asked for that is not known, so that a model
can be used the moment `gswapd add` returns. What came or went is told to the scheduler. An image that cannot be served
is reported, by the log and by `/admin/models`, and keeps nobody from the others. Whatever is wrong is logged when it
begins, not every second.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from scheduler.interface import Scheduler, ServedModel
from server.config import GroupConfig, ModelConfig
from server.keep_alive import FOREVER
from server.profile.document import load as load_profile
from swapper.errors import CorruptImage, ModelNotFound, Refused, StoreError
from swapper.image import MANIFEST, Embedding, Image
from swapper.store import Store, StoreVersion

logger = logging.getLogger(__name__)

REFRESH_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that can be asked for."""

    name: str
    path: Path
    context_length: int
    created: int  # unix time of its publication
    stamp: tuple[int, int]  # of its manifest: another one if the name was removed and added again
    config: ModelConfig
    identity: str
    architecture: str
    dtype: str
    parameters: int
    nbytes: int
    embedding: Embedding | None = None  # of an encoder; None: it generates text


Found = tuple[CatalogModel, ServedModel]


class Watcher(Protocol):
    """Told which models there are: `server.metrics.Metrics`."""

    def know(self, model: str) -> None: ...

    def forget(self, model: str) -> None: ...


def _stamp(path: Path) -> tuple[int, int]:
    status = (path / MANIFEST).stat()
    return status.st_mtime_ns, status.st_ino


def served_model(image: Image, page_bytes: int, config: ModelConfig) -> ServedModel:
    """An image as the scheduler must know it."""
    manifest = image.manifest
    profile = load_profile(image.path, image.identity)
    served = ServedModel(
        name=manifest.model,
        path=str(image.path),
        identity=image.identity,
        page_bytes=page_bytes,
        page_hashes=_page_hashes(image, page_bytes),
        nbytes=sum(shard.nbytes for shard in manifest.shards),
        kv_bytes_per_token=manifest.kv_bytes_per_token,
        context_length=manifest.context_length,
        pp=manifest.pp,
        page_seconds=profile.page_seconds(page_bytes) if profile is not None else None,
        run_seconds=profile.run_seconds() if profile is not None else None,
        profiled=profile.made if profile is not None else None,
    )
    return expected(served, config)


def expected(served: ServedModel, config: ModelConfig) -> ServedModel:
    """The same with what a configuration expects of it."""
    return replace(served, max_wait=config.max_wait, slo=config.slo, priority=config.priority, ttl=config.ttl)


def _page_hashes(image: Image, page_bytes: int) -> tuple[tuple[str, ...], ...]:
    """For each rank. Ranks move in lockstep: one with fewer pages than another counts as if it had as many."""
    hashes = [shard.page_hashes(page_bytes) for shard in image.manifest.shards]
    most = max(map(len, hashes))
    return tuple(
        (*its, *(blake3(f"{image.identity} {rank} {page}".encode()).hexdigest() for page in range(len(its), most)))
        for rank, its in enumerate(hashes)
    )


class Catalog:
    """The models that are served, by name and alias. Belongs to the event loop; only the store is read in a thread."""

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        configs: Mapping[str, ModelConfig],
        page_bytes: int,
        groups: Sequence[GroupConfig],
        watcher: Watcher,
    ) -> None:
        self.models: dict[str, CatalogModel] = {}
        self.problems: dict[str, str] = {}  # what is in the store and cannot be served: name -> why
        self._store = store
        self._scheduler = scheduler
        self._configs = configs
        self._page_bytes = page_bytes
        self._groups = groups
        self._watcher = watcher
        self._aliases = {alias: name for name, config in configs.items() for alias in config.aliases}
        self._colliding: frozenset[str] = frozenset()  # aliases that are also names in the store
        self._unreadable = ""  # why the store could not be read when last looked at
        self._looked = False
        self._version: StoreVersion | None = None
        self._found: dict[str, Found] = {}  # by the last look at the store
        self._kept: dict[str, float] = {}  # times to live that requests have asked for
        self._refreshing = asyncio.Lock()
        self._warming: set[asyncio.Task[None]] = set()
        self._workers_up = asyncio.Event()

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names of a model; not one that a model in the store has for its own."""
        configured = self._configs[name].aliases if name in self._configs else ()
        return tuple(alias for alias in configured if alias not in self._colliding)

    async def find(self, name: str) -> CatalogModel:
        """A model by its name or alias. Raises ModelNotFound, or CorruptImage if it is there and cannot be served."""
        if name not in self._colliding:
            name = self._aliases.get(name, name)
        if name not in self.models:
            await self.refresh()
        if name in self.models:
            return self.models[name]
        if name in self.problems:
            raise CorruptImage(f"Model {name!r} cannot be served: {self.problems[name]}")
        raise ModelNotFound(f"The model {name!r} does not exist. GET /v1/models lists those that do.")

    def ttl(self, name: str) -> float | None:
        """Seconds of idleness after which a model's pages go; None: they stay until they are in the way."""
        ttl = self._kept.get(name, self.models[name].config.ttl)
        return None if ttl is None or ttl == FOREVER else ttl

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Give a model another time to live, until this is called again; None: the configuration's."""
        if name not in self.models or self._kept.get(name) == seconds:
            return
        if seconds is None:
            del self._kept[name]
        else:
            self._kept[name] = seconds
        self._scheduler.change_model(replace(self._found[name][1], ttl=self.ttl(name)))

    async def reconfigure(self, configs: Mapping[str, ModelConfig]) -> None:
        """Take over what the configuration says of models now. Nothing that is the same is touched."""
        async with self._refreshing:  # a look at the store that is under way describes models as they were configured
            self._configs = configs
            self._aliases = {alias: name for name, config in configs.items() for alias in config.aliases}
            self._collide(self._aliases.keys() & (self._found.keys() | self.problems.keys()))
            for name, (model, served) in list(self._found.items()):
                config = configs.get(name, ModelConfig())
                if config != model.config:
                    self._found[name] = (replace(model, config=config), expected(served, config))
                    if name in self.models:
                        await self._changed(name, model.config)

    async def _changed(self, name: str, before: ModelConfig) -> None:
        model, served = self._found[name]
        self.models[name] = model
        self._kept.pop(name, None)
        self._scheduler.change_model(served)
        config = model.config
        if before.pinned and not config.pinned:
            try:
                await self._scheduler.unpin(name)
            except Refused as refusal:  # no reason to leave the models behind it as they were configured before
                logger.error("Model %s could not be unpinned as configured: %s", name, refusal)
        elif (config.pinned and not before.pinned) or (config.preload and not before.preload):
            self._begin_warming(model)
        logger.info("Model %s is configured otherwise now", name)

    async def run(self) -> None:
        """Keep the catalog up to date, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_INTERVAL)

    async def refresh(self) -> None:
        """Compare the store with what is known, and tell the scheduler of the difference. What cannot be read now is
        served as it was known.
        """
        async with self._refreshing:
            try:
                version = await asyncio.to_thread(self._store.version)
                if version == self._version:
                    self._unreadable = ""
                    return
                found, problems = await asyncio.to_thread(self._scan)
            except OSError as error:
                if self._unreadable != str(error):
                    logger.error("The store %s cannot be read: %s", self._store.root, error)
                self._unreadable = str(error)
                return
            self._unreadable = ""
            self._compare(found, problems, version)
            if not self._looked:
                self._looked = True
                self._warn_of_missing()

    def _compare(self, found: dict[str, Found], problems: dict[str, str], version: StoreVersion) -> None:
        for name, why in problems.items():
            if self.problems.get(name) != why:
                logger.error("Model %s cannot be served: %s", name, why)
        self.problems = problems
        self._found = found
        self._collide(self._aliases.keys() & (found.keys() | problems.keys()))
        for name in [n for n, known in self.models.items() if n not in found or found[n][0] != known]:
            self._remove(name)
        # A model that is on its way out, its last request still running, cannot be added again yet.
        leaving = {status.name for status in self._scheduler.models()} - self.models.keys()
        for name in sorted(found.keys() - self.models.keys() - leaving):
            self._add(*found[name])
        self._version = None if leaving & found.keys() else version  # None: look again soon

    def _collide(self, aliases: Set[str]) -> None:
        for alias in sorted(aliases - self._colliding):
            logger.error(
                "models.%s: alias %s is the name of another model in the store, and means that one. "
                "Choose another alias.",
                self._aliases[alias],
                alias,
            )
        self._colliding = frozenset(aliases)

    def _warn_of_missing(self) -> None:
        """After the first look: what whoever started the daemon may not have meant."""
        if not self._found and not self.problems:
            logger.warning(
                "The store %s %s. Add a model with: gswapd add CHECKPOINT --name NAME --store %s",
                self._store.root,
                "is empty" if self._store.root.exists() else "does not exist",
                self._store.root,
            )
        for name in sorted(self._configs.keys() - self._found.keys() - self.problems.keys()):
            config = self._configs[name]
            wish = "to be pinned" if config.pinned else "to be preloaded" if config.preload else "configured"
            logger.warning(
                "Model %s is %s and is not in the store. Add it with: gswapd add CHECKPOINT --name %s --store %s",
                name,
                wish,
                name,
                self._store.root,
            )

    def _scan(self) -> tuple[dict[str, Found], dict[str, str]]:
        found: dict[str, Found] = {}
        problems: dict[str, str] = {}
        for name in self._store.list():
            try:
                known = self._found.get(name)
                if known is not None and _stamp(known[0].path) == known[0].stamp:
                    found[name] = known  # large manifests take long to read: each is read once
                else:
                    found[name] = self._describe(name, self._store.open(name))
            except (ModelNotFound, FileNotFoundError):
                continue  # removed since it was listed
            except (StoreError, OSError) as error:
                problems[name] = str(error)
        return found, problems

    def _describe(self, name: str, image: Image) -> Found:
        stamp = _stamp(image.path)
        manifest = image.manifest
        if not any((group.tp, group.pp) == (manifest.tp, manifest.pp) for group in self._groups):
            shapes = ", ".join(f"{group.name} has tp {group.tp}, pp {group.pp}" for group in self._groups)
            raise StoreError(
                f"It is packed for tp {manifest.tp}, pp {manifest.pp}, and no group has that shape ({shapes}). "
                "Configure one in cluster.groups, or remove the model and add it again for a shape that there is."
            )
        model = CatalogModel(
            name=name,
            path=image.path,
            context_length=manifest.context_length,
            created=stamp[0] // 1_000_000_000,
            stamp=stamp,
            config=self._configs.get(name, ModelConfig()),
            identity=image.identity,
            architecture=manifest.architecture,
            dtype=manifest.dtype,
            parameters=sum(math.prod(tensor.shape) for shard in manifest.shards for tensor in shard.tensors),
            nbytes=sum(shard.nbytes for shard in manifest.shards),
            embedding=manifest.embedding,
        )
        return model, served_model(image, self._page_bytes, model.config)

    def _add(self, model: CatalogModel, served: ServedModel) -> None:
        self._scheduler.add_model(served)
        self._watcher.know(model.name)
        self.models[model.name] = model
        logger.info("Model %s can be asked for now", model.name)
        if model.config.pinned or model.config.preload:
            self._begin_warming(model)

    def _remove(self, name: str) -> None:
        del self.models[name]
        self._kept.pop(name, None)
        self._scheduler.remove_model(name)
        self._watcher.forget(name)
        logger.info("Model %s was removed from the store", name)

    def _begin_warming(self, model: CatalogModel) -> None:
        warming = asyncio.create_task(self._warm(model), name=f"warm {model.name}")
        self._warming.add(warming)
        warming.add_done_callback(self._warming.discard)

    async def _warm(self, model: CatalogModel) -> None:
        """What the configuration wants of a model from the start. Before workers are up, no pin could be promised."""
        await self._workers_up.wait()
        try:
            if model.config.pinned:
                await self._scheduler.pin(model.name)
            if model.config.preload:
                await self._scheduler.load(model.name)
        except Refused as refusal:
            wish = "pinned" if model.config.pinned else "preloaded"
            logger.error("Model %s could not be %s as configured: %s", model.name, wish, refusal)

    def workers_are_up(self) -> None:
        self._workers_up.set()

    async def settled(self) -> None:
        """Return once what is configured to be in memory is in, or was refused."""
        await asyncio.gather(*self._warming)

    async def close(self) -> None:
        for warming in list(self._warming):
            warming.cancel()
            with suppress(asyncio.CancelledError):
                await warming
