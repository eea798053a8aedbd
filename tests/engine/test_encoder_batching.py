"""Batches of an encoder: whole texts, requests in turn, and each answered once."""

from __future__ import annotations

import torch

from engine.encoder_batching import EncoderBatcher, EncoderStep
from engine.request import EmbeddingRequest, KvReleased, RequestFailed, Resumed, Started, Suspended, Tokens


class Bench:
    """Vectors here say which tokens a text had: their sum and their number."""

    def __init__(self, tokens: int = 10, texts: int = 8) -> None:
        self.ended: list[str] = []
        self.batcher = EncoderBatcher(
            "m",
            vocab_size=100,
            context_length=20,
            max_batch_tokens=tokens,
            max_batch_sequences=texts,
            ended=self.ended.append,
            clock=lambda: 9.0,
        )

    def add(self, name: str, *lengths: int) -> None:
        self.batcher.add(EmbeddingRequest(name, "m", tuple((length,) * length for length in lengths)), 0.0)

    def step(self) -> list[str] | None:
        """Run a pass; whose texts it had."""
        step = self.batcher.plan()
        if step is None:
            return None
        self.complete(step)
        return [
            f"{encoding.request.id}{piece.length}"
            for encoding, piece in zip(step.encodings, step.batch.slices, strict=True)
        ]

    def complete(self, step: EncoderStep) -> None:
        texts = [step.batch.tokens[piece.start : piece.start + piece.length] for piece in step.batch.slices]
        vectors = step.choose(torch.tensor([[float(sum(text)), float(len(text))] for text in texts])).take()
        self.batcher.complete(step, vectors, 0.25, 0.5)


def test_requests_take_turns_a_text_each() -> None:
    bench = Bench(tokens=9)
    bench.add("a", 2, 2, 2, 2)
    bench.add("b", 3)
    assert bench.step() == ["a2", "b3", "a2", "a2"]
    assert bench.step() == ["a2"]
    assert bench.step() is None
    assert bench.ended == ["b", "a"]


def test_a_text_larger_than_a_pass_goes_alone_and_nobody_overtakes_it() -> None:
    bench = Bench(tokens=9)
    bench.add("a", 2)
    bench.add("b", 15)
    bench.add("c", 1)
    assert [bench.step(), bench.step(), bench.step()] == [["a2"], ["b15"], ["c1"]]


def test_a_pass_has_no_more_texts_than_it_may() -> None:
    bench = Bench(tokens=100, texts=2)
    bench.add("a", 1, 1, 1)
    assert [bench.step(), bench.step()] == [["a1", "a1"], ["a1"]]


def test_a_pass_that_was_given_up_is_planned_again() -> None:
    bench = Bench()
    bench.add("a", 2, 3)
    assert bench.batcher.plan() == bench.batcher.plan()
    assert bench.step() == ["a2", "a3"]


def test_an_answer_has_all_vectors_in_order_and_says_where_its_time_went() -> None:
    bench = Bench(tokens=5)
    bench.add("a", 4, 3, 5)
    while bench.step():
        pass
    started, answer = bench.batcher.take_reports()
    assert started == Started("a")
    assert isinstance(answer, Tokens)
    numbers = [torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() for raw in answer.vectors or ()]
    assert numbers == [[16, 4], [9, 3], [25, 5]]
    assert answer.time is not None
    assert (answer.time.total, answer.time.computing, answer.time.paging) == (9.0, 0.75, 1.5)


def test_only_a_requests_first_pass_is_awaited() -> None:
    bench = Bench(tokens=5)
    bench.add("a", 4, 4)
    first = bench.batcher.plan()
    assert first is not None
    assert first.is_awaited
    bench.complete(first)
    second = bench.batcher.plan()
    assert second is not None
    assert not second.is_awaited


def test_vectors_that_are_not_finite_fail_their_request_alone() -> None:
    bench = Bench()
    bench.add("a", 2, 2)
    bench.add("b", 2)
    step = bench.batcher.plan()
    assert step is not None
    vectors = step.choose(torch.tensor([[torch.nan], [1.0], [torch.inf]])).take()
    bench.batcher.complete(step, vectors, 0.0, 0.0)
    failed = [report for report in bench.batcher.take_reports() if isinstance(report, RequestFailed)]
    assert [report.request for report in failed] == ["a"]
    assert bench.ended == ["a", "b"]


def test_a_defect_ends_those_that_took_part() -> None:
    bench = Bench(tokens=4)
    bench.add("a", 2)
    bench.add("b", 4)
    step = bench.batcher.plan()
    assert step is not None
    bench.batcher.fail(step, "broken")
    assert bench.batcher.take_reports() == [RequestFailed("a", "broken")]
    assert bench.step() == ["b4"]


def test_grants_and_suspensions_are_answered() -> None:
    bench = Bench()
    bench.batcher.grant(3, 7)
    bench.add("a", 2)
    bench.batcher.suspend(8)
    assert bench.step() is None
    bench.batcher.resume(0, 9)
    assert bench.batcher.take_reports() == [KvReleased("m", 3, 7), Suspended("m", 0, 8), Resumed("m", 9)]
    assert bench.step() == ["a2"]
