"""Client gone, sequence gone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from tokenizers import Tokenizer

from server.openai.body import Bodies
from tests.server.conftest import ServerThread, config, publish
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


@contextmanager
def raw(server: ServerThread, text: str) -> Iterator[socket.socket]:
    """A client that says what it likes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as client:
        client.sendall(text.replace("\n", "\r\n").encode())
        yield client


def everything(client: socket.socket) -> str:
    """Until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b"")).decode()


HALF_A_BODY = """POST /v1/completions HTTP/1.1
Host: x
Content-Type: application/json
Content-Length: 5000

{"""


@contextmanager
def body_is_read(server: ServerThread) -> Iterator[None]:
    """Leaves the block once the server waits for a body."""
    bodies = server.service.bodies
    begun = threading.Event()

    def read(request: Request, limit: int) -> Awaitable[bytes]:
        begun.set()
        return Bodies.read(bodies, request, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "read", read)
        yield
        assert begun.wait(TIMEOUT)


def test_a_client_that_leaves_amid_its_body_is_nobodys_fault(
    server: ServerThread, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def requests() -> set[asyncio.Task[None]]:
        return set(server.http.server_state.tasks)

    with ExitStack() as stack:
        with body_is_read(server):
            stack.enter_context(raw(server, HALF_A_BODY))
        left = server.call(requests())
    server.call(asyncio.wait(left))
    assert http.get("/healthz").status_code == 200
    assert caplog.records == []


def test_a_client_that_leaves_before_its_answer_is_nobodys_fault(
    server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    test_while_waiting_for_the_first_token(server, "/v1/completions", stream=False)
    with server.client() as http:
        assert http.get("/healthz").status_code == 200
    assert caplog.records == []


def test_a_body_that_does_not_come_is_given_up(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.openai.body.BODY_TIMEOUT", 0.05)
    with raw(server, HALF_A_BODY) as client:
        answer = everything(client)
    assert answer.startswith("HTTP/1.1 408 ")
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_body_that_does_not_come_does_not_delay_a_shutdown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ServerThread(config(tmp_path)) as server, ExitStack() as stack:
        with body_is_read(server):
            stuck = stack.enter_context(raw(server, HALF_A_BODY))
        server.loop.call_soon_threadsafe(server.service.begin_draining)
        late = stack.enter_context(raw(server, HALF_A_BODY))
        for client in (stuck, late):
            answer = everything(client)
            assert answer.startswith("HTTP/1.1 503 ")
            assert '"draining"' in answer
    assert caplog.records == []


def test_what_outlives_the_grace_of_a_shutdown_ends_without_a_traceback(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.daemon.HTTP_GRACE", 0.05)
    with ServerThread(config(tmp_path)) as server, server.client() as http:
        publish(server.store, "smol", smollm2)
        server.scheduler.script = [WAIT]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(http.post, "/v1/completions", json=BODIES["/v1/completions"])
            assert server.scheduler.waiting.wait(TIMEOUT)
            server.http.should_exit = True
            assert waiting.result(TIMEOUT).status_code == 503
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
