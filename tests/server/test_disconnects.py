"""Client gone, sequence gone."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tokenizers import Tokenizer

from tests.server.conftest import ServerThread
from tests.server.fakes import TIMEOUT, WAIT, FakeScheduler
from tests.server.test_chat import HELLO

BODIES = {
    "/v1/chat/completions": {"model": "smol", "messages": HELLO},
    "/v1/completions": {"model": "smol", "prompt": ["one", "two"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_while_an_answer_streams(http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer, path: str) -> None:
    scheduler.script = [tokenizer.encode("One").ids, WAIT]
    with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
        reading = answer.iter_text()
        assert "One" in next(reading)
        assert scheduler.waiting.wait(TIMEOUT)
    assert scheduler.cancellation.wait(TIMEOUT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_while_waiting_for_the_first_token(server: ServerThread, path: str, stream: bool) -> None:
    server.scheduler.script = [WAIT]
    outcome: list[type[BaseException]] = []

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT) as client:
            asking = asyncio.create_task(client.post(path, json=BODIES[path] | {"stream": stream}))
            await asyncio.to_thread(server.scheduler.waiting.wait, TIMEOUT)
            assert not asking.done()
            asking.cancel()
            try:
                await asking
            except asyncio.CancelledError:
                outcome.append(asyncio.CancelledError)

    asyncio.run(ask_and_leave())
    assert outcome == [asyncio.CancelledError]
    assert server.scheduler.cancellation.wait(TIMEOUT)


def test_others_go_on(server: ServerThread, tokenizer: Tokenizer) -> None:
    server.scheduler.script = [tokenizer.encode("One").ids, WAIT]
    with server.client() as leaver, server.client() as stayer:
        body = BODIES["/v1/chat/completions"] | {"stream": True}
        with stayer.stream("POST", "/v1/chat/completions", json=body) as stays:
            staying = stays.iter_text()  # held: a reader that is let go of closes the connection
            next(staying)
            with leaver.stream("POST", "/v1/chat/completions", json=body) as leaves:
                leaving = leaves.iter_text()
                next(leaving)
            assert server.scheduler.cancellation.wait(TIMEOUT)
            assert server.scheduler.cancelled == [server.scheduler.submitted[1].id]
