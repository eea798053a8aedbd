"""One batch on a daemon: what makes its figures invalid is an error, in a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.profile import measure
from server.profile.document import ProfileError
from server.profile.measure import Batch, Client, Subject

STREAM = "".join(f'data: {{"choices": [{{"index": {index}, "text": "t"}}]}}\n\n' for index in (1, 0, 0, 1, 1, 0))


class Daemon:
    """What a daemon answers, as far as a batch asks."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"name": "m", "places": [{"group": "g"}], "last_load": {"seconds": 1}}]
        self.passes: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self.complete: Callable[[], httpx.Response] = lambda: httpx.Response(200, text=STREAM)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        if request.url.path == "/v1/completions":
            await asyncio.sleep(0)
            return self.complete()
        if request.method == "DELETE":
            return httpx.Response(200, json={"ranks": [{"spans": self.passes, "dropped": 0, "peaks": {}}]})
        return httpx.Response(200, json={"models": self.models})

    def ran(self, sampled: int, model: str = "m") -> None:
        self.passes.append({"name": "pass", "model": model, "prefilled": 0, "decoded": sampled, "sampled": sampled})


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    daemon = Daemon()
    own = httpx.AsyncClient
    transport = httpx.MockTransport(daemon.answer)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **settings: own(transport=transport, **settings))
    return daemon


def run(batch: int = 2, output_tokens: int = 3) -> Batch:
    async def all_of_it() -> Batch:
        async with Client(Subject("http://daemon", "m", "g", 100, "kéy", "kéy")) as client:
            return await client.run(batch, 4, output_tokens, 1)

    return asyncio.run(all_of_it())


def load() -> Any:
    async def all_of_it() -> Any:
        async with Client(Subject("http://daemon", "m", "g", 100)) as client:
            return await client.load()

    return asyncio.run(all_of_it())


def test_a_batch_is_what_clients_saw_and_what_ran(daemon: Daemon) -> None:
    daemon.ran(2)
    daemon.ran(4)
    ran = run()
    assert len(ran.answers) == 2
    assert all(0 < its.first_token <= its.last_token for its in ran.answers)
    assert daemon.asked.count(("POST", "/v1/completions")) == 1, "they begin at the same moment"
    assert [its["sampled"] for its in ran.passes()] == [2, 4]


@pytest.mark.parametrize(
    ("sampled", "model", "why"),
    [(5, "m", "Only 5 of 6"), (7, "m", "other requests of the model"), (6, "other", "other models")],
)
def test_other_work_in_a_recording_is_an_error(daemon: Daemon, sampled: int, model: str, why: str) -> None:
    daemon.ran(sampled, model)
    with pytest.raises(ProfileError, match=why):
        run()


def test_memory_of_other_models_on_the_group_is_an_error(daemon: Daemon) -> None:
    assert load() == {"seconds": 1}
    daemon.models.append({"name": "elsewhere", "places": [{"group": "another"}]})
    assert load() == {"seconds": 1}
    daemon.models.append({"name": "neighbour", "places": [{"group": "g"}]})
    with pytest.raises(ProfileError, match="Evict what it holds of other models: neighbour"):
        load()


def test_a_refused_request_is_told_in_the_daemon_s_words_and_ends_the_recording(daemon: Daemon) -> None:
    daemon.complete = lambda: httpx.Response(503, json={"error": {"message": "The queue is full."}})
    with pytest.raises(ProfileError, match="503: The queue is full"):
        run()
    assert daemon.asked[-1][0] == "DELETE"


def test_a_daemon_that_leaves_is_an_error_of_ours(daemon: Daemon) -> None:
    def leave() -> httpx.Response:
        raise httpx.ReadError("gone")

    daemon.complete = leave
    with pytest.raises(ProfileError, match="gone"):
        run()


def test_a_batch_takes_no_longer_than_it_may(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            while True:
                await asyncio.sleep(0.01)
                yield STREAM.encode()

    monkeypatch.setattr(measure, "BATCH_TIMEOUT", 0.2)
    daemon.complete = lambda: httpx.Response(200, stream=Endless())
    with pytest.raises(ProfileError, match=r"2 sequences of 4 \+ 3 tokens took more than 0.2 s"):
        run()
    assert daemon.asked[-1][0] == "DELETE"
