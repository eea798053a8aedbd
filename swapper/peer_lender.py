"""The lending side: frames of this worker that its neighbours may read, one thread for each of them that asks.

A loan is a reference on frames: what they hold stays there until it is returned. It comes back in any case: when the
asker is gone, or has kept it for `LOAN_PATIENCE`. Then the connection is closed first, by which the asker knows that
what it copied does not count (see `swapper/peer_protocol.py`).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from swapper.contents import ContentKey, Loan
from swapper.copier import Copier
from swapper.errors import DeviceError, GswapdError
from swapper.frames import FramePool
from swapper.peer_frames import StagingSource
from swapper.peer_protocol import (
    POOL,
    STAGING,
    Accept,
    Borrow,
    Channel,
    Frames,
    Held,
    Hello,
    Lent,
    Message,
    Offer,
    PeerGone,
    Ready,
    Refused,
    Return,
    Stage,
    Who,
    close_all,
    seqpacket,
)
from swapper.staging import Staging

LOAN_PATIENCE = 2.0
"""Seconds that an asker may keep frames; a copy takes milliseconds."""

MAX_LOANS = 64  # of one asker at a time

logger = logging.getLogger(__name__)


class Lender(Protocol):
    """What the pager offers. Every method may be called from any thread."""

    def held(self, keys: Sequence[ContentKey]) -> list[int]:
        """Which of these pages, by their places, are in frames."""

    def lend(self, keys: Sequence[ContentKey]) -> Loan[Any] | None:
        """Frames that hold these pages and keep them until `take_back`. None: one of them is not here."""

    def take_back(self, loan: Loan[Any]) -> None: ...

    @property
    def is_paging(self) -> bool:
        """Whether a page-in is under way."""


class PeerServer:
    """Listens on a socket, and lends to whoever connects."""

    def __init__(self, path: Path, me: Hello, lender: Lender, pool: FramePool, ring: FramePool, copier: Copier) -> None:
        """Raises OSError if the socket cannot be made. The ring's frames are the server's until it is closed."""
        self.me = me
        self.lender = lender
        self.pools = {STAGING: ring, POOL: pool}
        self.copier = copier
        self.staging = Staging(ring, copier, lambda: not lender.is_paging)
        self._lock = threading.Lock()
        self._serving: set[_Serving] = set()
        self._path = path
        self._socket = seqpacket()
        path.unlink(missing_ok=True)  # a dead worker's of this name
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, name="peers-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everyone and take everything back."""
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._socket.close()
        with self._lock:
            serving = list(self._serving)
        for its in serving:
            its.hang_up()
        for its in serving:
            its.thread.join()
        self.staging.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            serving = _Serving(self, Channel(connection), self._ended)
            with self._lock:
                self._serving.add(serving)
            serving.thread.start()

    def _ended(self, serving: _Serving) -> None:
        with self._lock:
            self._serving.discard(serving)


