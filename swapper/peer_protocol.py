"""What workers of one node say to each other: messages over a Unix socket, and the descriptors that go with them.

A connection has an **asker**, which pages in, and a **lender**, which has a GPU of its own. The lender shows its
frames to the asker once, by descriptors; from then on it lends single frames for the time of a copy:

    asker                                    lender
    Hello                               →
                                        ←    Hello, Frames (with descriptors) …, Ready
    Offer, a host tier to stage from    →    Accept, once it is mapped and pinned
    Who holds these pages?              →    Held
    Borrow frames that hold these pages →    Lent, or Refused
    Stage this range of my host tier    →    Lent, once it was copied into a frame, or Refused
    Return                              →

Only the asker ever writes to the asker's frames, so whatever a lender does late, it does to its own memory. A copy
from a lent frame counts only if the lender had not hung up by its end: one that wants its frames back hangs up first.

The sockets keep message boundaries (SOCK_SEQPACKET), so a message is one JSON array: its name, then its fields.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from swapper.contents import ContentKey
from swapper.errors import GswapdError

VERSION = 1
MESSAGE_BYTES = 192 << 10
"""More than the longest message; the kernel takes up to 208 KiB at once."""

KEYS_AT_ONCE = 1024  # in one message
DESCRIPTORS_AT_ONCE = 32
SEND_TIMEOUT = 1.0
"""Seconds after which whoever takes no messages is hung up on."""


class PeerGone(GswapdError):
    """The other end hung up, or said what cannot be understood."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Who this is, and the memory that its frames are made of."""

    version: int
    name: str
    device: str  # "cpu", "cuda"
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Descriptors of the next frames of one of the lender's two pools come with this."""

    pool: str  # POOL, STAGING
    frames: int  # of that pool, in all


@dataclass(frozen=True, slots=True)
class Ready:
    """All frames were shown."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The asker's host tier: `nbytes` of the file at `path`, from `start` on, are allocated."""

    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Accept:
    """The asker's host tier can be staged from."""


@dataclass(frozen=True, slots=True)
class Who:
    id: int
    keys: Sequence[ContentKey]


@dataclass(frozen=True, slots=True)
class Held:
    """Which keys, by their place in the question, the lender holds."""

    id: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class Borrow:
    id: int
    keys: Sequence[ContentKey]


@dataclass(frozen=True, slots=True)
class Stage:
    """Copy a range of the offered tier into a frame of the lender's staging ring."""

    id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Lent:
    """These frames hold the bytes, and keep them until Return."""

    id: int
    pool: str
    frames: Sequence[int]


@dataclass(frozen=True, slots=True)
class Refused:
    id: int


@dataclass(frozen=True, slots=True)
class Return:
    id: int


Message = Hello | Frames | Ready | Offer | Accept | Who | Held | Borrow | Stage | Lent | Refused | Return

POOL, STAGING = "pool", "staging"

_MESSAGES: dict[str, Any] = {
    its.__name__: its for its in (Hello, Frames, Ready, Offer, Accept, Who, Held, Borrow, Stage, Lent, Refused, Return)
}


class Channel:
    """One end of a connection. Any thread may send; one thread receives, and closes in the end."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT)
        self._socket = connection
        self._sending = threading.Lock()
        self._awake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._awake, select.POLLIN)
        self._closed = False

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Raises PeerGone, also if the other end takes nothing for a second; the connection is of no use then."""
        data = orjson.dumps([type(message).__name__, *(getattr(message, field) for field in message.__slots__)])
        with self._sending:
            if self._closed:
                raise PeerGone("The connection was closed.")
            try:
                if descriptors:
                    socket.send_fds(self._socket, [data], list(descriptors))
                else:
                    self._socket.send(data)
            except OSError as error:
                self._hang_up()
                raise PeerGone(f"It takes no messages: {error}.") from error

    def receive(self, timeout: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, which are the caller's. None after `timeout` seconds, or a `wake`.

        Raises PeerGone.
        """
        ready = dict(self._poll.poll(None if timeout is None else max(0.0, timeout) * 1e3))
        if self._awake in ready:
            os.eventfd_read(self._awake)
        if ready.keys() <= {self._awake}:
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, DESCRIPTORS_AT_ONCE)
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not data:
            raise PeerGone("It hung up.")
        try:
            name, *fields = orjson.loads(data)
            return _MESSAGES[name](*fields), descriptors
        except (ValueError, KeyError, TypeError) as error:
            close_all(descriptors)
            raise PeerGone(f"It said what cannot be understood: {error!r}.") from error

    def wake(self) -> None:
        """Have `receive` return."""
        with self._sending:
            if not self._closed:
                os.eventfd_write(self._awake, 1)

    def has_hung_up(self) -> bool:
        """Whether one of the two ends has, as of now."""
        with self._sending:
            if self._closed:
                return True
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))

    def hang_up(self) -> None:
        """End the connection for both; `receive` raises PeerGone."""
        with self._sending:
            if not self._closed:
                self._hang_up()

    def close(self) -> None:
        with self._sending:
            if not self._closed:
                self._hang_up()
                self._closed = True
                self._socket.close()
                os.close(self._awake)

    def _hang_up(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it was the other end's turn
            return


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
