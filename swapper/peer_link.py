"""The asking side: this worker's connection to one neighbour, whose frames it reads and whose link it may use.

A question that is not answered within `PATIENCE` is given up, and whoever asked goes another way. Nothing more is asked
until every question that was given up has been answered, which proves that the neighbour lives; and, unless it was only
late to say what it holds, for a second more, and for twice as long each time that it is late again. What is lent too
late is returned unread. A neighbour that refuses to stage, because it pages in itself, is not asked to for `REST`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swapper.contents import ContentKey
from swapper.copier import Copier
from swapper.errors import GswapdError
from swapper.peer_frames import OpenWindow, Window
from swapper.peer_protocol import (
    SEND_TIMEOUT,
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

PATIENCE = 0.05
"""Seconds for a page to be lent or staged. It takes a few milliseconds, so this is a neighbour that hangs."""

WHO_PATIENCE = 0.01
"""Seconds that a page-in waits to hear who holds its pages. It takes 0.2 ms."""

REST = 0.02
FIRST_DISTRUST, MOST_DISTRUST = 1.0, 60.0
"""Seconds that a neighbour which was late is left alone."""

GREETING_PATIENCE = 30.0  # seconds, for all frames to be shown
CLOSE_PATIENCE = 10.0  # seconds, for copies that are under way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A neighbour, and what it was good for."""

    name: str
    usable: bool
    staging: bool  # whether it may stage from our host tier
    borrowed_bytes: int  # copied from pages that it held
    staged_bytes: int  # that came over its link


class NotLent(GswapdError):
    """The neighbour did not give what was asked for, or not in time: go another way."""


@dataclass(frozen=True, slots=True)
class _Question:
    deadline: float
    answer: Callable[[Message | None], None]  # None: refused, or given up
    is_grave: bool  # whether it costs trust to be late with it


