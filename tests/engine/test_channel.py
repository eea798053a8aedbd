"""Channels: messages arrive whole, and whoever has not the token is sent away."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from engine import channel as module
from engine.channel import accept, connect, listen

TOKEN = "0123456789abcdef"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1") as listener:
        yield listener


def test_a_message_that_comes_in_parts_arrives_whole_whatever_interrupts_its_reader(listener: socket.socket) -> None:
    follower = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 1, 10)
    leader = accept(listener, TOKEN, 2, 10)[1]
    got: list[object] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        reader = threading.Thread(target=lambda: got.append(follower.receive()), daemon=True)
        reader.start()
        leader._connection.sendall(b'\0\0\0\x09["he')
        deadline = time.monotonic() + 10
        while not _sleeps_in_recv(reader) and time.monotonic() < deadline:
            pass
        assert reader.ident is not None
        signal.pthread_kill(reader.ident, signal.SIGUSR1)
        leader._connection.sendall(b'llo"]')
        reader.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
        follower.close()
        leader.close()
    assert got == [["hello"]]


def _sleeps_in_recv(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/syscall") as syscall:
        return not syscall.read().startswith(("running", "202 "))  # 202: futex, the interpreter's lock


def test_strangers_keep_nobody_out(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT", 0.1)
    port = listener.getsockname()[1]
    silent = socket.create_connection(("127.0.0.1", port))
    hasty = socket.create_connection(("127.0.0.1", port))
    hasty.close()
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"\0\0\0\1" + b"x" * len(TOKEN))
    follower = connect("127.0.0.1", port, TOKEN, 1, 10)
    channels = accept(listener, TOKEN, 2, 10)
    channels[1].send(["hello"])
    assert follower.receive() == ["hello"]
    for end in (silent, stranger, follower, channels[1]):
        end.close()


def test_strangers_do_not_prolong_the_wait(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT", 0.1)
    silent = [socket.create_connection(listener.getsockname()) for _ in range(5)]
    with pytest.raises(TimeoutError):
        accept(listener, TOKEN, 2, 0.15)
    waiting = sum(not _is_closed(one) for one in silent)
    assert waiting >= 2  # the rest was not even looked at
    for one in silent:
        one.close()


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_peer_that_is_gone_ends_what_is_received() -> None:
    with listen("127.0.0.1") as listener:
        follower = connect("127.0.0.1", listener.getsockname()[1], TOKEN, 1, 10)
        leader = accept(listener, TOKEN, 2, 10)[1]
    leader.close()
    with pytest.raises(ConnectionResetError):
        follower.receive()
    follower.close()
