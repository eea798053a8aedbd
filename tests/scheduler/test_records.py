"""Loads and page-outs are told of once, whole, with what they moved."""

from __future__ import annotations

from scheduler.core import actions
from scheduler.records import Records
from swapper.pager import SourceBytes
from tests.scheduler.house import Diary
from worker.protocol import PagedIn, PagedOut, PageInFailed, PageOutFailed


class Books:
    """Records of one model of six pages on one group, with a clock to set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.diary = Diary()
        self.records = Records(self.diary, lambda: self.now, lambda: self.now + 1000)

    def ask(self, first: int, last: int, epoch: int) -> None:
        self.records.page_in_asked(actions.PageIn("g", "m", first, last, epoch), 6)

    def get(self, first: int, last: int, epoch: int, source: str = "disk") -> None:
        sources = {source: SourceBytes(last - first, 10 * (last - first))}
        self.records.paged_in("g", PagedIn("m", first, last, epoch, 0.5, sources, {"read": 0.25}))

    def lose(self, keep: int, epoch: int, reason: str = "memory") -> None:
        self.records.page_out_asked(actions.PageOut("g", "m", keep, epoch), reason)
        self.records.paged_out("g", PagedOut("m", keep, epoch, 3, 0.125))


def test_a_load_lasts_from_its_first_page_in_to_its_last_page_and_adds_up_its_sources() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.now += 1
    books.ask(2, 6, 2)
    books.get(0, 2, 1)
    assert books.diary.loads == []
    books.now += 2
    books.get(2, 6, 2, "alias")
    (load,) = books.diary.loads
    assert (load.model, load.group, load.at, load.seconds, load.pages) == ("m", "g", 1100.0, 3.0, 6)
    assert load.sources == {"disk": SourceBytes(2, 20), "alias": SourceBytes(4, 40)}
    assert load.stages == {"read": 0.5}
    assert load.error is None
    assert books.records.last_load == {"m": load}


def test_extents_of_one_source_are_summed() -> None:
    books = Books()
    for epoch, first in enumerate((0, 2, 4)):
        books.ask(first, first + 2, epoch)
        books.get(first, first + 2, epoch)
    assert books.diary.loads[0].sources == {"disk": SourceBytes(6, 60)}


def test_a_failed_load_is_told_of_with_its_reason() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.ask(2, 4, 2)
    books.get(0, 2, 1)
    books.records.page_in_failed("g", PageInFailed("m", 2, "the file is truncated"))
    (load,) = books.diary.loads
    assert (load.error, load.pages) == ("the file is truncated", 2)


def test_extents_that_fail_together_are_one_failed_load() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.ask(2, 4, 2)
    for epoch in (1, 2):
        books.records.page_in_failed("g", PageInFailed("m", epoch, "I/O error"))
    assert len(books.diary.loads) == 1


def test_a_load_that_the_loss_of_its_group_broke_off_leaves_no_record() -> None:
    books = Books()
    books.ask(0, 6, 1)
    books.records.group_lost("g")
    books.get(0, 6, 1)
    assert books.diary.loads == []


def test_a_load_that_nobody_goes_on_with_ends_and_the_rest_is_a_load_of_its_own() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.get(0, 2, 1)
    books.records.extent_decided("g", "m")
    books.now += 3600
    books.ask(2, 6, 2)
    books.now += 1
    books.get(2, 6, 2)
    (load,) = books.diary.loads
    assert (load.seconds, load.pages) == (1.0, 4)


def test_a_load_with_an_extent_under_way_goes_on() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.ask(2, 6, 2)
    books.get(0, 2, 1)
    books.records.extent_decided("g", "m")
    books.get(2, 6, 2)
    assert books.diary.loads[0].pages == 6


def test_a_page_in_of_an_earlier_world_does_not_count_for_the_load_of_now() -> None:
    books = Books()
    books.ask(0, 2, 1)
    books.records.group_lost("g")
    books.ask(0, 6, 2)
    books.get(0, 6, 1)
    assert books.diary.loads == []


def test_a_page_out_is_told_of_with_its_reason_and_the_time_since_the_last_use() -> None:
    books = Books()
    books.ask(0, 6, 1)
    books.get(0, 6, 1)
    books.now += 5
    books.records.finished("m")
    books.now += 7
    books.lose(2, 2, "evicted")
    assert books.diary.page_outs == [("m", 4, 3, "evicted", 7.0)]


def test_a_model_that_was_never_used_ages_from_its_load() -> None:
    books = Books()
    books.ask(0, 6, 1)
    books.get(0, 6, 1)
    books.now += 4
    books.lose(0, 2)
    assert books.diary.page_outs == [("m", 6, 3, "memory", 4.0)]


def test_a_failed_page_out_is_not_told_of() -> None:
    books = Books()
    books.records.page_out_asked(actions.PageOut("g", "m", 0, 1), "memory")
    books.records.page_out_failed("g", PageOutFailed("m", 1, "busy"))
    books.records.paged_out("g", PagedOut("m", 0, 1, 3, 0.125))
    assert books.diary.page_outs == []


def test_a_forgotten_model_leaves_nothing() -> None:
    books = Books()
    books.ask(0, 6, 1)
    books.get(0, 6, 1)
    books.records.finished("m")
    books.records.forget("m")
    assert not books.records.last_load
    assert not books.records._resident
    assert not books.records._used


def test_what_a_load_waited_for_before_its_first_page_is_a_turn_or_page_outs() -> None:
    books = Books()
    wanted = books.now
    books.now += 2  # for a busy model
    books.records.page_out_asked(actions.PageOut("g", "other", 0, 1), "memory")
    books.now += 3
    books.records.paged_out("g", PagedOut("other", 0, 1, 3, 3.0))
    books.now += 0.5
    books.records.page_in_asked(actions.PageIn("g", "m", 0, 6, 2), 6, wanted)
    books.get(0, 6, 2)
    assert books.diary.loads[0].stages == {"queue": 2.5, "drain": 3.0, "read": 0.25}


def test_a_model_is_whole_once_its_last_page_is_in_and_until_the_first_is_out() -> None:
    books = Books()
    books.ask(0, 6, 1)
    assert not books.records.is_whole("m", 6)
    books.get(0, 6, 1)
    assert books.records.is_whole("m", 6)
    books.lose(5, 2)
    assert not books.records.is_whole("m", 6)
