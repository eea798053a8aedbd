"""Watchers hear the state, every change of it and what happened; who comes back gets what it missed. All is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
import pytest

from scheduler.interface import LoadRecord
from server import events as module
from server.errors import ApiError
from server.events import Events
from swapper.pager import SourceBytes

Heard = list[tuple[str, str, Any]]  # id, event, data


def parse(chunk: bytes) -> Heard:
    heard = []
    for block in chunk.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            heard.append((fields.get("id", ""), fields["event"], orjson.loads(fields["data"])))
    return heard


class World:
    """Some events, and a state to change."""

    def __init__(self) -> None:
        self.events = Events(wall=lambda: 100.0)
        self.state: dict[str, dict[str, Any]] = {"models": {"a": {"pages": 1}, "b": {"pages": 2}}}
        self.looks = 0

    def look(self) -> dict[str, dict[str, Any]]:
        self.looks += 1
        return {section: dict(entries) for section, entries in self.state.items()}

    def watch(self, last_id: str = "") -> AsyncGenerator[bytes]:
        return self.events.stream(self.look, last_id)

    def load(self, model: str, error: str | None = None) -> None:
        self.events.loaded(LoadRecord(model, "g", 99.0, 0.5, 3, {"disk": SourceBytes(3, 30)}, {"read": 0.4}, error))


async def hear(stream: AsyncGenerator[bytes]) -> Heard:
    return parse(await asyncio.wait_for(anext(stream), 5))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    monkeypatch.setattr(module, "LOOK_INTERVAL", 0.01)

    def run(test: Callable[[World], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = World()
            await test(world)
            await world.events.close()
            assert len(asyncio.all_tasks()) == 1, "nothing goes on once nobody watches"

        asyncio.run(whole())

    return run


Run = Callable[[Callable[[World], Awaitable[None]]], None]


def test_a_stream_begins_with_the_state_and_goes_on_with_what_changes_in_it(run: Run) -> None:
    async def test(world: World) -> None:
        stream = world.watch()
        assert await hear(stream) == [("", "state", world.state)]
        world.state["models"] = {"a": {"pages": 5}, "c": {"pages": 9}}
        assert await hear(stream) == [
            ("", "change", {"models": {"a": {"pages": 5}, "b": None, "c": {"pages": 9}}}),
        ]
        await stream.aclose()
        looks = world.looks
        await asyncio.sleep(0.05)
        assert world.looks == looks, "nobody looks where nobody watches"

    run(test)


def test_swaps_are_told_with_what_they_moved(run: Run) -> None:
    async def test(world: World) -> None:
        stream = world.watch()
        await hear(stream)
        world.load("a")
        ((ident, kind, load),) = await hear(stream)
        assert (kind, bool(ident)) == ("swap", True)
        assert load == {"way": "in", "model": "a", "at": 99.0, "seconds": 0.5, "pages": 3, "group": "g",
                        "sources": {"disk": 30}, "stages": {"read": 0.4}, "error": None}  # fmt: skip
        world.events.paged_out("b", 2, 1, 0.25, "memory", 7.0)
        ((_, _, out),) = await hear(stream)
        assert out == {
            "way": "out",
            "model": "b",
            "at": 99.75,
            "seconds": 0.25,
            "pages": 2,
            "reason": "memory",
            "idle": 7,
        }
        await stream.aclose()

    run(test)


def test_whoever_comes_back_gets_what_it_missed(run: Run) -> None:
    async def test(world: World) -> None:
        world.load("a")
        stream = world.watch()
        _, (seen, _, _) = await hear(stream)
        await stream.aclose()
        world.load("b")
        world.load("c")
        missed = (await hear(world.watch(seen)))[1:]
        assert [data["model"] for _, _, data in missed] == ["b", "c"]
        of_another_daemon = (await hear(world.watch("0badcafe-2")))[1:]
        assert [data["model"] for _, _, data in of_another_daemon] == ["a", "b", "c"]
        no_id = (await hear(world.watch(seen.replace("-1", "-" + "1" * 5000))))[1:]
        assert [data["model"] for _, _, data in no_id] == ["a", "b", "c"]

    run(test)


def test_a_client_that_takes_nothing_is_dropped_and_the_others_hear_on(run: Run) -> None:
    async def test(world: World) -> None:
        slow, quick = world.watch(), world.watch()
        await hear(slow)
        await hear(quick)
        for _ in range(module.MAX_BEHIND + 1):
            world.load("a")
            await hear(quick)
        with pytest.raises(StopAsyncIteration):
            await hear(slow)
        world.load("b")
        assert (await hear(quick))[0][2]["model"] == "b"
        await quick.aclose()

    run(test)


def test_what_is_remembered_and_who_watches_is_bounded(run: Run) -> None:
    async def test(world: World) -> None:
        for _ in range(module.REMEMBERED + 10):
            world.load("a")
        streams = [world.watch() for _ in range(module.MAX_CLIENTS)]
        heard = [await hear(stream) for stream in streams]
        assert len(heard[0]) == 1 + module.REMEMBERED
        with pytest.raises(ApiError) as refusal:
            await hear(world.watch())
        assert refusal.value.status == 503
        for stream in streams:
            await stream.aclose()

    run(test)


def test_a_look_that_fails_ends_the_streams(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        stream = world.watch()
        await hear(stream)
        world.state = {"models": None}  # type: ignore[dict-item]
        with pytest.raises(StopAsyncIteration):
            await hear(stream)
        assert "could not be looked at" in caplog.text

    run(test)


def test_silence_is_broken_by_comments(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMENT_INTERVAL", 0.01)

    async def test(world: World) -> None:
        stream = world.watch()
        await hear(stream)
        assert (await anext(stream)).startswith(b":")
        await stream.aclose()

    run(test)
