"""The staging ring does its favour while its worker is idle, a little at a time, and keeps none of its frames."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from swapper.errors import DeviceError
from swapper.host_frames import HostFramePool
from swapper.staging import STAGES_AT_ONCE, Staging
from tests.swapper.paging import PAGE, PATIENCE
from tests.swapper.tiers import Buffer, GatedCopier

RING = 4


class Ring:
    """A staging ring whose copies and whose worker's idleness are the test's to decide."""

    def __init__(self) -> None:
        self.pool = HostFramePool(RING, PAGE)
        self.copier = GatedCopier()
        self.idle = True
        self.staging = Staging(self.pool, self.copier, lambda: self.idle)
        self.answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def order(self, times: int = 1) -> None:
        for _ in range(times):
            self.staging.stage(Buffer(1).address, PAGE, self.answers.put)

    def answer(self) -> int | None:
        return self.answers.get(timeout=PATIENCE)


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring()
    yield ring
    ring.staging.close()
    assert ring.pool.free == RING
    ring.copier.close()
    ring.pool.close()


def test_a_few_pages_are_staged_at_a_time(ring: Ring) -> None:
    ring.order(RING)
    for left in range(RING, 0, -1):
        assert ring.copier.pending.qsize() == min(left, STAGES_AT_ONCE)
        ring.copier.next().finish()
        assert ring.answer() is not None


def test_a_frame_is_used_again_when_it_was_given_back(ring: Ring) -> None:
    ring.order(RING + 1)
    frames = set()
    for _ in range(RING):
        ring.copier.next().finish()
        frames.add(ring.answer())
    assert len(frames) == RING
    assert ring.copier.pending.empty()
    ring.staging.give_back(2)
    ring.copier.next().finish()
    assert ring.answer() == 2


def test_what_waits_is_refused_when_the_worker_pages_in_itself(ring: Ring) -> None:
    ring.order(RING)
    ring.idle = False
    ring.copier.next().finish()
    assert ring.answer() is not None, "what was under way is finished"
    assert [ring.answer(), ring.answer()] == [None, None]
    ring.copier.next().finish()
    assert ring.answer() is not None
    ring.order()
    assert ring.answer() is None


def test_more_than_the_ring_is_refused(ring: Ring) -> None:
    ring.order(STAGES_AT_ONCE + RING + 1)
    assert ring.answer() is None
    for _ in range(RING):
        ring.copier.next().finish()
        assert ring.answer() is not None
    ring.idle = False
    ring.staging.give_back(0)
    assert [ring.answer() for _ in range(STAGES_AT_ONCE)] == [None] * STAGES_AT_ONCE


def test_a_copy_that_fails_is_a_refusal(ring: Ring) -> None:
    ring.order()
    ring.copier.next().future.set_exception(DeviceError("The link is down."))
    assert ring.answer() is None
