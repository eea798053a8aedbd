"""Whoever misbehaves is hung up on, and a copy from a frame that may have been used anew does not count."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from swapper import libc
from swapper.host_frames import HostFramePool
from swapper.peer_frames import HostWindow
from swapper.peer_lender import LOAN_PATIENCE
from swapper.peer_link import NotLent, PeerLink
from swapper.peer_protocol import (
    POOL,
    VERSION,
    Borrow,
    Channel,
    Frames,
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
from tests.swapper.paging import PAGE, PATIENCE, page_bytes
from tests.swapper.stations import Station, until
from tests.swapper.tiers import Buffer, GatedCopier, key_of

ME = Hello(VERSION, "asker", "cpu", PAGE)
Kind = TypeVar("Kind")


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Station]:
    with Station("lender", tmp_path, 8) as station:
        yield station


@contextmanager
def asker(station: Station, hello: Hello = ME) -> Iterator[Channel]:
    """A bare connection to a station's lender."""
    connection = seqpacket()
    connection.connect(str(station.directory / "peers" / "lender.sock"))
    channel = Channel(connection)
    channel.send(hello)
    yield channel
    channel.close()


def hear(channel: Channel, kind: type[Kind]) -> Kind:
    """The next message of that kind; what comes before it is dropped."""
    while True:
        got = channel.receive(PATIENCE)
        assert got is not None
        close_all(got[1])
        if isinstance(got[0], kind):
            return got[0]


def hear_end(channel: Channel) -> None:
    with pytest.raises(PeerGone):
        hear(channel, Stage)


def test_an_asker_that_dies_with_a_loan_has_returned_it(station: Station) -> None:
    station.bring_in(station.know("model", [1, 2]))
    with asker(station) as channel:
        channel.send(Borrow(1, [key_of(1)]))
        assert len(hear(channel, Lent).frames) == 1
    assert station.pager.page_out("model", 0) == 2


