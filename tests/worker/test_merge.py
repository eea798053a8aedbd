"""Reports of several ranks become one report of the group, once the last rank has sent its own."""

from __future__ import annotations

import pytest

from engine.request import KvReleased, Started
from swapper.errors import WorkerError
from swapper.pager import SourceBytes
from worker.merge import ReportMerger
from worker.protocol import FailPageIn, PagedIn, PagedOut, PageInFailed, PageOutFailed, Report


def paged_in(seconds: float, nbytes: int, epoch: int = 1) -> PagedIn:
    return PagedIn("a", 0, 4, epoch, seconds, {"disk": SourceBytes(4, nbytes)}, {"read": seconds})


class House:
    """A group's merger, and what it has said to the daemon and to the ranks."""

    def __init__(self, ranks: int = 2) -> None:
        self.merger = ReportMerger(ranks)
        self.undo: list[tuple[int, FailPageIn]] = []  # (the rank that it did not go to, the command)

    def hear(self, rank: int, *reports: Report) -> list[Report]:
        merged, undo = self.merger.merge(rank, reports)
        self.undo += [(rank, command) for command in undo]
        return list(merged)


def failed(epoch: int = 1) -> PageInFailed:
    return PageInFailed("a", epoch, "no such file")


def test_one_rank_speaks_for_itself() -> None:
    house = House(ranks=1)
    reports = [Started("r"), paged_in(1.0, 10), PagedOut("a", 0, 2, 3, 0.1), failed(epoch=3)]
    assert house.hear(0, *reports) == reports
    assert house.undo == []


def test_what_the_leader_says_of_requests_passes_at_once() -> None:
    assert House().hear(0, Started("r")) == [Started("r")]


def test_a_page_in_is_told_when_the_last_rank_has_it_with_what_all_moved() -> None:
    house = House()
    assert house.hear(0, paged_in(1.0, 10)) == []
    assert house.hear(1, paged_in(3.0, 20)) == [PagedIn("a", 0, 4, 1, 3.0, {"disk": SourceBytes(8, 30)}, {"read": 4.0})]


def test_a_page_out_frees_what_every_rank_freed() -> None:
    house = House()
    house.hear(0, PagedOut("a", 1, 7, frames=5, seconds=0.1))
    assert house.hear(1, PagedOut("a", 1, 7, frames=4, seconds=0.3)) == [PagedOut("a", 1, 7, 4, 0.3)]


@pytest.mark.parametrize("answer", [KvReleased("a", 3, 1), failed(), PageOutFailed("a", 1, "why")])
def test_equal_answers_are_told_once(answer: KvReleased | PageInFailed | PageOutFailed) -> None:
    house = House()
    assert house.hear(0, answer) == []
    assert house.hear(1, answer) == [answer]


def test_answers_of_different_epochs_wait_apart() -> None:
    house = House()
    assert house.hear(0, paged_in(1.0, 1, epoch=1), paged_in(1.0, 1, epoch=2)) == []
    [report] = house.hear(1, paged_in(1.0, 1, epoch=2))
    assert isinstance(report, PagedIn)
    assert report.epoch == 2


def test_a_page_in_that_fails_on_one_rank_is_undone_on_all_and_told_when_it_is() -> None:
    house = House(ranks=3)
    assert house.hear(0, paged_in(1.0, 10)) == []
    assert house.hear(1, failed()) == []
    assert house.undo == [(1, FailPageIn("a", 1, "no such file"))]
    assert house.hear(2, paged_in(1.0, 10)) == [], "it was in before it heard"
    assert house.hear(2, failed()) == []
    assert house.hear(0, failed()) == [failed()]
    assert len(house.undo) == 1


def test_ranks_that_disagree_have_no_common_state() -> None:
    house = House()
    house.hear(0, PagedOut("a", 1, 7, frames=5, seconds=0.1))
    with pytest.raises(WorkerError, match="disagree about 'a'"):
        house.hear(1, PageOutFailed("a", 7, "why"))
