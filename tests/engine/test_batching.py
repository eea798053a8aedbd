"""Continuous batching: who takes part in a pass, what happens without blocks, and that nothing changes an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StepBatch
from engine.batching import Batcher
from engine.blocks import BlockManager
from engine.kv_keeper import HostRoom, KvKeeper
from engine.request import EngineTime, GenerationRequest, KvReleased, KvWanted, RequestFailed, Started, Tokens
from engine.sampling import Choice
from engine.step import Step
from swapper.frames import FramePool
from swapper.geometry import KV_BLOCK_TOKENS, kv_blocks, kv_frames
from swapper.host_frames import HostFramePool
from tests.engine.fakes import FakeModel, Reports, continuation, request

PAGE = 4096
FRAMES = 64
BYTES_PER_TOKEN = 128  # two blocks a frame


@pytest.fixture(scope="module")
def pool() -> Iterator[FramePool]:
    pool = HostFramePool(FRAMES, PAGE)
    yield pool
    assert pool.free == FRAMES, "a test kept frames"
    pool.close()


class Bench:
    """A batcher driven pass by pass."""

    def __init__(
        self,
        pool: FramePool,
        *,
        granted: int = FRAMES,
        tokens: int = 64,
        sequences: int = 8,
        context: int = 512,
        room: HostRoom | None = None,
    ) -> None:
        self.model = FakeModel(kv_bytes_per_token=BYTES_PER_TOKEN, context_length=context)
        self.blocks = BlockManager(pool, BYTES_PER_TOKEN, kv_blocks(context) * sequences)
        self.kv = self.model.kv_cache(self.blocks.region)
        self.reports = Reports()
        self.ended: list[str] = []
        self.batcher = Batcher(
            "fake",
            self.blocks,
            vocab_size=self.model.vocab_size,
            context_length=context,
            max_batch_tokens=tokens,
            max_batch_sequences=sequences,
            ended=self.ended.append,
            clock=lambda: 9.0,  # and everything was submitted at 0
            keeper=KvKeeper(self.blocks.region, BYTES_PER_TOKEN * KV_BLOCK_TOKENS, room or HostRoom(0)),
        )
        self.batcher.grant(granted, 0)

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.batcher.add(one, 0.0)

    def step(self, ahead: int = 0) -> StepBatch | None:
        """One pass, and up to `ahead` more that are planned before the tokens of the one before are known."""
        first = step = self.batcher.plan()
        if step is not None:
            choice = self.launch(step)
            while ahead and (following := self.batcher.plan_ahead(step)) is not None:
                behind = self.launch(following, choice.tokens)
                self.batcher.complete(step, choice.take(), 0.25, 0.5)
                step, choice, ahead = following, behind, ahead - 1
            self.batcher.complete(step, choice.take(), 0.25, 0.5)
        self.reports.emit(self.batcher.take_reports())
        self.blocks.check()
        return None if first is None else first.batch

    def abandon(self, ahead: bool) -> None:
        """A pass that is given up before its tokens are known, and maybe one behind it."""
        step = self.batcher.plan()
        if step is not None:
            choice = self.launch(step)
            if ahead and (following := self.batcher.plan_ahead(step)) is not None:
                self.launch(following, choice.tokens)
        self.reports.emit(self.batcher.take_reports())
        self.blocks.check()

    def launch(self, step: Step, tokens: torch.Tensor | None = None) -> Choice:
        return Choice(self.model.forward(step.batch, self.kv, lambda nbytes: None, tokens), step.rows())

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if self.batcher.is_idle:
                self.reports.emit(self.batcher.take_reports())  # of those that ended outside a pass
                return
            assert self.step() is not None, "stuck"
        raise AssertionError("never done")

    def close(self) -> None:
        self.batcher.clear()
        assert self.blocks.frames_held == 0
        self.blocks.close()


@pytest.fixture
def bench(pool: FramePool) -> Iterator[Bench]:
    bench = Bench(pool)
    yield bench
    bench.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def lengths(batch: StepBatch | None) -> list[int]:
    assert batch is not None
    return [part.length for part in batch.slices]


# ---- passes


def test_an_answer_starts_and_ends_with_its_reports(bench: Bench) -> None:
    bench.add(request("a", [5, 6, 7], max_tokens=3))
    bench.run()
    one, two, three = continuation([5, 6, 7], 3)
    assert bench.reports.all[1:] == [
        Started("a"),
        Tokens("a", 0, (one,)),
        Tokens("a", 1, (two,)),
        # Three passes, each of which the bench says took 0.25 s and 0.5 s more of waiting for pages.
        Tokens("a", 2, (three,), finish="length", time=EngineTime(total=9.0, computing=0.75, paging=1.5)),
    ]
    assert bench.ended == ["a"]


def test_decodes_come_first_then_prompts_in_chunks_oldest_first(bench: Bench) -> None:
    bench.add(request("old", prompt(10), max_tokens=50))
    bench.step()
    bench.add(request("long", prompt(100, 1)), request("longer", prompt(90, 2)))
    assert lengths(bench.step()) == [1, 63]  # 64 tokens a pass
    assert lengths(bench.step()) == [1, 37, 26]
    assert lengths(bench.step()) == [1, 1, 62]
    assert lengths(bench.step()) == [1, 1, 2]
    bench.run()
    assert bench.reports.answer("long") == continuation(prompt(100, 1), 8)
    assert bench.reports.answer("longer") == continuation(prompt(90, 2), 8)


def test_only_the_end_of_a_prompt_is_sampled(bench: Bench) -> None:
    bench.add(request("a", prompt(70)), request("b", prompt(3)))
    first = bench.step()
    assert first is not None
    assert first.sampled == ()
    second = bench.step()
    assert second is not None
    assert second.sampled == (5, 8)


def test_started_comes_with_the_first_pass_and_only_once(bench: Bench) -> None:
    bench.add(request("a", prompt(200), max_tokens=2))
    bench.step()
    assert bench.reports.of("a") == [Started("a")]
    bench.run()
    assert bench.reports.of("a").count(Started("a")) == 1


def test_no_more_sequences_take_part_than_allowed(pool: FramePool) -> None:
    bench = Bench(pool, sequences=3)
    bench.add(*(request(f"r{i}", prompt(4, i), max_tokens=2 + i) for i in range(7)))
    while not bench.batcher.is_idle:
        assert len(lengths(bench.step())) <= 3
    assert all(bench.reports.answer(f"r{i}") == continuation(prompt(4, i), 2 + i) for i in range(7))
    bench.close()


def test_every_decode_has_its_token_even_when_tokens_are_fewer_than_sequences(pool: FramePool) -> None:
    bench = Bench(pool, tokens=2, sequences=8)
    bench.add(*(request(f"r{i}", prompt(5, i)) for i in range(4)))
    while not bench.batcher.is_idle:
        assert sum(lengths(bench.step())) <= 2
    assert all(bench.reports.answer(f"r{i}") == continuation(prompt(5, i), 8) for i in range(4))
    bench.close()


# ---- endings


def test_an_answer_ends_before_a_stop_token(bench: Bench) -> None:
    tokens = continuation(prompt(6), 5)
    bench.add(request("a", prompt(6), max_tokens=50, stop_tokens=frozenset({tokens[3]})))
    bench.run()
    assert bench.reports.answer("a") == tokens[:3]
    last = bench.reports.all[-1]
    assert isinstance(last, Tokens)
    assert (last.index, last.tokens, last.finish) == (3, (), "stop")


def test_an_answer_ends_where_the_context_ends(pool: FramePool) -> None:
    bench = Bench(pool, context=20)
    bench.add(request("a", prompt(15), max_tokens=50))
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(15), 5)
    assert bench.reports.finished["a"] == "length"
    bench.close()


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ((), "no tokens"),
        (prompt(512), "no room for an answer"),
        ((3, 97), "not in the model's vocabulary"),
        ((-1,), "vocabulary"),
    ],
)
def test_a_request_that_cannot_run_fails_with_the_reason(bench: Bench, tokens: Sequence[int], complaint: str) -> None:
    bench.add(request("a", tokens))
    assert bench.step() is None
    assert complaint in bench.reports.failed["a"]
    assert bench.batcher.is_idle


def test_an_answer_is_continued_behind_the_tokens_that_were_delivered(bench: Bench) -> None:
    whole = continuation(prompt(9), 8)
    bench.add(request("a", prompt(9), max_tokens=8, answer=whole[:5]))
    bench.run()
    assert bench.reports.of("a")[1] == Tokens("a", 5, whole[5:6])
    assert bench.reports.answer("a")[5:] == whole[5:]


def test_a_resumed_answer_that_was_complete_ends_at_once(bench: Bench) -> None:
    bench.add(request("a", prompt(9), max_tokens=4, answer=continuation(prompt(9), 4)))
    assert bench.step() is None
    assert bench.reports.of("a") == [Tokens("a", 4, (), finish="length")]


def test_sampling_is_repeated_by_a_resumption(bench: Bench) -> None:
    bench.add(request("a", prompt(9), max_tokens=12, temperature=3.0, seed=4))
    bench.run()
    whole = bench.reports.answer("a")
    assert whole != continuation(prompt(9), 12)
    bench.add(request("b", prompt(9), max_tokens=12, temperature=3.0, seed=4, answer=whole[:7]))
    bench.run()
    assert bench.reports.answer("b")[7:] == whole[7:]


def test_a_cancelled_sequence_leaves_at_once_and_frees_its_blocks(bench: Bench) -> None:
    bench.add(request("a", prompt(30), max_tokens=50), request("b", prompt(5), max_tokens=50))
    bench.step()
    bench.batcher.cancel("a")
    assert bench.blocks.available == bench.blocks.capacity - 1
    assert lengths(bench.step()) == [1]
    assert bench.reports.of("a")[-1] == Tokens("a", 1, (), finish="cancelled")
    bench.batcher.cancel("a")
    bench.batcher.cancel("unknown")
    assert bench.batcher.take_reports() == []


def test_a_waiting_sequence_can_be_cancelled(pool: FramePool) -> None:
    bench = Bench(pool, sequences=1)
    bench.add(request("a", prompt(3)), request("b", prompt(3)), request("c", prompt(3)))
    bench.step()
    bench.batcher.cancel("b")
    bench.run()
    assert bench.reports.of("b") == [Tokens("b", 0, (), finish="cancelled")]
    assert bench.reports.answer("c") == continuation(prompt(3), 8)
    bench.close()


def test_logits_that_are_not_finite_fail_that_request_alone(bench: Bench) -> None:
    bench.model.poison = continuation(prompt(5), 2)[1]
    bench.add(request("bad", prompt(5)), request("good", [1], max_tokens=1))
    bench.run()
    assert "not finite" in bench.reports.failed["bad"]
    assert bench.reports.answer("bad") == continuation(prompt(5), 2)
    assert bench.reports.finished["good"] == "length"
    assert bench.blocks.frames_held == 0


def test_logprobs_go_with_their_tokens(bench: Bench) -> None:
    tokens = continuation(prompt(6), 3)
    bench.add(request("a", prompt(6), max_tokens=9, logprobs=2, stop_tokens=frozenset({tokens[2]})))
    bench.run()
    for report in bench.reports.of("a")[1:]:
        assert isinstance(report, Tokens)
        assert report.logprobs is not None
        assert len(report.logprobs) == len(report.tokens)
    first = bench.reports.of("a")[1]
    assert isinstance(first, Tokens)
    assert first.logprobs is not None
    assert next(iter(first.logprobs[0].top)) == tokens[0]


# ---- blocks


def test_the_youngest_is_preempted_and_answers_all_the_same(pool: FramePool) -> None:
    bench = Bench(pool, granted=3)  # six blocks
    bench.add(*(request(f"r{i}", prompt(20, i), max_tokens=40) for i in range(3)))
    bench.run()
    for i in range(3):
        assert bench.reports.answer(f"r{i}") == continuation(prompt(20, i), 40)
    starts = [r.request for r in bench.reports.all if isinstance(r, Started)]
    ends = [r.request for r in bench.reports.all if isinstance(r, Tokens) and r.finish]
    assert starts == ["r0", "r1", "r2"]
    assert ends == ["r0", "r1", "r2"]  # the oldest is never the one to go
    assert len(bench.model.batches) > 40, "nothing was preempted"
    bench.close()


def test_a_newcomer_leaves_a_block_to_each_sequence_that_runs(pool: FramePool) -> None:
    """Else the next decode that needs one would preempt it, and its prompt would have run for nothing."""
    bench = Bench(pool, granted=2)  # four blocks
    bench.add(request("old", prompt(30), max_tokens=20))
    bench.step()
    bench.add(request("new", prompt(20, 1), max_tokens=2))  # its two blocks are there, but "old" is about to need one
    assert lengths(bench.step()) == [1]
    bench.run()
    prompts_run = [part for batch in bench.model.batches for part in batch.slices if part.length > 1]
    assert len(prompts_run) == 2, "a prompt ran twice"
    bench.close()


def test_age_and_not_the_time_of_admission_decides_who_goes(pool: FramePool) -> None:
    bench = Bench(pool, granted=8)
    filler = request("filler", prompt(120), max_tokens=30)  # takes blocks 0 to 7
    old, young = request("old", prompt(30, 1), max_tokens=60), request("young", prompt(30, 2), max_tokens=60)
    bench.add(filler)
    bench.step()
    bench.step()
    bench.add(old)  # above the filler's blocks
    bench.step()
    bench.batcher.cancel("filler")
    bench.add(young)  # in the filler's place
    bench.step()
    bench.batcher.grant(3, 1)  # "old" lies outside and is preempted; it comes back behind "young"
    while len(lengths(bench.step())) < 2:
        pass
    bench.run()
    assert list(bench.reports.finished) == ["filler", "old", "young"]
    for one in (old, young):
        assert bench.reports.answer(one.id) == continuation(one.prompt, 60)
    bench.close()


def test_more_frames_are_asked_for_once(pool: FramePool) -> None:
    bench = Bench(pool, granted=1)
    bench.add(request("a", prompt(14), max_tokens=4), request("b", prompt(40), max_tokens=4))
    bench.step()
    bench.step()
    # 14 tokens that grow into a second block, 40 that stay within three: five blocks, two a frame
    assert bench.reports.wanted == [3]
    bench.batcher.grant(3, 1)
    bench.run()
    assert bench.reports.wanted == [3]
    bench.close()


def test_frames_are_asked_for_so_early_that_a_grant_may_take_its_time(pool: FramePool) -> None:
    """A dozen passes, planned ahead or not, and nobody has lost its place."""
    for ahead in (0, 5):
        bench = Bench(pool, granted=6)
        bench.add(*(request(f"r{i}", prompt(30 + i, i), max_tokens=90) for i in range(4)))
        bench.step()
        grants, answered = 0, 0
        while not bench.batcher.is_idle:
            for _ in range(12 // (ahead + 1)):
                bench.step(ahead)
            if len(bench.reports.wanted) > answered:
                answered = len(bench.reports.wanted)
                grants += 1
                bench.batcher.grant(bench.reports.wanted[-1], grants)
        assert grants > 1
        assert {part.length for batch in bench.model.batches[2:] for part in batch.slices} == {1}
        bench.close()


def test_a_lone_sequence_that_does_not_fit_waits_for_a_larger_grant(pool: FramePool) -> None:
    bench = Bench(pool, granted=0)
    bench.add(request("a", prompt(30), max_tokens=40))
    assert bench.step() is None
    assert bench.step() is None
    assert bench.reports.wanted == [3]
    bench.batcher.grant(1, 1)
    assert bench.step() is not None
    while bench.step() is not None:
        pass
    assert bench.reports.answer("a") == continuation(prompt(30), 3)  # 32 tokens have their keys and values
    assert bench.reports.wanted == [3, 3]
    bench.batcher.grant(5, 2)
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(30), 40)
    bench.close()


def test_a_grant_as_large_as_the_largest_request_is_enough_for_all(pool: FramePool) -> None:
    bench = Bench(pool, granted=kv_frames(70, BYTES_PER_TOKEN, PAGE))
    bench.add(*(request(f"r{i}", prompt(30 + i, i), max_tokens=40 - i) for i in range(6)))
    bench.run()
    assert all(bench.reports.answer(f"r{i}") == continuation(prompt(30 + i, i), 40 - i) for i in range(6))
    bench.close()


def test_a_smaller_grant_is_kept_at_once(bench: Bench, pool: FramePool) -> None:
    bench.add(*(request(f"r{i}", prompt(40, i), max_tokens=20) for i in range(4)))
    bench.step()
    bench.step()
    bench.step()
    bench.batcher.grant(3, 7)
    assert bench.blocks.frames_held <= 3
    assert pool.free >= FRAMES - 3
    assert KvReleased("fake", 3, 7) in bench.batcher.take_reports()
    bench.run()
    assert all(bench.reports.answer(f"r{i}") == continuation(prompt(40, i), 20) for i in range(4))


def test_a_pool_without_frames_holds_a_sequence_up_and_loses_nothing(bench: Bench, pool: FramePool) -> None:
    others = [pool.take() for _ in range(FRAMES)]
    bench.add(request("a", prompt(10)))
    assert bench.step() is None
    assert not any(isinstance(report, KvWanted) for report in bench.reports.all), "the grant is large enough"
    pool.release(others.pop())
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(10), 8)
    for frame in others:
        pool.release(frame)


def test_a_defect_fails_those_who_took_part(bench: Bench) -> None:
    bench.add(request("a", prompt(64)), request("b", prompt(4)))
    step = bench.batcher.plan()
    assert step is not None
    bench.batcher.fail(step, "broken")
    assert bench.batcher.take_reports()[1:] == [RequestFailed("a", "broken")]
    bench.run()
    assert bench.reports.finished["b"] == "length"


# ---- passes planned ahead


def test_a_pass_planned_ahead_takes_the_same_sequences_one_token_further(bench: Bench) -> None:
    bench.add(request("a", prompt(30), max_tokens=20), request("b", prompt(3, 1), max_tokens=20))
    bench.step()
    bench.step(ahead=9)
    assert bench.model.ahead == [False, False, *[True] * 9]
    assert [part.context for part in bench.model.batches[-1].slices] == [40, 13]
    bench.run()
    assert bench.reports.answer("a") == continuation(prompt(30), 20)
    assert bench.reports.answer("b") == continuation(prompt(3, 1), 20)


def test_an_end_that_no_plan_can_foresee_costs_one_surplus_token(bench: Bench) -> None:
    answer = continuation(prompt(16), 9)
    stops = frozenset(answer[4:5])
    bench.add(request("a", prompt(16), max_tokens=40, stop_tokens=stops), request("b", prompt(8), max_tokens=40))
    bench.step()
    bench.step(ahead=40)
    assert bench.reports.answer("a") == answer[: answer.index(answer[4])]
    assert bench.reports.finished == {"a": "stop"}
    assert bench.ended == ["a"]
    assert [len(batch.slices) for batch in bench.model.batches] == [2] * (answer.index(answer[4]) + 2)
    bench.run()
    assert bench.reports.answer("b") == continuation(prompt(8), 40)


def test_nothing_is_planned_ahead_of_what_must_be_known(bench: Bench) -> None:
    """A prompt's pass, a last token, penalties that look at the answer, a sequence that finds no block."""

    def planned_ahead(name: str, **sampling: object) -> int:
        bench.model.ahead.clear()
        bench.add(request(name, prompt(20), **sampling))  # type: ignore[arg-type]
        bench.step(ahead=40)
        assert bench.model.ahead == [False]
        bench.step(ahead=40)
        count = sum(bench.model.ahead)
        bench.batcher.grant(FRAMES, 1)
        bench.run()
        return count

    assert planned_ahead("a", max_tokens=8) == 6
    assert planned_ahead("b", max_tokens=8, frequency_penalty=0.5) == 0
    bench.batcher.grant(1, 0)  # two blocks: 32 tokens, of which the first 21 are in the first two passes
    assert planned_ahead("c", max_tokens=30) == 11