def test_an_asker_that_keeps_a_loan_is_hung_up_on(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.peer_lender.LOAN_PATIENCE", LOAN_PATIENCE / 10)
    station.bring_in(station.know("model", [1, 2]))
    with asker(station) as channel:
        channel.send(Borrow(1, [key_of(1)]))
        hear(channel, Lent)
        assert station.pager.page_out("model", 0) == 2, "it waits for the frame, but not for ever"
        assert channel.has_hung_up(), "which the asker can know before the frame is used anew"


def test_a_page_that_leaves_is_not_lent(station: Station) -> None:
    station.bring_in(station.know("model", [1, 2]))
    with asker(station) as channel:
        channel.send(Borrow(1, [key_of(1)]))
        hear(channel, Lent)
        station.pager.page_in("model", 2, 2, lambda _: None)
        contents = station.pager._work.recall(station.pager._shard("model"), 0)
        channel.send(Borrow(2, [key_of(2)]))
        assert hear(channel, Refused).id == 2
        station.pager._work.stays(contents)
        channel.send(Return(1))


def test_pages_are_lent_all_or_none(station: Station) -> None:
    station.bring_in(station.know("model", [1, 2]))
    with asker(station) as channel:
        channel.send(Borrow(1, [key_of(1), key_of(3)]))
        assert hear(channel, Refused).id == 1
    assert station.pager.page_out("model", 0) == 2


@pytest.mark.parametrize(
    "message",
    [Stage(1, 0, PAGE), Stage(1, -PAGE, PAGE), Stage(1, 0, 1 << 40)],
    ids=["nothing was offered", "before the tier", "more than a page"],
)
def test_what_cannot_be_staged_is_refused(station: Station, message: Stage) -> None:
    with asker(station) as channel:
        if message.offset or message.nbytes > PAGE:
            tier = station.directory / "tier"
            tier.write_bytes(bytes(2 * PAGE))
            channel.send(Offer(str(tier), 0, 2 * PAGE))
            server = station.peers._server
            assert server is not None
            until(lambda: any(its._source is not None for its in tuple(server._serving)))
        channel.send(message)
        assert hear(channel, Refused).id == 1


def test_a_worker_with_other_pages_is_not_lent_to(station: Station) -> None:
    with asker(station, Hello(VERSION, "asker", "cpu", 2 * PAGE)) as channel:
        hear_end(channel)
    with asker(station, Hello(VERSION + 1, "asker", "cpu", PAGE)) as channel:
        hear_end(channel)


@pytest.mark.parametrize("data", [b"nonsense", b'["Borrow",1]', b'["Lent",1,"pool",[0]]', b"[]"])
def test_nonsense_ends_the_connection_and_nothing_else(station: Station, data: bytes) -> None:
    with asker(station) as channel:
        hear(channel, Ready)
        channel._socket.send(data)
        hear_end(channel)
    with asker(station) as channel:
        channel.send(Who(1, [key_of(1)]))
        hear(channel, Ready)


class FakeLender:
    """The lending end of a connection, played by the test; one frame of it holds page 7."""

    def __init__(self, directory: Path) -> None:
        self.pool = HostFramePool(1, PAGE)
        region = self.pool.reserve(PAGE)
        self.pool.map(region, 0, self.pool.take())
        libc.view(region.address, PAGE)[:] = page_bytes(7)
        self._socket = seqpacket()
        self._socket.bind(str(directory / "fake.sock"))
        self._socket.listen()
        self.copier = GatedCopier()
        self.link = PeerLink(directory / "fake.sock", ME, HostWindow, self.copier, lambda _: None)
        self.channel = Channel(self._socket.accept()[0])
        hear(self.channel, Hello)
        self.channel.send(ME)
        for descriptors in self.pool.export():
            self.channel.send(Frames(POOL, 1), descriptors)
            close_all(descriptors)
        self.channel.send(Ready())
        until(lambda: self.link.is_usable)

    def say(self, message: Message) -> None:
        self.channel.send(message)

    def close(self) -> None:
        self.channel.close()
        self.link.close()
        self._socket.close()
        self.copier.close()
        self.pool.close()


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[FakeLender]:
    lender = FakeLender(tmp_path)
    yield lender
    lender.close()


def test_a_page_is_in_when_it_was_copied_and_the_frame_goes_back(lender: FakeLender) -> None:
    target = Buffer()
    copy = lender.link.borrow([key_of(7)], [target.address])
    lender.say(Lent(hear(lender.channel, Borrow).id, POOL, [0]))
    pending = lender.copier.next()
    assert not copy.done()
    pending.finish()
    hear(lender.channel, Return)
    assert copy.result(PATIENCE) > 0
    assert target.holds(7)


def test_a_copy_does_not_count_if_the_lender_hung_up_before_its_end(lender: FakeLender) -> None:
    copy = lender.link.borrow([key_of(7)], [Buffer().address])
    lender.say(Lent(hear(lender.channel, Borrow).id, POOL, [0]))
    pending = lender.copier.next()
    lender.channel.hang_up()
    pending.finish()
    with pytest.raises(NotLent, match="hung up"):
        copy.result(PATIENCE)


def test_what_is_lent_too_late_is_returned_unread(lender: FakeLender) -> None:
    copy = lender.link.borrow([key_of(7)], [Buffer().address])
    question = hear(lender.channel, Borrow)
    with pytest.raises(NotLent):
        copy.result(PATIENCE)
    assert not lender.link.is_usable
    with pytest.raises(NotLent, match="not asked"):
        lender.link.borrow([key_of(7)], [0]).result(PATIENCE)
    lender.say(Lent(question.id, POOL, [0]))
    assert hear(lender.channel, Return).id == question.id
    assert not lender.link.is_usable, "it has to wait for a while"
    until(lambda: lender.link.is_usable)
    assert lender.copier.pending.empty()


def test_a_neighbour_that_was_late_again_waits_for_longer(lender: FakeLender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.peer_link.FIRST_DISTRUST", 0.001)
    for _ in range(4):
        copy = lender.link.borrow([key_of(7)], [Buffer().address])
        with pytest.raises(NotLent, match="did not give"):
            copy.result(PATIENCE)
        lender.say(Refused(hear(lender.channel, Borrow).id))
        until(lambda: lender.link.is_usable)
    assert lender.link._lapses == 4
    copy = lender.link.borrow([key_of(7)], [Buffer().address])
    lender.say(Lent(hear(lender.channel, Borrow).id, POOL, [0]))
    lender.copier.next().finish()
    copy.result(PATIENCE)
    assert lender.link._lapses == 0


def test_a_refusal_is_an_answer(lender: FakeLender) -> None:
    copy = lender.link.borrow([key_of(7)], [Buffer().address])
    lender.say(Refused(hear(lender.channel, Borrow).id))
    with pytest.raises(NotLent):
        copy.result(PATIENCE)
    assert lender.link.is_usable


def test_who_is_asked_has_little_time_to_answer(lender: FakeLender) -> None:
    told: list[object] = []
    assert lender.link.who([key_of(7)], told.append)
    until(lambda: bool(told))
    assert told == [()]


def test_every_question_is_answered_when_the_connection_is_lost(lender: FakeLender) -> None:
    copies = [lender.link.borrow([key_of(7)], [Buffer().address]) for _ in range(3)]
    lender.channel.hang_up()
    for copy in copies:
        with pytest.raises(NotLent):
            copy.result(PATIENCE)


def test_a_channel_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.peer_protocol.SEND_TIMEOUT", 0.05)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)

    def send_for_ever() -> None:
        for number in itertools.count():
            channel.send(Return(number))

    with pytest.raises(PeerGone, match="takes no messages"):
        send_for_ever()
    assert channel.has_hung_up()
    channel.close()
    theirs.close()
