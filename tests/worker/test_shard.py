"""A shard obeys in order, answers every command, and keeps its promises when page-ins and binds fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.request import KvReleased, RequestFailed, Resumed, Started, Suspended, Tokens
from swapper.errors import UnsupportedModel, WorkerError
from tests.swapper.paging import FaultyReader
from tests.worker.house import Gate, House, request, write_image
from worker.protocol import (
    Cancel,
    FailPageIn,
    GrantKv,
    PagedIn,
    PagedOut,
    PageIn,
    PageInFailed,
    PageOut,
    PageOutFailed,
    RemoveModel,
    Resume,
    Serve,
    Suspend,
)


@pytest.fixture
def faults() -> set[int]:
    """Pages whose reads fail."""
    return set()


@pytest.fixture
def house(tmp_path: Path, faults: set[int]) -> Iterator[House]:
    """A shard whose reads end at once."""
    house = House(tmp_path, FaultyReader(lambda _, page: page in faults))
    yield house
    house.close()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def slow(tmp_path: Path, gate: Gate) -> Iterator[House]:
    """A shard whose reads end when the test says so."""
    house = House(tmp_path, gate)
    yield house
    gate.shut()
    house.close()


def load(house: House, name: str = "a", pages: int = 3) -> None:
    house.post(PageIn(name, 0, pages, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PagedIn), report


# ---- the life of a model


def test_a_page_in_is_answered_with_what_it_moved_and_the_bind_once(house: House) -> None:
    house.add(tags=(1, 2, 3))
    house.post(PageIn("a", 0, 3, epoch=7))
    [report] = house.hear()
    assert isinstance(report, PagedIn)
    assert (report.model, report.first, report.last, report.epoch) == ("a", 0, 3, 7)
    assert report.sources["disk"].pages == 3
    assert {"map", "read", "bind"} <= set(report.stages)

    house.post(PageOut("a", 1, epoch=8), PageIn("a", 1, 3, epoch=9))
    paged_out, report = house.hear(2)
    assert isinstance(paged_out, PagedOut)
    assert (paged_out.keep, paged_out.epoch, paged_out.frames) == (1, 8, 2)
    assert isinstance(report, PagedIn)
    assert "bind" not in report.stages
    assert house.binds == 1, "a module is built once"


def test_adding_a_model_reads_nothing(house: House, tmp_path: Path) -> None:
    shutil.rmtree(house.add())
    house.post(GrantKv("unknown", 0, epoch=1))
    assert house.hear() == [KvReleased("unknown", 0, 1)]


def test_a_removed_model_leaves_nothing_and_may_come_again(house: House, tmp_path: Path) -> None:
    path = house.add()
    load(house)
    house.post(RemoveModel("a"), PageIn("a", 0, 3, epoch=2))
    assert house.hear() == [PageInFailed("a", 2, "This worker does not have a model a.")]
    assert house.pool.free == house.pool.frames
    assert house.engine.diary[-1] == ("remove", "a")
    shutil.rmtree(path)
    house.add()
    load(house)


def test_a_model_may_be_removed_while_it_is_bound(house: House) -> None:
    house.may_bind.clear()
    house.add()
    house.post(PageIn("a", 0, 2, epoch=1))
    house.hear()
    house.post(Serve(request("r")), RemoveModel("a"), Serve(request("s")))
    house.may_bind.set()
    assert house.hear() == [RequestFailed("s", "This worker does not have a model a.")]
    assert house.engine.models == set()


def test_what_is_asked_of_unknown_models_is_answered(house: House) -> None:
    house.post(
        PageIn("x", 0, 1, 1),
        PageOut("x", 0, 2),
        GrantKv("x", 3, 3),
        Serve(request("r", "x")),
        Cancel("s"),
        RemoveModel("x"),
    )
    words = "This worker does not have a model x."
    assert house.hear(4) == [
        PageInFailed("x", 1, words),
        PageOutFailed("x", 2, words),
        KvReleased("x", 3, 3),
        RequestFailed("r", words),
    ]


def test_another_image_in_the_place_of_a_model_is_not_read_as_that_model(house: House) -> None:
    """`rm` and `add` of the same name, before the daemon has noticed: hashes of the old one would be believed."""
    path = house.add(tags=(1, 2, 3))
    load(house)
    house.post(PageOut("a", 1, epoch=2))
    house.hear()
    shutil.rmtree(path)
    write_image(house.directory, "a", (1, 2, 4))
    house.post(PageIn("a", 1, 3, epoch=3))
    [report] = house.hear()
    assert isinstance(report, PageInFailed)
    assert "replaced" in report.message
    assert house.pool.free == house.pool.frames


# ---- while the module is built


def test_reads_start_before_the_module_is_built(slow: House, gate: Gate) -> None:
    slow.may_bind.clear()
    slow.add()
    slow.post(PageIn("a", 0, 3, epoch=1))
    assert gate.next().page == 0


def test_requests_wait_for_the_module_in_order(house: House) -> None:
    house.may_bind.clear()
    house.add()
    house.post(PageIn("a", 0, 2, epoch=1), GrantKv("a", 4, epoch=2), Serve(request("r")), Serve(request("s")))
    [report] = house.hear()
    assert isinstance(report, PagedIn), "pages that are not the last are told at once"
    house.may_bind.set()
    assert house.hear(3) == [KvReleased("a", 4, 2), Started("r"), Started("s")]


def test_the_last_page_is_in_when_the_module_is_built(house: House) -> None:
    house.may_bind.clear()
    house.add()
    house.post(PageIn("a", 0, 3, epoch=1))
    assert house.poll(timeout=0.05).reports == ()
    house.post(PageOut("a", 0, epoch=2))
    assert house.hear() == [PageOutFailed("a", 2, "Pages of a are still coming in.")]
    house.may_bind.set()
    [report] = house.hear()
    assert isinstance(report, PagedIn)


def test_a_request_that_waits_for_the_module_can_be_cancelled(house: House) -> None:
    house.may_bind.clear()
    house.add()
    house.post(PageIn("a", 0, 2, epoch=1))
    house.hear()
    house.post(Serve(request("r")), Cancel("r"))
    assert house.hear() == [Tokens("r", 0, (), finish="cancelled")]
    house.may_bind.set()
    house.post(Serve(request("s")))
    assert house.hear() == [Started("s")]


def test_a_module_that_cannot_be_built_fails_the_page_in_and_is_tried_again(house: House) -> None:
    house.bind_error = UnsupportedModel("This version of transformers has no Llama.")
    house.add()
    house.post(PageIn("a", 0, 3, epoch=1), GrantKv("a", 4, epoch=2), Serve(request("r")))
    reports = house.hear(2)
    failure = PageInFailed("a", 1, "The module of a cannot be built: This version of transformers has no Llama.")
    assert sorted(reports, key=str) == sorted([failure, KvReleased("a", 4, 2)], key=str)
    assert house.pool.free == house.pool.frames
    house.bind_error = None
    load(house)


def test_a_bind_that_fails_while_pages_come_in_fails_those(slow: House, gate: Gate) -> None:
    slow.bind_error = ValueError("a defect")
    slow.may_bind.clear()
    slow.add()
    slow.post(PageIn("a", 0, 1, epoch=1), PageIn("a", 1, 3, epoch=2))
    reads = [gate.next() for _ in range(3)]
    slow.may_bind.set()
    slow.until(lambda: slow.shard._slots["a"].bind_failure is not None)
    for read in reads:
        read.finish()
    words = "The module of a cannot be built: ValueError('a defect')"
    assert slow.hear(2) == [PageInFailed("a", 1, words), PageInFailed("a", 2, words)]
    assert slow.pool.free == slow.pool.frames


def test_a_bind_that_fails_between_two_page_ins_fails_the_next(house: House) -> None:
    house.may_bind.clear()
    house.bind_error = ValueError("a defect")
    house.add()
    house.post(PageIn("a", 0, 1, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PagedIn)
    house.may_bind.set()
    house.until_idle()
    house.post(PageIn("a", 1, 3, epoch=2))
    assert house.hear() == [PageInFailed("a", 2, "The module of a cannot be built: ValueError('a defect')")]
    assert house.pool.free == house.pool.frames


def test_a_suspension_waits_for_the_bind_behind_its_requests(house: House) -> None:
    house.may_bind.clear()
    house.add()
    house.post(PageIn("a", 0, 2, epoch=1))
    house.hear()
    house.post(Serve(request("r")), Suspend("a", epoch=2), Resume("a", 4, epoch=3))
    house.may_bind.set()
    assert house.hear(3) == [Started("r"), Suspended("a", 1, 2), Resumed("a", 3)]


def test_a_suspended_models_pages_go_and_come(house: House) -> None:
    house.add()
    load(house)
    house.post(Suspend("a", epoch=2), PageOut("a", 0, epoch=3), PageIn("a", 0, 3, epoch=4), Resume("a", 4, epoch=5))
    assert [type(report) for report in house.hear(4)] == [Suspended, PagedOut, Resumed, PagedIn]


def test_a_model_that_is_not_there_is_suspended_already(house: House) -> None:
    house.post(Suspend("a", epoch=2), Resume("a", 4, epoch=3))
    assert house.hear(2) == [Suspended("a", 0, 2), Resumed("a", 3)]


# ---- page-ins that fail


def test_a_missing_image_is_named(house: House) -> None:
    path = house.add()
    shutil.rmtree(path)
    house.post(PageIn("a", 0, 3, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PageInFailed)
    assert f"{path}/manifest.json cannot be read" in report.message


def test_a_truncated_shard_is_named_and_others_are_untouched(house: House) -> None:
    """Scenario 22: a load that fails leaks nothing, and may be tried again once its cause is gone."""
    path = house.add() / "rank-0.safetensors"
    house.add("b", tags=(4, 5))
    load(house, "b", 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    house.post(PageIn("a", 0, 3, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PageInFailed)
    assert "rank-0.safetensors has" in report.message
    assert house.pool.free == house.pool.frames - 2
    path.write_bytes(whole)
    load(house)


def test_a_failed_read_drops_the_models_requests_and_leaves_it_absent(house: House, faults: set[int]) -> None:
    house.add()
    house.add("b", tags=(4, 5))
    load(house)
    load(house, "b", 2)
    house.post(Serve(request("r")), Serve(request("other", "b")), PageOut("a", 1, epoch=2))
    house.hear(3)
    faults.add(2)
    house.post(PageIn("a", 1, 3, epoch=3))
    assert house.hear() == [PageInFailed("a", 3, "Page 2 cannot be read.")]
    assert set(house.engine.running) == {"other"}
    assert house.pool.free == house.pool.frames - 2
    faults.clear()
    load(house)


def test_more_pages_than_frames_fail_the_page_in(house: House) -> None:
    house.add(tags=range(house.pool.frames + 1))
    house.post(PageIn("a", 0, house.pool.frames + 1, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PageInFailed)
    assert "frames are in use" in report.message


def test_page_ins_behind_a_failed_one_fail_with_it(slow: House, gate: Gate) -> None:
    slow.add()
    slow.post(PageIn("a", 0, 1, epoch=1), PageIn("a", 1, 2, epoch=2), PageIn("a", 2, 3, epoch=3))
    reads = [gate.next() for _ in range(3)]
    reads[0].finish()
    [report] = slow.hear()
    assert isinstance(report, PagedIn)
    reads[1].fail("The disk is on fire.")
    reads[2].finish()
    assert slow.hear(2) == [PageInFailed("a", epoch, "The disk is on fire.") for epoch in (2, 3)]


def test_what_crossed_the_news_of_a_failure_changes_nothing(house: House, faults: set[int]) -> None:
    """The daemon may go on for a moment as if the page-in had not failed."""
    house.add()
    faults.add(0)
    house.post(PageIn("a", 0, 2, epoch=1))
    assert house.hear() == [PageInFailed("a", 1, "Page 0 cannot be read.")]
    faults.clear()
    house.post(PageIn("a", 2, 3, epoch=2), Serve(request("r")), GrantKv("a", 4, epoch=3))
    assert house.hear(2) == [
        PageInFailed("a", 2, "Pages before page 2 of a did not come in."),
        KvReleased("a", 4, 3),
    ]
    house.post(PageIn("a", 0, 3, epoch=4), Serve(request("r")))  # sent again, behind the next page-in
    assert {type(report) for report in house.hear(2)} == {PagedIn, Started}


# ---- page-outs


def test_a_page_out_of_a_model_that_was_never_in_frees_nothing(house: House) -> None:
    house.add()
    house.post(PageOut("a", 0, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PagedOut)
    assert report.frames == 0


def test_a_page_out_while_pages_come_in_is_refused(slow: House, gate: Gate) -> None:
    slow.add()
    slow.post(PageIn("a", 0, 3, epoch=1), PageOut("a", 0, epoch=2))
    assert slow.hear() == [PageOutFailed("a", 2, "Pages of a are still coming in.")]


def test_a_page_out_waits_for_the_forward_pass_and_says_if_it_does_not_end(house: House) -> None:
    house.add()
    load(house)
    house.engine.in_a_pass.add("a")
    house.post(PageOut("a", 0, epoch=2))
    assert house.hear() == [PageOutFailed("a", 2, "Model a is still in a forward pass after 60 s.")]
    assert house.pool.free == house.pool.frames - 3, "nothing was unmapped"


def test_frames_that_another_model_shows_are_not_freed(house: House) -> None:
    house.add(tags=(1, 2, 3))
    house.add("b", tags=(1, 2, 9))
    load(house)
    load(house, "b")
    house.post(PageOut("a", 0, epoch=2))
    [report] = house.hear()
    assert isinstance(report, PagedOut)
    assert report.frames == 1


# ---- vital signs


def test_every_poll_carries_a_heartbeat(house: House) -> None:
    house.add()
    load(house)
    heartbeat = house.poll(timeout=0).heartbeat
    assert (heartbeat.frames, heartbeat.frames_free, heartbeat.pages_read) == (8, 5, 3)
    assert heartbeat.resident_bytes > 0


def test_a_shard_is_busy_while_pages_come_in(slow: House, gate: Gate) -> None:
    slow.add()
    slow.post(PageIn("a", 0, 1, epoch=1))
    read = gate.next()
    assert slow.poll(timeout=0).heartbeat.paging
    read.finish()
    slow.hear()
    slow.until_idle()


def test_a_defect_ends_the_shard_and_is_told_by_every_poll(house: House) -> None:
    house.add()
    load(house)
    house.post(Serve(request("r")), Serve(request("r")))
    with pytest.raises(WorkerError, match="it broke: ValueError: The engine has a request r already"):
        house.until(lambda: False)
    with pytest.raises(WorkerError, match="it broke"):
        house.poll(timeout=0)
    house.post(Serve(request("s")))  # harmless


def test_an_image_that_another_node_lacks_is_told_as_that(house: House) -> None:
    house.shard.spec = replace(house.shard.spec, images={"b": "of the daemon's store"})
    shutil.rmtree(house.add())
    house.post(PageIn("a", 0, 3, epoch=1))
    [report] = house.hear()
    assert isinstance(report, PageInFailed)
    assert "whose store must be as the daemon's" in report.message


# ---- one rank of several


def test_a_rank_with_fewer_pages_than_another_moves_in_step_with_it(house: House) -> None:
    house.add(tags=(1, 2, 3))
    house.post(PageIn("a", 0, 2, epoch=1), PageIn("a", 2, 4, epoch=2), PageIn("a", 4, 5, epoch=3))
    reports = house.hear(3)
    assert [(r.first, r.last, r.epoch) for r in reports if isinstance(r, PagedIn)] == [(0, 2, 1), (2, 4, 2), (4, 5, 3)]
    house.post(PageOut("a", 4, epoch=4), PageOut("a", 1, epoch=5), PageIn("a", 1, 5, epoch=6))
    out, further_out, back = house.hear(3)
    assert isinstance(out, PagedOut)
    assert isinstance(further_out, PagedOut)
    assert (out.frames, further_out.frames) == (0, 2)
    assert isinstance(back, PagedIn)


def test_pages_that_did_not_come_in_on_another_rank_are_taken_back(house: House) -> None:
    house.add(tags=(1, 2, 3))
    load(house)
    house.post(Serve(request("r")))
    assert house.hear() == [Started("r")]
    house.post(FailPageIn("a", 1, "Its disk is gone."), Serve(request("crossed it")), PageIn("a", 3, 3, epoch=2))
    assert house.hear(2) == [
        PageInFailed("a", 1, "Its disk is gone."),
        PageInFailed("a", 2, "Pages before page 3 of a did not come in."),
    ]
    assert house.pool.free == house.pool.frames
    assert house.engine.running == {}
    house.post(PageIn("a", 0, 3, epoch=3))
    [report] = house.hear()
    assert isinstance(report, PagedIn)


def test_a_page_in_that_failed_on_another_rank_is_given_up_with_those_behind_it(slow: House, gate: Gate) -> None:
    slow.add(tags=(1, 2, 3))
    slow.post(PageIn("a", 0, 1, epoch=1))
    gate.next().finish()
    assert isinstance(slow.hear()[0], PagedIn)
    slow.post(PageIn("a", 1, 2, epoch=2), PageIn("a", 2, 3, epoch=3))
    reads = [gate.next(), gate.next()]
    slow.post(FailPageIn("a", 1, "Its disk is gone."), FailPageIn("a", 2, "Its disk is gone."))
    slow.until(lambda: not slow.shard._inbox.busy)
    for read in reads:
        read.finish()
    assert slow.hear(3) == [PageInFailed("a", epoch, "Its disk is gone.") for epoch in (1, 2, 3)]
    assert slow.pool.free == slow.pool.frames


def test_a_page_in_that_failed_here_too_is_not_told_twice(house: House, faults: set[int]) -> None:
    house.add(tags=(1, 2, 3))
    faults.add(1)
    house.post(PageIn("a", 0, 3, epoch=1))
    assert isinstance(house.hear()[0], PageInFailed)
    house.post(FailPageIn("a", 1, "Its disk is gone."), FailPageIn("nobody", 1, "?"), GrantKv("nobody", 0, 2))
    assert house.hear() == [KvReleased("nobody", 0, 2)]


def test_a_page_in_that_waits_for_the_bind_fails_with_the_other_rank(house: House) -> None:
    house.may_bind.clear()
    house.add(tags=(1, 2, 3))
    house.post(PageIn("a", 0, 3, epoch=1))
    house.until(lambda: house.pool.free == house.pool.frames - 3)
    house.post(FailPageIn("a", 1, "Its disk is gone."))
    assert house.hear() == [PageInFailed("a", 1, "Its disk is gone.")]
    house.may_bind.set()
    house.post(PageIn("a", 0, 3, epoch=2))
    assert isinstance(house.hear()[0], PagedIn)