def test_who_waits_is_let_in_before_anything_is_planned_ahead(bench: Bench) -> None:
    bench.add(request("a", prompt(10), max_tokens=50))
    bench.step()
    bench.add(request("b", prompt(10), max_tokens=50))
    step = bench.batcher.plan()
    assert step is not None
    assert len(step.sampled) == 2
    assert bench.batcher.plan_ahead(step) is None


Happenings = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 90), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("grant"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("suspend"), st.just(0), st.just(0)),
        st.tuples(st.just("abandon"), st.just(0), st.integers(0, 1)),
        st.tuples(st.just("steps"), st.integers(1, 12), st.integers(0, 6)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(happenings=Happenings, tokens=st.integers(1, 80), sequences=st.integers(1, 5), kept=st.integers(0, 8))
def test_whatever_happens_answers_are_what_they_would_be_alone(
    pool: FramePool, happenings: list[tuple[str, int, int]], tokens: int, sequences: int, kept: int
) -> None:
    room = HostRoom(kept * BYTES_PER_TOKEN * KV_BLOCK_TOKENS)
    bench = Bench(pool, granted=4, tokens=tokens, sequences=sequences, room=room)
    asked: dict[str, GenerationRequest] = {}
    suspended = False
    for epoch, (what, number, more) in enumerate(happenings):
        if what == "add":
            stops = frozenset(range(0, 97, number)) if number % 5 == 4 else frozenset()
            one = request(f"r{len(asked)}", prompt(number, number + more), max_tokens=more, stop_tokens=stops)
            asked[one.id] = one
            bench.add(one)
        elif what == "cancel":
            bench.batcher.cancel(f"r{number}")
        elif what == "grant":
            (bench.batcher.resume if suspended else bench.batcher.grant)(number, epoch)
            suspended = False
        elif what == "suspend":
            bench.batcher.suspend(epoch)
            suspended = True
            assert bench.blocks.frames_held == 0
        elif what == "abandon":
            bench.abandon(ahead=bool(more))
        else:
            for _ in range(number):
                bench.step(ahead=more)
    enough = kv_frames(130, BYTES_PER_TOKEN, PAGE)  # for the largest alone
    (bench.batcher.resume if suspended else bench.batcher.grant)(enough, len(happenings))
    bench.run()
    assert room.free == kept * BYTES_PER_TOKEN * KV_BLOCK_TOKENS
    for name, one in asked.items():
        expected = continuation(one.prompt, one.sampling.max_tokens)
        stop = next((i for i, token in enumerate(expected) if token in one.sampling.stop_tokens), len(expected))
        expected = expected[:stop]
        answer = bench.reports.answer(name)
        assert bench.reports.finished[name] in ("length", "stop", "cancelled")
        assert answer == expected[: len(answer)]
        assert len(answer) == len(expected) or bench.reports.finished[name] == "cancelled"
    assert sorted(bench.ended) == sorted(asked)
    bench.close()
    assert pool.free == FRAMES
