"""The plan channel: small messages between the leader of a mesh and its followers, over one TCP connection each.

A Ray call takes nearly a millisecond, which is too long for a step; a message here takes some tens of microseconds. A
message is a list of JSON values, the first of which says what it is; no message can make its receiver run anything.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from swapper.errors import WorkerError

SEND_TIMEOUT = 10.0
"""Seconds within which a message must leave this process: a peer that reads nothing for so long is lost."""

HELLO_TIMEOUT = 2.0
"""Seconds in which whoever connects must have said who it is: it has nothing to wait for."""

_LENGTH = struct.Struct("!I")

Message = Sequence[Any]


class Channel:
    """One connection. Any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A send that blocks, and a host that is gone without a word, must be noticed.
        seconds, fraction = divmod(SEND_TIMEOUT, 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_TIMEOUT * 1000))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
            connection.setsockopt(socket.IPPROTO_TCP, option, 3)
        self._connection = connection
        self._lock = threading.Lock()  # messages of several threads must not mix

    def send(self, message: Message) -> None:
        """Raises OSError if the peer is gone."""
        data = orjson.dumps(message)
        with self._lock:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """The next message, however long it takes. Raises OSError if the peer is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: list[Any] = orjson.loads(self._read(length))
        return message

    def close(self) -> None:
        """End both directions; whoever receives finds the peer gone."""
        with suppress(OSError):  # the peer was quicker
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, count: int) -> bytes:
        return _read(self._connection, count)


def _read(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes, which may come in parts: a signal, or a time-out on the socket, cuts MSG_WAITALL short."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data), socket.MSG_WAITALL)
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data


def listen(host: str, port: int = 0) -> socket.socket:
    return socket.create_server((host, port))


def accept(listener: socket.socket, token: str, ranks: int, timeout: float) -> dict[int, Channel]:
    """Wait `timeout` seconds for ranks 1 … `ranks` - 1, which prove themselves by the token. Whoever else connects is
    sent away. Raises WorkerError, OSError."""
    channels: dict[int, Channel] = {}
    end = time.monotonic() + timeout
    while len(channels) < ranks - 1:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError(f"{ranks - 1 - len(channels)} ranks did not come within {timeout:g} s")
        listener.settimeout(left)
        connection, _ = listener.accept()
        connection.settimeout(HELLO_TIMEOUT)
        try:
            hello = _read(connection, len(token) + _LENGTH.size)
        except OSError:
            hello = b""
        if not hmac.compare_digest(hello[_LENGTH.size :], token.encode()):
            connection.close()
            continue
        (rank,) = _LENGTH.unpack(hello[: _LENGTH.size])
        if not 0 < rank < ranks or rank in channels:
            raise WorkerError(f"two workers say that they are rank {rank} of a mesh of {ranks}")
        channels[rank] = Channel(connection)
    return channels


def connect(host: str, port: int, token: str, rank: int, timeout: float) -> Channel:
    """A follower's connection to the leader. Raises OSError."""
    connection = socket.create_connection((host, port), timeout)
    connection.sendall(_LENGTH.pack(rank) + token.encode())
    return Channel(connection)