class PeerLink:
    """Any thread may ask. Futures end in bounded time, with the seconds it took, or with NotLent or DeviceError."""

    def __init__(
        self, path: Path, me: Hello, open_window: OpenWindow, copier: Copier, ended: Callable[[PeerLink], None]
    ) -> None:
        """Connects in the background; `ended(self)` is called when that fails, or the connection is lost."""
        self.name = path.stem
        self._path = path
        self._me = me
        self._open_window = open_window
        self._copier = copier
        self._ended = ended
        self._channel: Channel | None = None
        self._windows: dict[str, Window] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._questions: dict[int, _Question] = {}
        self._given_up: set[int] = set()
        self._copies = 0  # from the windows, under way
        self._rest_until = 0.0
        self._trusted_from = 0.0
        self._lapses = 0  # times in a row that it was late
        self._borrowed_bytes = 0
        self._staged_bytes = 0
        self._is_ready = False  # all frames were shown
        self._is_staging = False  # the neighbour has our tier
        self._offer: Offer | None = None
        self.stages = 0  # pages that the neighbour stages for us now
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"peer {self.name}", daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether asking has a point."""
        ready = self._is_ready and not self._given_up and not self._closing
        return ready and time.monotonic() >= self._trusted_from

    @property
    def can_stage(self) -> bool:
        return self._is_staging and self.is_usable and time.monotonic() >= self._rest_until

    @property
    def status(self) -> PeerStatus:
        return PeerStatus(self.name, self.is_usable, self._is_staging, self._borrowed_bytes, self._staged_bytes)

    def who(self, keys: Sequence[ContentKey], tell: Callable[[Sequence[ContentKey]], None]) -> bool:
        """Have `tell` called, soon, with those of the pages that the neighbour holds. False: it is not asked."""

        def answer(message: Message | None) -> None:
            tell([keys[place] for place in message.places] if isinstance(message, Held) else ())

        return self._ask(lambda its: Who(its, keys), answer, WHO_PATIENCE)

    def borrow(self, keys: Sequence[ContentKey], targets: Sequence[int]) -> Future[float]:
        """Copy pages that the neighbour holds to mapped frames at `targets`."""
        sizes = [nbytes for _, nbytes in keys]
        return self._fetch(lambda its: Borrow(its, keys), targets, sizes, _nothing)

    def stage(self, offset: int, nbytes: int, target: int) -> Future[float]:
        """Copy a range of our host tier to mapped frames at `target`, over the neighbour's link."""
        with self._lock:
            self.stages += 1
        return self._fetch(lambda its: Stage(its, offset, nbytes), [target], [nbytes], self._stage_ended)

    def offer(self, offer: Offer) -> None:
        """Let the neighbour stage from our host tier, which is ready."""
        with self._lock:
            self._offer = offer
            if not self._is_ready:
                return
        self._send(offer)

    def close(self) -> None:
        """Hang up; returns when nothing is read from the neighbour any more."""
        self._closing = True
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.hang_up()
        self._thread.join()

    # ---- asking

    def _ask(
        self, message: Callable[[int], Message], answer: Callable[[Message | None], None], patience: float
    ) -> bool:
        """False: not asked, and `answer` will not be called."""
        with self._lock:
            if not self.is_usable:
                return False
            number = next(self._ids)
            self._questions[number] = _Question(time.monotonic() + patience, answer, patience >= PATIENCE)
            is_first = len(self._questions) == 1 or patience < PATIENCE
        assert self._channel is not None
        self._send(message(number))  # if that fails, the connection's end answers
        if is_first:
            self._channel.wake()
        return True

    def _fetch(
        self,
        message: Callable[[int], Message],
        targets: Sequence[int],
        sizes: Sequence[int],
        ended: Callable[[], None],
    ) -> Future[float]:
        result: Future[float] = Future()
        begun = time.perf_counter()

        def answer(message: Message | None) -> None:
            if isinstance(message, Lent) and len(message.frames) == len(targets):
                self._copy(message, targets, sizes, begun, result, ended)
            else:
                ended()
                result.set_exception(NotLent(f"{self.name} did not give what it was asked for."))

        if not self._ask(message, answer, PATIENCE):
            ended()
            result.set_exception(NotLent(f"{self.name} is not asked now."))
        return result

    def _copy(
        self,
        lent: Lent,
        targets: Sequence[int],
        sizes: Sequence[int],
        begun: float,
        result: Future[float],
        ended: Callable[[], None],
    ) -> None:
        window = self._windows[lent.pool]
        pieces = [
            (window.address(frame), target, nbytes)
            for frame, target, nbytes in zip(lent.frames, targets, sizes, strict=True)
        ]
        with self._lock:
            self._copies += 1
        try:
            copy = self._copier.across(pieces)
        except GswapdError as error:
            copy = Future()
            copy.set_exception(error)
        copy.add_done_callback(partial(self._copied, lent, sum(sizes), begun, result, ended))

    def _copied(
        self,
        lent: Lent,
        nbytes: int,
        begun: float,
        result: Future[float],
        ended: Callable[[], None],
        copy: Future[float],
    ) -> None:
        assert self._channel is not None
        hung_up = self._channel.has_hung_up()
        self._send(Return(lent.id))
        with self._changed:
            self._copies -= 1
            if lent.pool == STAGING:
                self._staged_bytes += nbytes
            else:
                self._borrowed_bytes += nbytes
            self._changed.notify_all()
        ended()
        if (error := copy.exception()) is not None:
            result.set_exception(error)
        elif hung_up:  # then the frame may have been used anew while it was read
            result.set_exception(NotLent(f"{self.name} hung up."))
        else:
            result.set_result(time.perf_counter() - begun)

    def _stage_ended(self) -> None:
        with self._lock:
            self.stages -= 1

    def _send(self, message: Message) -> None:
        assert self._channel is not None
        try:
            self._channel.send(message)
        except PeerGone as gone:  # the connection's thread is about to hear of it
            logger.debug("%s is gone: %s", self.name, gone)

    # ---- the connection's thread

    def _run(self) -> None:
        try:
            self._connect()
            while True:
                self._hear(self._next_deadline())
        except PeerGone as gone:
            logger.debug("%s is gone: %s", self.name, gone)
        except (GswapdError, OSError) as error:
            logger.info("The frames of %s cannot be read from here: %s", self.name, error)
        finally:
            self._end()

    def _connect(self) -> None:
        connection = seqpacket()
        connection.settimeout(SEND_TIMEOUT)
        try:
            connection.connect(str(self._path))
        except OSError as error:
            connection.close()
            raise PeerGone(str(error)) from error
        with self._lock:
            self._channel = channel = Channel(connection)
            if self._closing:
                raise PeerGone("This worker stops.")
        channel.send(self._me)
        deadline = time.monotonic() + GREETING_PATIENCE
        while not self._is_ready:
            got = channel.receive(deadline - time.monotonic())
            if got is None:
                raise PeerGone("It did not show its frames in time.")
            try:
                self._greeted(*got)
            finally:
                close_all(got[1])

    def _greeted(self, message: Message, descriptors: Sequence[int]) -> None:
        match message:
            case Hello(device=device, page_bytes=page_bytes):
                if (device, page_bytes) != (self._me.device, self._me.page_bytes):
                    raise PeerGone("It has other pages.")
            case Frames(pool=pool, frames=frames):
                if pool not in self._windows:
                    self._windows[pool] = self._open_window(frames, self._me.page_bytes)
                self._windows[pool].add(descriptors)
            case Ready():
                with self._lock:
                    self._is_ready = True
                    offer = self._offer
                if offer is not None:
                    self._send(offer)
            case _:
                raise PeerGone(f"It said {type(message).__name__} before it was ready.")

    def _next_deadline(self) -> float | None:
        with self._lock:
            deadlines = [question.deadline for question in self._questions.values()]
        return min(deadlines) - time.monotonic() if deadlines else None

    def _hear(self, timeout: float | None) -> None:
        assert self._channel is not None
        got = self._channel.receive(timeout)
        if got is not None:
            self._answered(got[0])
        now = time.monotonic()
        with self._lock:
            late = [number for number, question in self._questions.items() if question.deadline <= now]
            overdue = [self._questions.pop(number) for number in late]
            self._given_up.update(late)
            if any(question.is_grave for question in overdue):
                self._trusted_from = now + min(FIRST_DISTRUST * 2**self._lapses, MOST_DISTRUST)
                self._lapses += 1
        for question in overdue:
            question.answer(None)

    def _answered(self, message: Message) -> None:
        match message:
            case Accept():
                self._is_staging = True
            case Held() | Lent() | Refused():
                with self._lock:
                    question = self._questions.pop(message.id, None)
                    self._given_up.discard(message.id)
                    if isinstance(message, Refused):
                        self._rest_until = time.monotonic() + REST
                    elif question is not None:
                        self._lapses = 0
                if question is not None:
                    question.answer(None if isinstance(message, Refused) else message)
                elif isinstance(message, Lent):
                    self._send(Return(message.id))
            case _:
                raise PeerGone(f"It said {type(message).__name__}, which only askers say.")

    def _end(self) -> None:
        with self._lock:
            self._closing = True
            questions, self._questions = self._questions, {}
        for question in questions.values():
            question.answer(None)
        with self._changed:
            still = self._changed.wait_for(lambda: not self._copies, CLOSE_PATIENCE)
        if still:
            while self._windows:
                self._windows.popitem()[1].close()
        else:  # addresses are leaked rather than pulled away under a copy
            logger.error("Copies from %s do not end.", self.name)
        if self._channel is not None:
            self._channel.close()
        self._ended(self)


def _nothing() -> None:
    return
