"""Reports of several ranks become one report of the group, once the last rank has sent its own."""

from __future__ import annotations

import pytest

from engine.request import KvReleased, Started, Suspended
from swapper.errors import WorkerError
from swapper.pager import SourceBytes
from worker.merge import ReportMerger
from worker.protocol import PagedIn, PagedOut, PageInFailed, PageOutFailed


def paged_in(seconds: float, nbytes: int, epoch: int = 1) -> PagedIn:
    return PagedIn("a", 0, 4, epoch, seconds, {"disk": SourceBytes(4, nbytes)}, {"read": seconds})


def test_one_rank_speaks_for_itself() -> None:
    reports = [Started("r"), paged_in(1.0, 10), PagedOut("a", 0, 2, 3, 0.1)]
    assert ReportMerger(1).merge(reports) == reports


def test_what_the_leader_says_of_requests_passes_at_once() -> None:
    assert ReportMerger(2).merge([Started("r")]) == [Started("r")]


def test_a_page_in_is_told_when_the_last_rank_has_it_with_what_all_moved() -> None:
    merger = ReportMerger(2)
    assert merger.merge([paged_in(1.0, 10)]) == []
    merged = merger.merge([paged_in(3.0, 20)])
    assert merged == [PagedIn("a", 0, 4, 1, 3.0, {"disk": SourceBytes(8, 30)}, {"read": 4.0})]


def test_a_page_out_frees_what_every_rank_freed() -> None:
    merger = ReportMerger(2)
    merger.merge([PagedOut("a", 1, 7, frames=5, seconds=0.1)])
    assert merger.merge([PagedOut("a", 1, 7, frames=4, seconds=0.3)]) == [PagedOut("a", 1, 7, 4, 0.3)]


def test_a_suspension_needs_the_frames_of_the_rank_that_needs_most() -> None:
    merger = ReportMerger(2)
    merger.merge([Suspended("a", 5, 7, kept_bytes=10, lost_tokens=3, seconds=0.1)])
    assert merger.merge([Suspended("a", 0, 7, kept_bytes=20, seconds=0.3)]) == [Suspended("a", 5, 7, 30, 3, 0.3)]


@pytest.mark.parametrize("answer", [KvReleased("a", 3, 1), PageInFailed("a", 1, "why"), PageOutFailed("a", 1, "why")])
def test_equal_answers_are_told_once(answer: KvReleased | PageInFailed | PageOutFailed) -> None:
    merger = ReportMerger(2)
    assert merger.merge([answer]) == []
    assert merger.merge([answer]) == [answer]


def test_answers_of_different_epochs_wait_apart() -> None:
    merger = ReportMerger(2)
    assert merger.merge([paged_in(1.0, 1, epoch=1), paged_in(1.0, 1, epoch=2)]) == []
    assert [report.epoch for report in merger.merge([paged_in(1.0, 1, epoch=2)]) if isinstance(report, PagedIn)] == [2]


def test_ranks_that_disagree_have_no_common_state() -> None:
    merger = ReportMerger(2)
    merger.merge([paged_in(1.0, 10)])
    with pytest.raises(WorkerError, match="disagree about 'a'"):
        merger.merge([PageInFailed("a", 1, "no such file")])
