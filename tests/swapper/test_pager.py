"""Pages come in from the front and leave from the tail; equal pages share a frame; a failure leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from swapper.errors import CorruptImage, HashMismatch, OutOfFrames, PageInAborted, ReadError, WorkerError
from swapper.frames import Frame, Region
from swapper.host_frames import HostFramePool
from swapper.image import Shard
from swapper.pager import PagedShard, Pager
from swapper.pread import PreadReader
from swapper.readers import Reader
from tests.swapper.paging import (
    DATA_START,
    PAGE,
    PATIENCE,
    FaultyReader,
    GatedReader,
    Outcome,
    data_of,
    memory,
    page_in,
    resident_bytes,
    write_shard,
)

FRAMES = 12


class Bench:
    """A pager over a pool and a reader, and shards for it."""

    def __init__(self, directory: Path, reader: Reader, frames: int = FRAMES, **options: object) -> None:
        self.directory = directory
        self.reader = reader
        self.pool = HostFramePool(frames, PAGE)
        self.pager = Pager(self.pool, reader, **options)  # type: ignore[arg-type]

    def path(self, model: str) -> Path:
        return self.directory / model

    def open(self, model: str, tags: Sequence[int], tail: int = PAGE) -> PagedShard:
        return self.pager.open(model, write_shard(self.path(model), tags, tail), self.path(model))

    def begin(self, model: str, first: int, last: int) -> Outcome:
        outcome = Outcome()
        self.pager.page_in(model, first, last, outcome)
        return outcome

    def close(self) -> None:
        self.pager.shutdown()
        self.reader.close()
        assert self.pool.free == self.pool.frames, "a frame leaked"
        self.pool.close()


MakeBench = Callable[..., Bench]


def record_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """First page and length of what is mapped in one go from now on."""
    runs: list[tuple[int, int]] = []
    map_frames = bench.pool.map

    def record(region: Region, page: int, *frames: Frame) -> None:
        runs.append((page, len(frames)))
        map_frames(region, page, *frames)

    monkeypatch.setattr(bench.pool, "map", record)
    return runs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(reader: Reader | None = None, **options: object) -> Bench:
        benches.append(Bench(tmp_path, reader or PreadReader(2), **options))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def wait_in_thread(shard: PagedShard, nbytes: int, given_up: Callable[[], bool] | None = None) -> Outcome:
    """Start a wait; its outcome is None or the exception that ended it. Returns when the thread waits."""
    outcome = Outcome()
    begun = threading.Event()

    def look() -> bool:
        begun.set()
        return given_up is not None and given_up()

    def run() -> None:
        try:
            outcome(shard.wait(nbytes, look))  # type: ignore[arg-type,func-returns-value]
        except PageInAborted as error:
            outcome(error)

    threading.Thread(target=run, daemon=True).start()
    assert begun.wait(PATIENCE)
    return outcome


# ---- in and out


def test_a_model_is_paged_in_byte_for_byte(make: MakeBench) -> None:
    bench = make(verify=True)
    shard = bench.open("a", [1, 2, 3], tail=8192)
    result = page_in(bench.pager, "a", 0, 3)
    assert resident_bytes(shard) == data_of([1, 2, 3], tail=8192)
    assert (result.first, result.last) == (0, 3)
    assert result.sources["page_cache"].pages == 3
    assert result.sources["page_cache"].nbytes == 2 * PAGE + 8192
    assert result.seconds > 0
    assert set(result.stages) == {"map", "read", "verify"}
    assert all(seconds > 0 for seconds in result.stages.values())
    assert bench.pager.progress == 3


def test_a_last_page_that_is_not_whole_counts_as_in(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2], tail=4096)
    page_in(bench.pager, "a", 0, 2)
    assert shard.is_ready(shard.shard.nbytes)


def test_extents_follow_one_another(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2, 3, 4, 5])
    outcomes = [bench.begin("a", first, last) for first, last in ((0, 2), (2, 2), (2, 5))]
    assert [(result.first, result.last) for result in (outcome.result() for outcome in outcomes)] == [
        (0, 2),
        (2, 2),
        (2, 5),
    ]
    assert not any(outcome.came for outcome in outcomes), "each is told once"
    assert resident_bytes(shard) == data_of([1, 2, 3, 4, 5])


def test_a_page_in_that_leaves_a_gap_or_passes_the_end_is_refused(make: MakeBench) -> None:
    bench = make()
    bench.open("a", [1, 2, 3])
    page_in(bench.pager, "a", 0, 1)
    for first, last in ((0, 1), (2, 3), (1, 4), (2, 1), (-1, 2)):
        with pytest.raises(ValueError, match="the next page is 1 of 3"):
            bench.begin("a", first, last)


def test_only_the_tail_is_paged_out_and_comes_back(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2, 3, 4])
    page_in(bench.pager, "a", 0, 4)
    assert bench.pager.page_out("a", 1) == 3
    assert (shard.resident, bench.pool.free) == (1, FRAMES - 1)
    assert shard.is_ready(PAGE)
    assert not shard.is_ready(PAGE + 1)
    assert resident_bytes(shard) == data_of([1])
    page_in(bench.pager, "a", 1, 4)
    assert resident_bytes(shard) == data_of([1, 2, 3, 4])


def test_paging_out_what_is_out_does_nothing(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2])
    assert bench.pager.page_out("a", 0) == 0
    page_in(bench.pager, "a", 0, 1)
    assert bench.pager.page_out("a", 1) == 0
    assert bench.pager.page_out("a", 7) == 0
    assert shard.resident == 1


def test_addresses_never_change(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2])
    address = shard.region.address
    for _ in range(3):
        page_in(bench.pager, "a", 0, 2)
        assert shard.region.address == address
        assert resident_bytes(shard) == data_of([1, 2])
        bench.pager.page_out("a", 0)


def test_two_models_come_in_at_once(make: MakeBench) -> None:
    bench = make()
    a, b = bench.open("a", [1, 2, 3, 4]), bench.open("b", [5, 6, 7, 8])
    outcomes = bench.begin("a", 0, 4), bench.begin("b", 0, 4)
    for outcome in outcomes:
        outcome.result()
    assert resident_bytes(a) == data_of([1, 2, 3, 4])
    assert resident_bytes(b) == data_of([5, 6, 7, 8])


def test_reads_in_flight_are_bounded(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader, depth=2)
    bench.open("a", [1, 2, 3, 4])
    outcome = bench.begin("a", 0, 4)
    for page in range(4):
        first = reader.next()
        assert first.page == page
        assert reader.started <= page + 2
        first.finish()
    outcome.result()


def test_adjacent_pages_are_mapped_and_read_together(make: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = GatedReader()
    bench = make(reader, depth=4, run=2)
    runs = record_runs(bench, monkeypatch)
    paged = bench.open("a", [1, 2, 3, 4, 5, 6, 7])
    outcome = bench.begin("a", 0, 7)
    for _ in range(4):
        reader.next().finish()
    outcome.result()
    assert runs == [(0, 2), (2, 2), (4, 2), (6, 1)]
    assert resident_bytes(paged) == data_of([1, 2, 3, 4, 5, 6, 7])


def test_what_some_frame_holds_is_mapped_with_its_neighbours_and_what_is_being_read_ends_a_run(
    make: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(FaultyReader(lambda path, page: False), depth=8, run=8)
    bench.open("other", [3])
    page_in(bench.pager, "other", 0, 1)
    runs = record_runs(bench, monkeypatch)
    paged = bench.open("a", [1, 2, 3, 4, 4, 5])
    result = page_in(bench.pager, "a", 0, 6)
    assert result.sources["alias"].pages == 2
    assert resident_bytes(paged) == data_of([1, 2, 3, 4, 4, 5])
    assert runs == [(0, 4), (4, 2)]  # page 2 is mapped only, page 4 waits for page 3's read


def test_a_run_is_no_longer_than_there_are_frames(make: MakeBench) -> None:
    bench = make(FaultyReader(lambda path, page: False), frames=3, depth=8, run=4)
    bench.open("a", [1, 2, 3, 4])
    with pytest.raises(OutOfFrames):
        page_in(bench.pager, "a", 0, 4)
    assert bench.pool.free == 3
    page_in(bench.pager, "a", 0, 3)


def test_files_are_open_only_while_something_is_read(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    bench.open("a", [1, 2])
    assert reader.open_files == 0
    outcomes = [bench.begin("a", 0, 1), bench.begin("a", 1, 2)]
    reads = [reader.next(), reader.next()]
    assert reader.open_files == 1
    for read in reads:
        read.finish()
    for outcome in outcomes:
        outcome.result()
    assert reader.open_files == 0


# ---- readiness


def test_pages_become_ready_in_order_however_they_arrive(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    shard = bench.open("a", [1, 2, 3])
    outcome = bench.begin("a", 0, 3)
    reads = [reader.next() for _ in range(3)]
    reads[1].finish()
    reads[2].finish()
    assert bench.pager.progress == 2
    assert shard.resident == 0
    reads[0].finish()
    assert shard.resident == 3
    outcome.result()


def test_a_wait_ends_when_its_own_bytes_are_in(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    shard = bench.open("a", [1, 2])
    first, second = wait_in_thread(shard, 100), wait_in_thread(shard, PAGE + 1)
    outcome = bench.begin("a", 0, 2)
    reads = [reader.next(), reader.next()]
    reads[0].finish()
    assert first.get() is None
    assert not second.came
    reads[1].finish()
    assert second.get() is None
    outcome.result()


def test_a_wait_may_come_before_the_page_in_is_asked_for(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1])
    waiting = wait_in_thread(shard, PAGE)
    page_in(bench.pager, "a", 0, 1)
    assert waiting.get() is None


def test_a_wait_ends_when_it_is_given_up(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1])
    given_up = threading.Event()
    waiting = wait_in_thread(shard, PAGE, given_up.is_set)
    shard.wake()
    assert not waiting.came
    given_up.set()
    shard.wake()
    assert isinstance(waiting.get(), PageInAborted)


def test_a_wait_ends_when_the_page_in_fails_even_if_a_retry_follows_at_once(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    shard = bench.open("a", [1, 2])
    outcome = bench.begin("a", 0, 2)
    waiting = wait_in_thread(shard, 2 * PAGE)
    reads = [reader.next(), reader.next()]
    reads[0].fail("The disk is on fire.")
    error = waiting.get()
    assert isinstance(error, PageInAborted)
    assert "The disk is on fire." in str(error)
    with pytest.raises(PageInAborted):  # nor does a new wait begin
        shard.wait(1)
    reads[1].finish()
    assert isinstance(outcome.get(), ReadError)
    retry = bench.begin("a", 0, 2)
    waiting = wait_in_thread(shard, 2 * PAGE)
    for _ in range(2):
        reader.next().finish()
    assert waiting.get() is None
    retry.result()


def test_an_abort_ends_waits_for_pages_that_were_never_asked_for(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2])
    page_in(bench.pager, "a", 0, 1)
    waiting = wait_in_thread(shard, 2 * PAGE)
    bench.pager.abort("a")
    assert isinstance(waiting.get(), PageInAborted)
    assert shard.resident == 1, "what is in stays in: no page-in failed"
    shard.wait(PAGE)
    page_in(bench.pager, "a", 1, 2)
    shard.wait(2 * PAGE)


def test_closing_ends_waits_and_gives_everything_back(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [1, 2])
    page_in(bench.pager, "a", 0, 1)
    waiting = wait_in_thread(shard, 2 * PAGE)
    bench.pager.close("a")
    assert isinstance(waiting.get(), PageInAborted)
    assert bench.pool.free == FRAMES
    with pytest.raises(ValueError, match="a is not open"):
        bench.begin("a", 0, 1)
    bench.open("a", [3])
    page_in(bench.pager, "a", 0, 1)


# ---- equal pages


def test_a_page_that_another_model_holds_is_not_read_again(make: MakeBench) -> None:
    bench = make()
    a, b = bench.open("a", [1, 2, 3]), bench.open("b", [1, 9, 3])
    page_in(bench.pager, "a", 0, 3)
    result = page_in(bench.pager, "b", 0, 3)
    assert {source: moved.pages for source, moved in result.sources.items()} == {"alias": 2, "page_cache": 1}
    assert bench.pool.free == FRAMES - 4
    assert bench.pager.page_out("a", 0) == 1, "two of three frames are still shared"
    assert resident_bytes(b) == data_of([1, 9, 3])
    assert bench.pager.page_out("b", 0) == 3
    assert (a.resident, bench.pool.free) == (0, FRAMES)


def test_equal_pages_of_one_shard_share_a_frame(make: MakeBench) -> None:
    bench = make()
    shard = bench.open("a", [7, 7, 1, 7])
    page_in(bench.pager, "a", 0, 4)
    assert resident_bytes(shard) == data_of([7, 7, 1, 7])
    assert bench.pool.free == FRAMES - 2


def test_equal_beginnings_of_unequal_length_are_not_equal(make: MakeBench) -> None:
    bench = make()
    a, b = bench.open("a", [1]), bench.open("b", [1], tail=4096)
    page_in(bench.pager, "a", 0, 1)
    page_in(bench.pager, "b", 0, 1)
    assert bench.pool.free == FRAMES - 2
    assert resident_bytes(a)[:4096] == resident_bytes(b)


def test_a_page_that_is_being_read_is_waited_for(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    bench.open("a", [1])
    b = bench.open("b", [2, 1])
    first, second = bench.begin("a", 0, 1), bench.begin("b", 0, 2)
    reads = {read.path.name: read for read in (reader.next(), reader.next())}
    reads["b"].finish()
    assert b.resident == 1
    assert bench.pool.free == FRAMES - 2, "the page that waits holds no frame"
    reads["a"].finish()
    first.result()
    assert second.result().sources["alias"].pages == 1
    assert reader.started == 2
    assert resident_bytes(b) == data_of([2, 1])


def test_when_the_other_read_fails_the_page_is_read_for_itself(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    a = bench.open("a", [1])
    b = bench.open("b", [1, 1])
    first, second = bench.begin("a", 0, 1), bench.begin("b", 0, 2)
    reader.next().fail()
    assert isinstance(first.get(), ReadError)
    read = reader.next()
    assert (read.path.name, read.page) == ("b", 0)
    read.finish()
    second.result()
    assert reader.started == 2, "the second page of b waited for the first"
    assert (a.resident, bench.pool.free) == (0, FRAMES - 1)
    assert resident_bytes(b) == data_of([1, 1])


def test_the_read_of_a_model_that_was_given_up_still_serves_another(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    bench.open("a", [1])
    b = bench.open("b", [1])
    first, second = bench.begin("a", 0, 1), bench.begin("b", 0, 1)
    read = reader.next()
    bench.pager.abort("a")
    read.finish()
    assert isinstance(first.get(), PageInAborted)
    assert second.result().sources.keys() <= {"alias", "disk"}
    assert resident_bytes(b) == data_of([1])


# ---- failures


@pytest.mark.parametrize("position", range(4))
def test_a_read_that_fails_leaves_the_model_absent_and_the_next_try_works(make: MakeBench, position: int) -> None:
    reader = FaultyReader(lambda path, page: path.name == "a" and page == position)
    bench = make(reader, depth=2)
    a, b = bench.open("a", [1, 2, 3, 4]), bench.open("b", [9, 2])
    page_in(bench.pager, "b", 0, 2)
    if position != 1:  # page 1 is an alias of b's: it is not read at all
        with pytest.raises(ReadError, match=f"Page {position} cannot be read"):
            page_in(bench.pager, "a", 0, 4)
        assert a.resident == 0
        assert bench.pool.free == FRAMES - 2
    assert resident_bytes(b) == data_of([9, 2]), "others are untouched"
    reader.fault = lambda path, page: False
    page_in(bench.pager, "a", 0, 4)
    assert resident_bytes(a) == data_of([1, 2, 3, 4])


def test_a_failure_takes_pages_along_that_were_in_and_page_ins_that_were_queued(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    shard = bench.open("a", [1, 2, 3, 4])
    outcomes = [bench.begin("a", page, page + 1) for page in range(4)]
    reads = [reader.next() for _ in range(4)]
    reads[0].finish()
    outcomes[0].result()
    assert shard.is_ready(PAGE)
    reads[2].fail()
    assert not shard.is_ready(1), "at once"
    late = bench.begin("a", 4, 4)  # its caller has not heard yet
    reads[1].finish()
    assert not any(outcome.came for outcome in [*outcomes[1:], late]), "one read is still in flight"
    reads[3].finish()
    assert all(isinstance(outcome.get(), ReadError) for outcome in [*outcomes[1:], late])
    assert bench.pool.free == FRAMES
    stale = bench.begin("a", 2, 4)
    assert isinstance(stale.get(), PageInAborted), "asked for before its caller heard of the failure"


def test_an_abort_waits_for_the_reads_in_flight(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader, depth=2)
    shard = bench.open("a", [1, 2, 3])
    outcome = bench.begin("a", 0, 3)
    reads = [reader.next(), reader.next()]
    bench.pager.abort("a")
    bench.pager.abort("a")  # once more is harmless
    reads[0].finish()
    assert not outcome.came
    with pytest.raises(ValueError, match="being paged in"):
        bench.pager.page_out("a", 0)
    reads[1].finish()
    assert isinstance(outcome.get(), PageInAborted)
    assert (reader.started, shard.resident, bench.pool.free) == (2, 0, FRAMES)


def test_running_out_of_frames_gives_all_of_them_back(make: MakeBench) -> None:
    bench = make(frames=3)
    a, b = bench.open("a", [1, 2]), bench.open("b", [3, 4])
    page_in(bench.pager, "a", 0, 2)
    with pytest.raises(OutOfFrames):
        page_in(bench.pager, "b", 0, 2)
    assert (b.resident, bench.pool.free) == (0, 1)
    assert resident_bytes(a) == data_of([1, 2])
    bench.pager.page_out("a", 1)
    page_in(bench.pager, "b", 0, 2)
    assert resident_bytes(b) == data_of([3, 4])


def test_pages_that_were_in_are_unmapped_only_when_nothing_runs_on_them(make: MakeBench) -> None:
    reader = GatedReader()
    quiet = threading.Event()
    asked: list[str] = []

    def quiesce(model: str) -> None:
        asked.append(model)
        assert quiet.wait(PATIENCE)

    bench = make(reader, quiesce=quiesce)
    shard = bench.open("a", [1, 2])
    outcomes = bench.begin("a", 0, 1), bench.begin("a", 1, 2)
    reads = [reader.next(), reader.next()]
    reads[0].finish()
    outcomes[0].result()
    waiting = wait_in_thread(shard, 2 * PAGE)
    reads[1].fail()
    assert isinstance(waiting.get(), PageInAborted), "the forward pass hears of it first"
    assert shard.resident == 0
    assert memory(shard.region.address, PAGE) == data_of([1]), "and may still touch what was in"
    bench.open("b", [3])
    other = bench.begin("b", 0, 1)
    reader.next().finish()
    other.result()  # another model's pages come in meanwhile
    quiet.set()
    assert isinstance(outcomes[1].get(), ReadError)
    assert asked == ["a"]


def test_bytes_that_are_not_what_was_packed_never_become_ready(make: MakeBench) -> None:
    bench = make(verify=True)
    shard = bench.open("a", [1, 2, 3])
    good = bench.path("a").read_bytes()
    at = DATA_START + 2 * PAGE - 1  # the last byte of page 1
    bench.path("a").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(HashMismatch, match=f"offset {DATA_START + PAGE}"):
        page_in(bench.pager, "a", 0, 3)
    assert (shard.resident, bench.pool.free) == (0, FRAMES)
    bench.path("a").write_bytes(good)
    page_in(bench.pager, "a", 0, 3)
    assert resident_bytes(shard) == data_of([1, 2, 3])


def test_a_file_that_is_too_short_is_refused_before_a_byte_is_read(make: MakeBench, tmp_path: Path) -> None:
    bench = make()
    shard = write_shard(tmp_path / "a", [1, 2])
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[:-1])
    with pytest.raises(CorruptImage, match=rf"has {len(whole) - 1:,} bytes, but its manifest says {len(whole):,}"):
        bench.pager.open("a", shard, tmp_path / "a")


@pytest.mark.parametrize("damage", ["truncated", "gone"])
def test_a_file_that_is_damaged_later_fails_the_page_in_until_it_is_repaired(make: MakeBench, damage: str) -> None:
    bench = make()
    shard = bench.open("a", [1, 2])
    whole = bench.path("a").read_bytes()
    if damage == "gone":
        bench.path("a").unlink()
    else:
        bench.path("a").write_bytes(whole[:-1])
    with pytest.raises(CorruptImage, match=str(bench.path("a"))):
        page_in(bench.pager, "a", 0, 2)
    assert bench.pool.free == FRAMES
    bench.path("a").write_bytes(whole)
    page_in(bench.pager, "a", 0, 2)
    assert resident_bytes(shard) == data_of([1, 2])


def test_a_model_is_opened_once(make: MakeBench) -> None:
    bench = make()
    bench.open("a", [1])
    with pytest.raises(ValueError, match="a is open already"):
        bench.open("a", [1])


def test_a_callback_that_raises_does_not_end_paging(make: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.open("a", [1, 2])

    def broken(outcome: object) -> None:
        raise RuntimeError("a defect")

    bench.pager.page_in("a", 0, 1, broken)
    page_in(bench.pager, "a", 1, 2)
    assert "a defect" in caplog.text


# ---- the end


def test_shutting_down_gives_up_what_is_under_way(make: MakeBench) -> None:
    reader = GatedReader()
    bench = make(reader)
    bench.open("a", [1, 2])
    outcome = bench.begin("a", 0, 2)
    reads = [reader.next(), reader.next()]
    with pytest.raises(WorkerError, match="did not come back within 0 s"):
        bench.pager.shutdown(timeout=0)
    with pytest.raises(ValueError, match="shut down"):
        bench.begin("a", 2, 2)
    for read in reads:
        read.finish()
    bench.pager.shutdown()
    assert isinstance(outcome.get(), PageInAborted)


def test_an_empty_shard_is_in_at_once(make: MakeBench, tmp_path: Path) -> None:
    bench = make()
    (tmp_path / "a").write_bytes(bytes(DATA_START))
    shard = bench.pager.open("a", Shard(0, "a", DATA_START, 0, (), (), ()), tmp_path / "a")
    assert page_in(bench.pager, "a", 0, 0).sources == {}
    assert shard.is_ready(0)
