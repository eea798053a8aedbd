"""The engine: many models, each with its own thread, that share a processor and a frame pool."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from engine.batch import StepBatch
from engine.engine import Engine
from engine.request import EngineReport, KvReleased, RequestFailed, SamplingParams, Tokens
from engine.runner import ModelRunner
from engine.sampling import TOP_P_PREFIX, Choice, SamplingRow, sample
from swapper.errors import OutOfFrames, WorkerError
from swapper.frames import Frame, FramePool
from swapper.host_frames import HostFramePool
from tests.engine.fakes import TIMEOUT, FakeModel, FakeShard, Reports, continuation, request

PAGE = 4096
FRAMES = 32


@pytest.fixture(scope="module")
def pool() -> Iterator[FramePool]:
    pool = HostFramePool(FRAMES, PAGE)
    yield pool
    assert pool.free == FRAMES, "a test kept frames"
    pool.close()


@pytest.fixture
def reports() -> Reports:
    return Reports()


class AheadRunner(ModelRunner):
    """Launches passes ahead, as on a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.runs_ahead = True


@pytest.fixture(params=["", "ahead"])
def engine(
    pool: FramePool, reports: Reports, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    if request.param:
        monkeypatch.setattr("engine.engine.ModelRunner", AheadRunner)
    before = threading.active_count()
    engine = Engine(pool, reports.emit, max_batch_tokens=64, max_batch_sequences=8)
    yield engine
    engine.close(TIMEOUT)
    assert pool.free == FRAMES
    assert threading.active_count() == before, "a thread outlived the engine"


def add(
    engine: Engine, name: str = "fake", shard: FakeShard | None = None, frames: int = 8, **model: object
) -> FakeModel:
    fake = FakeModel(name, **model)  # type: ignore[arg-type]
    engine.add(fake, shard or FakeShard())  # type: ignore[arg-type]
    engine.grant_kv(name, frames, 0)
    return fake


class Latch:
    """Holds a model's passes up, at their start, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self.reached.set()
        assert self._open.wait(TIMEOUT)

    def wait(self) -> None:
        assert self.reached.wait(TIMEOUT)

    def open(self) -> None:
        self._open.set()


def test_requests_join_and_leave_a_running_batch(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    model = add(engine, before=latch)
    engine.submit(request("a", [1, 2, 3], max_tokens=5))
    latch.wait()
    engine.submit(request("b", [4], max_tokens=9))
    latch.open()
    reports.wait_for("a", "b")
    assert reports.answer("a") == continuation([1, 2, 3], 5)
    assert reports.answer("b") == continuation([4], 9)
    assert [len(batch.slices) for batch in model.batches[:2]] == [1, 2]
    assert engine.steps == len(model.batches)


def test_each_pass_reports_in_one_list(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    add(engine, before=latch)
    engine.submit(request("first", [9], max_tokens=2))
    latch.wait()
    for i in range(3):
        engine.submit(request(f"r{i}", [i], max_tokens=3))
    latch.open()
    reports.wait_for("first", *(f"r{i}" for i in range(3)))
    tokens = [[r for r in part if isinstance(r, Tokens)] for part in reports.lists]
    assert [len(part) for part in tokens if part] == [1, 4, 3, 3]


def test_passes_are_launched_ahead_until_somebody_waits(
    pool: FramePool, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, a request of its own, a cancel: each is heard after the pass under way and the one behind it."""
    monkeypatch.setattr("engine.engine.ModelRunner", AheadRunner)
    engine = Engine(pool, reports.emit, max_batch_tokens=64, max_batch_sequences=8)
    reached, go_on = threading.Event(), threading.Event()

    def hold(batch: StepBatch) -> None:
        if batch.slices[0].context == 20:
            reached.set()
            assert go_on.wait(TIMEOUT)

    model = add(engine, before=hold)
    add(engine, "other")
    engine.submit(request("a", [1, 2, 3], max_tokens=60))
    assert reached.wait(TIMEOUT)
    assert model.ahead == [False, False, *[True] * 16]
    engine.submit(request("b", [4], max_tokens=9))
    engine.submit(request("c", [5], max_tokens=9, model="other"))
    go_on.set()
    reports.wait_for("a", "b", "c")
    assert [len(batch.slices) for batch in model.batches[:20]] == [1] * 18 + [2, 2]
    assert reports.answer("a") == continuation([1, 2, 3], 60)
    assert reports.answer("b") == continuation([4], 9)
    engine.close(TIMEOUT)


def test_tokens_that_needed_a_longer_look_void_the_pass_behind_them(engine: Engine, reports: Reports) -> None:
    """A flat distribution's top-p needs more than the tokens looked at first: the pass behind had another token."""
    model = add(engine, vocab_size=3 * TOP_P_PREFIX, flat=True)
    engine.submit(request("a", [1, 2], max_tokens=12, temperature=1.0, top_p=0.9, seed=3))
    reports.wait_for("a")
    scores = torch.zeros(12, model.vocab_size)
    rows = [SamplingRow(SamplingParams(top_p=0.9, seed=3), position) for position in range(2, 14)]
    assert reports.answer("a") == tuple(one.token for one in sample(scores, rows) if one)


def test_a_model_that_is_not_there_fails_the_request(engine: Engine, reports: Reports) -> None:
    engine.submit(request("a", [1], model="absent"))
    assert reports.all == [RequestFailed("a", "This worker does not have a model absent.")]


def test_names_are_unique(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    add(engine, before=latch)
    with pytest.raises(ValueError, match="a model fake already"):
        add(engine)
    engine.submit(request("a", [1]))
    with pytest.raises(ValueError, match="a request a already"):
        engine.submit(request("a", [1]))
    latch.open()
    reports.wait_for("a")
    engine.submit(request("a2", [1]))
    reports.wait_for("a2")


def test_an_idle_model_costs_no_thread_before_its_first_request(engine: Engine) -> None:
    before = threading.active_count()
    for i in range(20):
        engine.add(FakeModel(f"m{i}"), FakeShard())  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_a_cancel_takes_effect_after_the_pass_under_way(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    model = add(engine, before=latch)
    engine.submit(request("a", [1], max_tokens=100))
    latch.wait()
    engine.cancel("a")
    latch.open()
    reports.wait_for("a")
    assert reports.finished["a"] == "cancelled"
    assert len(model.batches) == 1
    engine.cancel("a")
    engine.cancel("never seen")


def test_a_busy_model_hands_the_turn_to_one_that_waits(engine: Engine, reports: Reports) -> None:
    order: list[str] = []
    latch = Latch()

    def busy(batch: StepBatch) -> None:
        order.append("busy")
        latch(batch)

    add(engine, "busy", before=busy)
    add(engine, "other", before=lambda batch: order.append("other"))
    engine.submit(request("b", [1], model="busy", max_tokens=40))
    latch.wait()
    engine.submit(request("o", [1], model="other", max_tokens=40))
    while not engine._turn._waiting:  # until the other model's pass queues
        assert engine.busy
    latch.open()
    reports.wait_for("b", "o")
    assert order[:2] == ["busy", "other"]
    for name, model in (("b", "busy"), ("o", "other")):
        assert reports.answer(name) == continuation([1], 40)
        assert order.count(model) == 40


def test_a_pass_that_takes_long_to_launch_lets_others_launch_between_its_layers(
    engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runner.LAUNCH_SLICE", 0.0)
    latch, seen = Latch(), list[int]()
    long = add(engine, "long", FakeShard(3), before=latch, layers=3)
    add(engine, "other", before=lambda batch: seen.append(len(long.layers_done)))
    engine._model("long").runs_ahead = True
    engine.submit(request("l", [1, 2, 3], model="long", max_tokens=1))
    latch.wait()
    engine.submit(request("o", [1], model="other", max_tokens=1))
    while not engine._turn._waiting:
        assert engine.busy
    latch.open()
    reports.wait_for("l", "o")
    assert seen == [0], "before the first layer, where the long pass gave way"
    assert (reports.answer("l"), reports.answer("o")) == (continuation([1, 2, 3], 1), continuation([1], 1))


def test_others_launch_while_a_pass_under_way_is_waited_for(
    engine: Engine, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, launched, take = threading.Event(), threading.Event(), Choice.take

    def take_once_the_other_has_launched(choice: Choice) -> list[Any]:
        waited.set()
        assert launched.wait(TIMEOUT)
        assert engine.busy, "a GPU that hangs is to be noticed"
        return take(choice)

    monkeypatch.setattr(Choice, "take", take_once_the_other_has_launched)
    add(engine)
    add(engine, "other", before=lambda batch: launched.set())
    if not engine._model("fake").runs_ahead:
        pytest.skip("a processor's passes have run once they are launched")
    engine.submit(request("a", [1, 2, 3]))
    assert waited.wait(TIMEOUT)
    engine.submit(request("b", [4, 5], model="other"))
    reports.wait_for("a", "b")
    assert not reports.failed


def test_only_one_pass_computes_at_a_time(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    slow = add(engine, "slow", before=latch)
    other = add(engine, "other")
    engine.submit(request("s", [1], model="slow", max_tokens=1))
    latch.wait()
    assert engine.busy
    engine.submit(request("o", [1], model="other", max_tokens=1))
    engine.fence("absent")
    assert other.batches == []
    latch.open()
    reports.wait_for("s", "o")
    assert len(slow.batches) == len(other.batches) == 1


# ---- pages


def test_a_model_without_its_pages_lets_others_decode(engine: Engine, reports: Reports) -> None:
    shard = FakeShard(3, resident=1)
    cold = add(engine, "cold", shard, layers=3)
    add(engine, "warm")
    engine.submit(request("c", [1, 2], model="cold", max_tokens=4))
    assert shard.waiting.wait(TIMEOUT)
    assert cold.layers_done == [0], "the first layer runs before the last page is in"
    assert not engine.busy, "waiting for pages is not computing"
    engine.submit(request("w", [3], model="warm", max_tokens=30))
    reports.wait_for("w")
    assert reports.of("c") == []
    shard.bring(3)
    reports.wait_for("c")
    assert reports.answer("c") == continuation([1, 2], 4)
    assert cold.layers_done == [0, 1, 2] * 4


def test_a_cancel_does_not_wait_for_pages(engine: Engine, reports: Reports) -> None:
    shard = FakeShard(2, resident=1)
    cold = add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1]))
    assert shard.waiting.wait(TIMEOUT)
    engine.cancel("a")
    reports.wait_for("a")
    assert reports.of("a") == [Tokens("a", 0, (), finish="cancelled")]
    engine.fence("fake", TIMEOUT)
    assert cold.layers_done == [0]


def test_a_grant_does_not_wait_for_pages_and_nothing_is_lost(engine: Engine, reports: Reports, pool: FramePool) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    for i in range(4):
        engine.submit(request(f"r{i}", [i] * 60, max_tokens=6))
    assert shard.waiting.wait(TIMEOUT)
    engine.grant_kv("fake", 1, 5)
    reports.wait_for_grant(5)
    assert pool.free >= FRAMES - 1
    shard.bring(2)
    reports.wait_for(*(f"r{i}" for i in range(4)))
    assert all(reports.answer(f"r{i}") == continuation([i] * 60, 6) for i in range(4))


def test_an_abort_drops_everything_in_silence_and_the_model_can_be_used_again(
    engine: Engine, reports: Reports, pool: FramePool
) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    for name in "ab":
        engine.submit(request(name, [1, 2]))
    assert shard.waiting.wait(TIMEOUT)
    shard.fail()
    engine.fence("fake", TIMEOUT)
    engine.abort("fake", TIMEOUT)
    assert pool.free == FRAMES
    assert all(isinstance(report, KvReleased) for report in reports.all)
    shard.bring(2)
    engine.submit(request("a", [1, 2]))  # the same request, served again
    reports.wait_for("a")
    assert reports.answer("a") == continuation([1, 2], 8)


def test_after_an_abort_nothing_more_is_said_of_a_request_that_was_cancelled_with_it(
    engine: Engine, reports: Reports
) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1]))
    assert shard.waiting.wait(TIMEOUT)
    engine.cancel("a")
    engine.abort("fake", TIMEOUT)
    said = list(reports.all)
    engine.remove("fake", TIMEOUT)
    assert reports.all == said
    assert reports.finished == {"a": "cancelled"}, "it ended before the abort, which is said before the abort returns"


