"""The store, followed while it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.catalog import Catalog
from server.config import GroupConfig, ModelConfig
from swapper.errors import CorruptImage, ModelNotFound, Refused
from swapper.image import MANIFEST
from swapper.store import Store
from tests.server.conftest import publish
from tests.server.fakes import FakeScheduler

Make = Callable[..., Catalog]

GROUPS = (GroupConfig(), GroupConfig(name="deep", pp=3))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def make(store: Store, scheduler: FakeScheduler, forgotten: list[str]) -> Make:
    return lambda **configs: Catalog(store, scheduler, configs, 2 << 20, GROUPS, Watch(forgotten))


class Watch:
    def __init__(self, forgotten: list[str]) -> None:
        self.known: list[str] = []
        self.forget = forgotten.append

    def know(self, model: str) -> None:
        self.known.append(model)


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_a_store_that_is_not_there_is_empty(make: Make) -> None:
    catalog = make()
    run(catalog.refresh())
    assert catalog.models == {}


def test_a_model_is_told_to_the_scheduler(make: Make, store: Store, scheduler: FakeScheduler, smollm2: Path) -> None:
    publish(store, "a", smollm2)
    run(make().refresh())
    served = scheduler.served["a"]
    assert served.path == str(store.open("a").path)
    assert [len(rank) for rank in served.page_hashes] == [1]
    assert (served.nbytes, served.kv_bytes_per_token, served.page_bytes) == (4096, 1024, 2 << 20)


def test_a_model_can_be_asked_for_the_moment_it_is_added(make: Make, store: Store, smollm2: Path) -> None:
    async def scenario() -> None:
        catalog = make()
        await catalog.refresh()
        with pytest.raises(ModelNotFound):
            await catalog.find("a")
        publish(store, "a", smollm2)
        assert (await catalog.find("a")).name == "a"

    run(scenario())


def test_a_removed_model_goes(
    make: Make, store: Store, scheduler: FakeScheduler, smollm2: Path, forgotten: list[str]
) -> None:
    async def scenario() -> None:
        catalog = make()
        publish(store, "a", smollm2)
        publish(store, "b", smollm2)
        await catalog.refresh()
        store.remove("a")
        await catalog.refresh()
        assert set(catalog.models) == set(scheduler.served) == {"b"}

    run(scenario())
    assert forgotten == ["a"]


def test_a_model_that_was_replaced_waits_until_the_old_one_is_gone(
    make: Make, store: Store, scheduler: FakeScheduler, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        catalog = make()
        publish(store, "a", smollm2)
        await catalog.refresh()
        monkeypatch.setattr(scheduler, "remove_model", lambda _: None)  # its last request still runs
        store.remove("a")
        await catalog.refresh()
        publish(store, "a", smollm2)
        await catalog.refresh()
        assert catalog.models == {}
        scheduler.statuses.clear()
        await catalog.refresh()
        assert set(catalog.models) == {"a"}

    run(scenario())


def test_a_corrupt_image_is_reported_once_and_keeps_nobody_from_the_others(
    make: Make, store: Store, smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        catalog = make()
        for name in ("good", "torn", "short"):
            publish(store, name, smollm2)
        (store.open("torn").path / MANIFEST).write_text("{")
        (store.open("short").path / "rank-0.safetensors").write_bytes(b"")
        with caplog.at_level(logging.ERROR):
            await catalog.refresh()
            publish(store, "another", smollm2)
            await catalog.refresh()
        assert set(catalog.models) == {"good", "another"}
        assert set(catalog.problems) == {"torn", "short"}
        with pytest.raises(CorruptImage, match="cannot be served"):
            await catalog.find("torn")

    run(scenario())
    assert len(caplog.messages) == 2


def test_an_image_for_another_mesh_is_refused(make: Make, store: Store, smollm2: Path) -> None:
    publish(store, "wide", smollm2, tp=2)
    catalog = make()
    run(catalog.refresh())
    assert catalog.problems["wide"].startswith(
        "It is packed for tp 2, pp 1, and no group has that shape (default has tp 1, pp 1, deep has tp 1, pp 3)."
    )


def test_an_image_for_the_mesh_of_any_group_is_served_with_as_many_pages_on_every_rank(
    make: Make, store: Store, scheduler: FakeScheduler, smollm2: Path
) -> None:
    publish(store, "long", smollm2, pp=3)
    catalog = make()
    run(catalog.refresh())
    served = scheduler.served["long"]
    assert served.pp == 3
    assert [len(rank) for rank in served.page_hashes] == [1, 1, 1]


def test_a_manifest_is_read_once(make: Make, store: Store, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_image = store.open
    monkeypatch.setattr(store, "open", lambda name: (opened.append(name), open_image(name))[1])

    async def scenario() -> None:
        catalog = make()
        for name in ("a", "b"):
            publish(store, name, smollm2)
            await catalog.refresh()

    run(scenario())
    assert opened == ["a", "b"]


def test_aliases(make: Make, store: Store, smollm2: Path) -> None:
    async def scenario() -> None:
        catalog = make(a=ModelConfig(aliases=("x",)), gone=ModelConfig(aliases=("y",)))
        publish(store, "a", smollm2)
        assert (await catalog.find("x")).name == "a"
        with pytest.raises(ModelNotFound):
            await catalog.find("y")

    run(scenario())


def test_what_is_configured_to_be_in_memory_is_brought_in(
    make: Make, store: Store, scheduler: FakeScheduler, smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        catalog = make(a=ModelConfig(pinned=True), b=ModelConfig(preload=True))
        scheduler.refusals["load"] = Refused("no_memory", "It does not fit.")
        publish(store, "a", smollm2)
        publish(store, "b", smollm2)
        publish(store, "c", smollm2)
        await catalog.refresh()
        await asyncio.sleep(0)
        assert scheduler.jobs == [], "without workers no pin could be promised"
        catalog.workers_are_up()
        await catalog.settled()
        assert sorted(scheduler.jobs) == [("load", "b"), ("pin", "a")]

    run(scenario())
    assert "Model b could not be preloaded as configured: It does not fit." in caplog.messages


def test_it_follows_the_store_by_itself(
    make: Make, store: Store, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        catalog = make()
        added = asyncio.Event()
        add_model = catalog._scheduler.add_model
        monkeypatch.setattr(catalog._scheduler, "add_model", lambda model: (add_model(model), added.set()))
        monkeypatch.setattr("server.catalog.REFRESH_INTERVAL", 0.01)
        following = asyncio.create_task(catalog.run())
        publish(store, "a", smollm2)
        await added.wait()
        following.cancel()

    run(scenario())


def test_a_model_of_the_store_wins_over_an_alias(
    make: Make, store: Store, smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        catalog = make(a=ModelConfig(aliases=("b", "x")))
        publish(store, "a", smollm2)
        assert (await catalog.find("b")).name == "a"
        publish(store, "b", smollm2)
        await catalog.refresh()
        publish(store, "c", smollm2)
        await catalog.refresh()
        assert (await catalog.find("b")).name == "b"
        assert (await catalog.find("x")).name == "a"
        assert catalog.aliases("a") == ("x",)
        store.remove("b")
        await catalog.refresh()
        assert (await catalog.find("b")).name == "a"

    with caplog.at_level(logging.ERROR):
        run(scenario())
    (message,) = caplog.messages
    assert "alias b" in message


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("made", "state"), [(False, "does not exist"), (True, "is empty")])
def test_a_store_with_nothing_in_it_is_told_of_once_with_the_cure(
    make: Make, store: Store, caplog: pytest.LogCaptureFixture, made: bool, state: str
) -> None:
    async def scenario() -> None:
        if made:
            store.root.mkdir()
        catalog = make()
        for _ in range(3):
            await catalog.refresh()

    run(scenario())
    (message,) = warnings(caplog)
    assert state in message
    assert f"gswapd add CHECKPOINT --name NAME --store {store.root}" in message


def test_a_store_that_cannot_be_read_is_told_of_once_and_what_is_known_is_served(
    make: Make, store: Store, smollm2: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> Any:
        raise PermissionError("not yours")

    async def scenario() -> None:
        catalog = make()
        publish(store, "a", smollm2)
        await catalog.refresh()
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(store, "version", unreadable)
                for _ in range(3):
                    await catalog.refresh()
                assert (await catalog.find("a")).name == "a"
                with pytest.raises(ModelNotFound):
                    await catalog.find("b")
            await catalog.refresh()

    run(scenario())
    assert warnings(caplog) == [f"The store {store.root} cannot be read: not yours"] * 2


def test_what_is_configured_and_not_there_is_told_of_once(
    make: Make, store: Store, smollm2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        catalog = make(
            a=ModelConfig(pinned=True),
            b=ModelConfig(pinned=True),
            c=ModelConfig(preload=True),
            d=ModelConfig(aliases=("x",)),
        )
        publish(store, "a", smollm2)
        await catalog.refresh()
        publish(store, "e", smollm2)
        await catalog.refresh()
        await catalog.close()

    run(scenario())
    assert [message.partition(" and is not in the store")[0] for message in warnings(caplog)] == [
        "Model b is to be pinned",
        "Model c is to be preloaded",
        "Model d is configured",
    ]
