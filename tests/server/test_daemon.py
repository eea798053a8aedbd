"""The daemon's life: it starts, tells where it is, drains on a signal and ends with 0."""

from __future__ import annotations

import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.config import ServerConfig
from server.daemon import bind, url_of
from swapper.errors import ConfigError
from swapper.store import Store
from tests.server.conftest import publish
from tests.server.fakes import TIMEOUT
from tests.server.test_chat import HELLO

BODY = {"model": "smol", "messages": HELLO, "stream": True}


class Daemon:
    def __init__(self, store: Path, mode: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.daemon_process", str(store), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def line(self, pattern: str) -> re.Match[str]:
        """The next line of its output, which must match."""
        match = re.fullmatch(pattern, self._lines.get(timeout=60))
        assert match is not None
        return match

    def ready(self) -> str:
        return self.line(r"gswapd is serving at (http://127\.0\.0\.1:\d+)")[1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str]:
        """Its exit status and its log."""
        assert self.process.stderr is not None
        log = self.process.stderr.read()
        return self.process.wait(TIMEOUT), log


@contextmanager
def daemon(store: Path, mode: str = "normal") -> Iterator[Daemon]:
    started = Daemon(store, mode)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(TIMEOUT)
        started._reader.join(TIMEOUT)
        for pipe in (started.process.stdout, started.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("daemon") / "store"
    publish(Store(path), "smol", smollm2)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_refuses_new_ones(store: Path, number: int) -> None:
    with daemon(store) as running, httpx.Client(base_url=running.ready(), timeout=TIMEOUT) as http:
        assert http.get("/readyz").status_code == 200
        with http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
            text = answer.iter_text()
            received = next(text)
            running.signal(number)
            running.line("draining")
            received += "".join(text)
        assert received.endswith("data: [DONE]\n\n")
        running.line("stopped")
        status, log = running.ended()
        assert status == 0
        assert "Traceback" not in log


def test_a_request_whose_body_never_comes_does_not_hold_it_up(store: Path) -> None:
    with daemon(store) as running:
        url = running.ready()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            httpx.get(f"{url}/healthz").raise_for_status()  # by then the server has read the other's headers
            running.signal(signal.SIGTERM)
            assert client.recv(64).startswith(b"HTTP/1.1 503 ")
        running.line("draining")
        running.line("stopped")
        status, log = running.ended()
        assert status == 0
        assert "Traceback" not in log


def test_a_hangup_has_the_configuration_read_again(store: Path) -> None:
    with daemon(store) as running:
        url = running.ready()
        for _ in range(2):
            running.signal(signal.SIGHUP)
            running.line("read")
        assert httpx.get(f"{url}/healthz").status_code == 200
        running.signal(signal.SIGTERM)
        running.line("draining")
        running.line("stopped")
        status, log = running.ended()
        assert status == 0
        assert "changed: nothing" in log


def test_a_second_signal_ends_it_at_once(store: Path) -> None:
    with daemon(store, "stuck") as running:
        url = running.ready()
        running.signal(signal.SIGTERM)
        running.line("draining")
        assert httpx.get(f"{url}/readyz").json()["draining"] is True
        running.signal(signal.SIGTERM)
        assert running.ended()[0] == 128 + signal.SIGTERM


def test_a_signal_while_it_starts(store: Path) -> None:
    with daemon(store, "slow") as running:
        running.line("starting")
        running.signal(signal.SIGTERM)
        running.line("stopped")
        assert running.ended()[0] == 0


def test_workers_that_do_not_start_end_it_with_the_reason(store: Path) -> None:
    with daemon(store, "broken") as running:
        running.line("stopped")
        status, log = running.ended()
        assert status == 1
        assert log.splitlines()[-1] == "The workers cannot be started."


def test_a_port_that_is_taken_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port: 127\.0\.0\.1:{port} cannot be listened on"):
            bind(ServerConfig(port=port))


def test_an_address_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"server\.host: '300\.0\.0\.1'"):
        bind(ServerConfig(host="300.0.0.1"))


def test_the_url_of_a_free_port() -> None:
    with bind(ServerConfig(port=0)) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url_of(listener))