def test_an_abort_wakes_a_pass_that_waits_even_if_the_shard_did_not(engine: Engine, reports: Reports) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1]))
    assert shard.waiting.wait(TIMEOUT)
    engine.abort("fake", TIMEOUT)
    engine.fence("fake", TIMEOUT)
    assert reports.of("a") == []


def test_a_failed_wait_is_tried_again_when_pages_come_after_all(engine: Engine, reports: Reports) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1]))
    assert shard.waiting.wait(TIMEOUT)
    shard.fail()
    engine.fence("fake", TIMEOUT)
    shard.bring(2)
    reports.wait_for("a")
    assert reports.answer("a") == continuation([1], 8)


# ---- memory


def test_kv_memory_follows_the_grant(engine: Engine, reports: Reports, pool: FramePool) -> None:
    add(engine, frames=0)
    engine.submit(request("a", [1] * 100, max_tokens=4))
    reports.wait_until(lambda: reports.wanted)
    assert reports.wanted == [1]
    engine.grant_kv("fake", 1, 1)
    reports.wait_for("a")
    assert pool.free == FRAMES


def test_frames_that_others_hold_are_waited_for(
    engine: Engine, reports: Reports, pool: FramePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [pool.take() for _ in range(FRAMES)]
    take = pool.take
    tried = threading.Event()

    def watched_take() -> Frame:
        try:
            return take()
        except OutOfFrames:
            tried.set()
            raise

    monkeypatch.setattr(pool, "take", watched_take)
    add(engine)
    engine.submit(request("a", [1]))
    assert tried.wait(TIMEOUT)
    for frame in others:
        pool.release(frame)
    reports.wait_for("a")
    assert reports.answer("a") == continuation([1], 8)


# ---- defects and ends


def test_a_defect_fails_its_pass_alone(engine: Engine, reports: Reports, caplog: pytest.LogCaptureFixture) -> None:
    def break_down(batch: StepBatch) -> None:
        if 13 in batch.tokens:
            raise RuntimeError("thirteen")

    add(engine, before=break_down)
    add(engine, "other")
    with caplog.at_level(logging.ERROR, "engine"):
        engine.submit(request("bad", [13], max_tokens=3))
        reports.wait_for("bad")
    assert reports.failed["bad"] == "The forward pass failed: RuntimeError: thirteen"
    assert "break_down" in caplog.text, "the traceback is logged"
    engine.submit(request("good", [12], max_tokens=3))
    engine.submit(request("o", [13], model="other", max_tokens=3))
    reports.wait_for("good", "o")
    assert reports.answer("good") == continuation([12], 3)


def test_a_fence_waits_for_the_pass_under_way(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    add(engine, before=latch)
    engine.submit(request("a", [1], max_tokens=1))
    latch.wait()
    with pytest.raises(TimeoutError, match="still in a forward pass"):
        engine.fence("fake", 0.01)
    latch.open()
    engine.fence("fake", TIMEOUT)
    reports.wait_for("a")


def test_a_removed_model_drops_its_requests_and_returns_its_frames(
    engine: Engine, reports: Reports, pool: FramePool
) -> None:
    latch = Latch()
    model = add(engine, before=latch)
    engine.submit(request("a", [1], max_tokens=500))
    latch.wait()
    with pytest.raises(TimeoutError):
        engine.remove("fake", 0.01)
    latch.open()
    engine.remove("fake", TIMEOUT)
    assert pool.free == FRAMES
    assert "a" not in reports.finished
    assert engine.steps == len(model.batches)
    with pytest.raises(KeyError):
        engine.remove("fake")
    add(engine)
    engine.submit(request("b", [1], max_tokens=2))
    reports.wait_for("b")


def test_a_defect_of_the_engine_itself_is_not_silent(
    pool: FramePool, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    logged = threading.Event()

    def emit(parts: Sequence[EngineReport]) -> None:
        if any(isinstance(report, Tokens) for report in parts):
            raise RuntimeError("no room")

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    listener = Listener()
    logging.getLogger("engine").addHandler(listener)
    engine = Engine(pool, emit)
    add(engine)
    assert not engine.busy
    engine.submit(request("a", [1]))
    assert logged.wait(TIMEOUT)
    logging.getLogger("engine").removeHandler(listener)
    with pytest.raises(WorkerError, match="batch loop of model fake"):
        assert engine.busy
    engine.close(TIMEOUT)


def test_closing_does_not_wait_for_pages(pool: FramePool, reports: Reports) -> None:
    engine = Engine(pool, reports.emit)
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1]))
    assert shard.waiting.wait(TIMEOUT)
    engine.close(TIMEOUT)
    assert pool.free == FRAMES
    engine.submit(request("late", [1]))
    assert "does not have a model" in reports.failed["late"]


def test_a_first_token_does_not_wait_for_another_models_pass_to_end(engine: Engine, reports: Reports) -> None:
    """The decoding model's second pass gives way between two layers, once, and then goes on."""
    seen: list[int] = []

    def decoding(batch: StepBatch) -> None:
        if len(busy.batches) == 2:
            engine.submit(request("new", [5], max_tokens=1, model="other"))
            deadline = time.monotonic() + TIMEOUT
            while not engine._turn._waiting:  # nothing else can happen meanwhile
                assert time.monotonic() < deadline

    busy = add(engine, "busy", FakeShard(3), layers=3, before=decoding)
    add(engine, "other", before=lambda batch: seen.append(len(busy.layers_done)))
    engine.submit(request("old", [1, 2], max_tokens=4, model="busy"))
    reports.wait_for("old", "new")
    assert seen == [3], "three layers of the first pass, none of the second"
    assert reports.answer("old") == continuation([1, 2], 4)
