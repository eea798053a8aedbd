"""A suspended model holds no KV memory and goes on as if nothing had been: its answers are the same, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from engine.engine import Engine
from engine.kv_keeper import HostRoom, KvKeeper
from engine.model import BoundModel
from engine.request import Resumed, Suspended, Tokens
from engine.views import region_bytes
from swapper.frames import FramePool
from swapper.geometry import KV_BLOCK_TOKENS
from swapper.host_frames import HostFramePool
from swapper.store import Store
from tests.engine.fakes import TIMEOUT, FakeShard, Reports, continuation, request
from tests.engine.serving import Serving, pack_image, serving
from tests.engine.test_batching import BYTES_PER_TOKEN, FRAMES, PAGE, Bench, prompt
from tests.engine.test_engine import Latch, add
from tests.models import make_checkpoint
from tests.swapper.paging import page_in

BLOCK = BYTES_PER_TOKEN * KV_BLOCK_TOKENS
ROOM = 1 << 20
EPOCHS = count(1000)


@pytest.fixture(scope="module")
def pool() -> Iterator[FramePool]:
    pool = HostFramePool(FRAMES, PAGE)
    yield pool
    assert pool.free == FRAMES, "a test kept frames"
    pool.close()


@pytest.fixture
def room() -> Iterator[HostRoom]:
    room = HostRoom(ROOM)
    yield room
    assert room.free == ROOM, "host memory was not given back"


@pytest.fixture
def bench(pool: FramePool, room: HostRoom) -> Iterator[Bench]:
    bench = Bench(pool, room=room)
    yield bench
    bench.close()


def suspend(bench: Bench) -> Suspended:
    bench.batcher.take_reports()
    bench.batcher.suspend(7)
    [report] = bench.batcher.take_reports()
    assert isinstance(report, Suspended)
    assert bench.blocks.frames_held == 0
    assert bench.step() is None, "a suspended model runs nothing"
    return report


def resume(bench: Bench, frames: int) -> None:
    bench.batcher.resume(frames, 8)
    assert bench.batcher.take_reports() == [Resumed("fake", 8)]


# ---- the batch


def test_what_was_computed_is_kept_and_answers_go_on_where_they_were(bench: Bench, room: HostRoom) -> None:
    bench.add(request("a", prompt(40), max_tokens=30), request("b", prompt(20, 1), max_tokens=30))
    for _ in range(5):
        bench.step()
    report = suspend(bench)
    assert report.lost_tokens == 0
    assert report.kept_bytes == ROOM - room.free == 5 * BLOCK  # 44 and 24 tokens in blocks of 16
    assert report.kv_frames == 4  # a block for tokens to come each: seven, two a frame
    resume(bench, report.kv_frames)
    first = bench.step()
    assert first is not None
    assert [part.length for part in first.slices] == [1, 1], "nothing is computed again"
    bench.batcher.grant(FRAMES, 9)
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(40), 30)
    assert bench.reports.answer("b") == continuation(prompt(20, 1), 30)


def test_what_has_no_room_in_host_memory_is_computed_again(pool: FramePool) -> None:
    bench = Bench(pool, room=HostRoom(3 * BLOCK))
    bench.add(request("a", prompt(40), max_tokens=30), request("b", prompt(20, 1), max_tokens=30))
    bench.step()
    report = suspend(bench)
    assert (report.kept_bytes, report.lost_tokens) == (3 * BLOCK, 20)
    resume(bench, FRAMES)
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(40), 30)
    assert bench.reports.answer("b") == continuation(prompt(20, 1), 30)
    bench.close()


def test_a_prompt_may_be_suspended_half_way(bench: Bench) -> None:
    bench.add(request("a", prompt(100), max_tokens=4))
    bench.step()  # 64 of its tokens
    resume(bench, suspend(bench).kv_frames)
    second = bench.step()
    assert second is not None
    assert [part.length for part in second.slices] == [36]
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(100), 4)


def test_requests_that_come_meanwhile_wait_behind(bench: Bench) -> None:
    bench.add(request("a", prompt(20), max_tokens=30))
    bench.step()
    report = suspend(bench)
    bench.add(request("late", prompt(10, 1), max_tokens=3))
    assert bench.step() is None
    resume(bench, report.kv_frames + 1)
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(20), 30)
    assert bench.reports.answer("late") == continuation(prompt(10, 1), 3)


def test_without_memory_for_all_the_oldest_goes_on_and_the_others_stay_kept(bench: Bench, room: HostRoom) -> None:
    bench.add(*(request(name, prompt(20, seed), max_tokens=30) for seed, name in enumerate("abc")))
    bench.step()
    suspend(bench)
    resume(bench, 2)
    bench.step()
    assert room.free == ROOM - 4 * BLOCK, "two of three wait in host memory"
    bench.run()
    for seed, name in enumerate("abc"):
        assert bench.reports.answer(name) == continuation(prompt(20, seed), 30)


def test_whoever_is_cancelled_while_suspended_leaves_nothing(bench: Bench, room: HostRoom) -> None:
    bench.add(request("a", prompt(20), max_tokens=30))
    bench.step()
    suspend(bench)
    bench.batcher.cancel("a")
    [report] = bench.batcher.take_reports()
    assert isinstance(report, Tokens)
    assert report.finish == "cancelled"
    assert room.free == ROOM
    assert bench.ended == ["a"]


def test_a_failed_page_in_ends_a_suspension_too(bench: Bench) -> None:
    bench.add(request("a", prompt(20), max_tokens=30))
    bench.step()
    suspend(bench)
    bench.batcher.clear()
    bench.batcher.grant(FRAMES, 9)
    bench.add(request("b", prompt(5), max_tokens=3))
    bench.run()
    assert bench.reports.answer("b") == continuation(prompt(5), 3)


def test_suspending_twice_or_an_idle_model_loses_nothing(bench: Bench) -> None:
    assert suspend(bench) == Suspended("fake", 0, 7)
    resume(bench, FRAMES)
    bench.add(request("a", prompt(20), max_tokens=10))
    bench.step()
    first = suspend(bench)
    assert suspend(bench).kv_frames == first.kv_frames, "what is wanted is told again"
    resume(bench, first.kv_frames)
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(20), 10)


# ---- what pays


def test_decodes_do_not_tell_what_a_prompt_takes(pool: FramePool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(KvKeeper, "computed", lambda self, tokens, seconds: told.append(tokens))
    bench = Bench(pool, sequences=48, tokens=64)
    bench.add(*(request(f"r{n}", prompt(2, n), max_tokens=4) for n in range(40)))
    bench.run()
    assert told == [64, 48]  # 32 prompts; then 8, behind 32 decodes; then decodes alone
    bench.close()


def keeper(pool: FramePool, room: HostRoom) -> tuple[KvKeeper, torch.Tensor]:
    region = pool.reserve(4 * PAGE)
    for page in range(4):
        pool.map(region, page, pool.take())
    return KvKeeper(region, PAGE, room), region_bytes(region)


@pytest.fixture
def own_pool() -> Iterator[FramePool]:
    pool = HostFramePool(4, PAGE)
    yield pool
    pool.close()


def test_blocks_come_back_byte_by_byte_wherever_they_are_put(own_pool: FramePool, room: HostRoom) -> None:
    keep, memory = keeper(own_pool, room)
    memory.copy_(torch.randint(0, 256, (4 * PAGE,), dtype=torch.uint8))
    before = memory.view(4, PAGE).clone()
    kept = keep.keep([3, 0, 1], 40)
    assert kept is not None
    memory.zero_()
    keep.restore(kept, [1, 2, 0])
    after = memory.view(4, PAGE)
    assert (after[1] == before[3]).all()
    assert (after[2] == before[0]).all()
    assert (after[0] == before[1]).all()
    assert not after[3].any(), "other blocks are not touched"


@pytest.mark.parametrize(("seconds_of_a_prompt", "is_kept"), [(100.0, True), (1e-9, False)])
def test_what_is_computed_sooner_than_copied_is_not_kept(
    own_pool: FramePool, room: HostRoom, seconds_of_a_prompt: float, is_kept: bool
) -> None:
    keep, _ = keeper(own_pool, room)
    first = keep.keep([0], 16)
    assert first is not None, "before anything is known, it is tried"
    keep.computed(64, seconds_of_a_prompt)
    second = keep.keep([1], 16)
    assert (second is not None) == is_kept
    for kept in (first, second):
        if kept is not None:
            keep.drop(kept)


# ---- the engine's threads


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def engine(pool: FramePool, reports: Reports) -> Iterator[Engine]:
    engine = Engine(pool, reports.emit, max_batch_tokens=64, max_batch_sequences=8, suspended_bytes=ROOM)
    yield engine
    engine.close(TIMEOUT)
    assert pool.free == FRAMES


def suspended(reports: Reports, epoch: int) -> Suspended:
    """The answer to a suspension, once it is there."""

    def found() -> Suspended | None:
        return next((r for r in reports.all if isinstance(r, Suspended) and r.epoch == epoch), None)

    reports.wait_until(found)
    report = found()
    assert report is not None
    return report


def test_the_pass_under_way_ends_first_and_an_answer_may_end_with_it(engine: Engine, reports: Reports) -> None:
    latch = Latch()
    add(engine, before=latch)
    engine.submit(request("last", [1, 2, 3], max_tokens=1))
    engine.submit(request("long", [4, 5], max_tokens=20))
    latch.wait()
    engine.suspend("fake", 5)
    latch.open()
    suspended(reports, 5)
    assert reports.finished == {"last": "length"}
    engine.resume("fake", 8, 6)
    reports.wait_for("long")
    assert reports.answer("long") == continuation([4, 5], 20)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decoding_model_is_suspended_again_and_again(engine: Engine, reports: Reports, ahead: bool) -> None:
    add(engine)
    engine._model("fake").runs_ahead = ahead
    names = [f"r{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        engine.submit(request(name, prompt(10 + seed, seed), max_tokens=60))
    for epoch in range(10, 40, 2):
        engine.suspend("fake", epoch)
        suspended(reports, epoch)
        engine.resume("fake", 8, epoch + 1)
    reports.wait_for(*names)
    for seed, name in enumerate(names):
        assert reports.answer(name) == continuation(prompt(10 + seed, seed), 60)


def test_a_pass_that_waits_for_pages_is_suspended_at_once(engine: Engine, reports: Reports) -> None:
    shard = FakeShard(2, resident=1)
    add(engine, shard=shard, layers=2)
    engine.submit(request("a", [1, 2, 3], max_tokens=5))
    assert shard.waiting.wait(TIMEOUT)
    engine.suspend("fake", 5)
    suspended(reports, 5)
    shard.bring(2)
    engine.resume("fake", 8, 6)
    reports.wait_for("a")
    assert reports.answer("a") == continuation([1, 2, 3], 5)


# ---- real models


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, BoundModel]]:
    store = Store(tmp_path_factory.mktemp("suspension") / "store")
    image = pack_image(store, make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama"), "llama")
    with serving(8, max_batch_tokens=48, max_batch_sequences=8, suspended_bytes=ROOM) as parts:
        model = parts.add(image)
        page_in(parts.pager, "llama", 0, image.manifest.shards[0].page_count(2 << 20))
        yield parts, model


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_answers_in_float32_are_the_same_with_and_without_suspension(
    served: tuple[Serving, BoundModel],
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
    sampling: dict[str, float],
) -> None:
    parts, model = served
    parts.grant(model, 4096)
    monkeypatch.setattr(KvKeeper, "_pays", lambda *_: kept)
    prompts = [prompt(30 + 9 * seed, seed) for seed in range(3)]

    def answers(run: str, suspensions: int) -> list[list[int]]:
        reports, names = parts.reports, [f"{index} {run} {kept} {sampling}" for index in range(len(prompts))]
        for name, tokens in zip(names, prompts, strict=True):
            parts.engine.submit(request(name, tokens, 100, "llama", **sampling))
        for _ in range(suspensions):
            heard = len(reports.all)
            reports.wait_until(lambda heard=heard: len(reports.all) > heard + 4)
            epoch = next(EPOCHS)
            parts.engine.suspend("llama", epoch)
            report = suspended(reports, epoch)
            assert bool(report.kept_bytes) == kept
            assert bool(report.lost_tokens) != kept
            assert parts.kv_pool.free == parts.kv_pool.frames
            parts.engine.resume("llama", report.kv_frames, epoch)
        reports.wait_for(*names)
        return [list(reports.answer(name)) for name in names]

    assert answers("suspended", 3) == answers("alone", 0)