class _Serving:
    """One asker."""

    def __init__(self, server: PeerServer, channel: Channel, ended: Callable[[_Serving], None]) -> None:
        self._server = server
        self._channel = channel
        self._ended = ended
        self._name = "an unknown worker"
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lent: dict[int, tuple[Loan[Any] | int, float]] = {}  # what (a loan, or a staging frame) and since when
        self._staging = 0  # orders that the staging ring has not answered
        self._source: StagingSource | None = None
        self._mapping: threading.Thread | None = None
        self._over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="peer-lend", daemon=True)

    def hang_up(self) -> None:
        self._channel.hang_up()

    def _run(self) -> None:
        try:
            self._greet()
            while True:
                got = self._channel.receive(self._patience())
                if got is not None:
                    self._obey(got[0])
        except PeerGone as gone:
            logger.debug("%s is gone: %s", self._name, gone)
        except GswapdError as error:
            logger.warning("Frames cannot be lent to %s: %s", self._name, error)
        finally:
            self._end()

    def _greet(self) -> None:
        """Tell who this is, and show all frames."""
        got = self._channel.receive(LOAN_PATIENCE)
        match got:
            case (Hello() as hello, _):
                self._name = hello.name
            case _:
                raise PeerGone("It did not say who it is.")
        me = self._server.me
        self._channel.send(me)
        if (hello.version, hello.device, hello.page_bytes) != (me.version, me.device, me.page_bytes):
            raise PeerGone("It has other pages.")
        for name, pool in self._server.pools.items():
            for descriptors in pool.export():
                try:
                    self._channel.send(Frames(name, pool.frames), descriptors)
                finally:
                    close_all(descriptors)
        self._channel.send(Ready())

    def _patience(self) -> float | None:
        """Seconds until the oldest loan is overdue. Raises PeerGone when one is."""
        with self._lock:
            if not self._lent:
                return LOAN_PATIENCE if self._staging else None
            left = min(since for _, since in self._lent.values()) + LOAN_PATIENCE - time.monotonic()
        if left <= 0:
            raise PeerGone("It keeps what it borrowed.")
        return left

    def _obey(self, message: Message) -> None:
        match message:
            case Who():
                held = self._server.lender.held([(digest, nbytes) for digest, nbytes in message.keys])
                self._channel.send(Held(message.id, held))
            case Borrow():
                self._borrow(message)
            case Stage():
                self._stage(message)
            case Return():
                self._take_back(message.id)
            case Offer():
                self._map_source(message)
            case _:
                raise PeerGone(f"It said {type(message).__name__}, which only lenders say.")

    def _borrow(self, message: Borrow) -> None:
        loan = None
        if len(self._lent) < MAX_LOANS:
            loan = self._server.lender.lend([(digest, nbytes) for digest, nbytes in message.keys])
        if loan is None:
            self._channel.send(Refused(message.id))
            return
        with self._lock:
            self._lent[message.id] = loan, time.monotonic()
        self._channel.send(Lent(message.id, POOL, loan.frames))

    def _stage(self, message: Stage) -> None:
        source = self._source.address(message.offset, message.nbytes) if self._source is not None else None
        if source is None or message.nbytes > self._server.me.page_bytes:
            self._channel.send(Refused(message.id))
            return
        with self._lock:
            self._staging += 1
        self._server.staging.stage(source, message.nbytes, partial(self._staged, message.id))

    def _staged(self, request: int, frame: int | None) -> None:
        """The staging ring's answer. Called from any thread."""
        with self._changed:
            self._staging -= 1
            if frame is not None:
                self._lent[request] = frame, time.monotonic()
            self._changed.notify_all()
        try:
            self._channel.send(Refused(request) if frame is None else Lent(request, STAGING, [frame]))
        except PeerGone as gone:  # whatever was lent comes back when the connection's thread ends
            logger.debug("%s is gone: %s", self._name, gone)

    def _take_back(self, request: int) -> None:
        with self._lock:
            lent = self._lent.pop(request, None)
        if lent is None:
            return
        what, _ = lent
        if isinstance(what, int):
            self._server.staging.give_back(what)
        else:
            self._server.lender.take_back(what)

    def _map_source(self, offer: Offer) -> None:
        """Map and pin the asker's host tier, in a thread of its own: it takes seconds."""
        if self._mapping is None:
            self._mapping = threading.Thread(target=self._open_source, args=(offer,), name="peer-pin", daemon=True)
            self._mapping.start()

    def _open_source(self, offer: Offer) -> None:
        page_bytes = self._server.me.page_bytes
        try:
            self._source = StagingSource(
                Path(offer.path), offer.start, offer.nbytes, page_bytes, self._server.copier, self._over.is_set
            )
            self._channel.send(Accept())
        except PeerGone as gone:
            logger.debug("%s is gone: %s", self._name, gone)
        except DeviceError as error:
            logger.warning("Pages of %s cannot be staged: %s", self._name, error)

    def _end(self) -> None:
        """Hang up, then take everything back: in this order, or the asker could believe a frame that is used anew."""
        self._channel.hang_up()
        self._over.set()
        self._settle()
        if self._mapping is not None:
            self._mapping.join()
        if self._source is not None:
            self._source.close()
        self._channel.close()
        self._ended(self)

    def _settle(self) -> None:
        """Take back all that is lent, and all that is still being staged."""
        while True:
            for request in list(self._lent):
                self._take_back(request)
            with self._changed:
                if not self._staging and not self._lent:
                    return
                if not self._lent:
                    self._changed.wait(LOAN_PATIENCE)
