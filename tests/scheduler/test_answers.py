"""An answer delivers each token once, ends once, and does not run on for a client that is gone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from engine.request import EngineTime, GenerationRequest, SamplingParams, TokenLogprob, Tokens
from scheduler.answers import LiveAnswer
from swapper.errors import Refused
from tests.scheduler.virtual_time import settle, virtual_time


class Desk:
    """What the driver hears from an answer."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.cancels = 0

    def answer(self, answer: tuple[int, ...] = (), max_tokens: int = 100) -> LiveAnswer:
        request = GenerationRequest("r", "m", (1,), SamplingParams(max_tokens=max_tokens), answer)
        return LiveAnswer(request, 0.0, lambda _, outcome: self.outcomes.append(outcome), self._cancelled)

    def _cancelled(self, answer: LiveAnswer) -> None:
        self.cancels += 1


@pytest.fixture
def desk() -> Desk:
    return Desk()


def tokens(index: int, *ids: int, finish: str | None = None, logprobs: bool = False) -> Tokens:
    return Tokens("r", index, ids, tuple(TokenLogprob(-float(id)) for id in ids) if logprobs else None, finish)  # type: ignore[arg-type]


async def read(answer: LiveAnswer) -> list[Tokens]:
    return [chunk async for chunk in answer]


@virtual_time
async def test_tokens_arrive_in_order_and_the_finish_ends_the_reading() -> None:
    desk = Desk()
    answer = desk.answer()
    reading = asyncio.create_task(read(answer))
    await settle()
    answer.deliver(tokens(0, 7), 0.0)
    await settle()
    answer.deliver(tokens(1, 8, 9, finish="stop"), 0.0)
    assert await reading == [tokens(0, 7), tokens(1, 8, 9, finish="stop")]
    assert desk.outcomes == ["stop"]
    assert desk.cancels == 0, "an answer that ended is not cancelled by the end of the reading"


def test_what_was_delivered_before_is_cut_off_with_its_logprobs(desk: Desk) -> None:
    answer = desk.answer()
    answer.deliver(tokens(0, 5, 6, logprobs=True), 0.0)
    answer.deliver(tokens(1, 6, 7, logprobs=True), 0.0)
    answer.deliver(tokens(0, 5, 6), 0.0)
    assert list(answer._buffer) == [tokens(0, 5, 6, logprobs=True), tokens(2, 7, logprobs=True)]


def test_an_answer_says_where_its_time_went(desk: Desk) -> None:
    answer = desk.answer()  # arrived at 0.0
    answer.served_at = 1.0
    answer.deliver(replace(tokens(0, 5, finish="length"), time=EngineTime(total=4.0, computing=2.0, paging=0.5)), 7.0)
    assert answer.stages == {"queue": 1.0, "transport": 2.0, "batch": 1.5, "page": 0.5, "compute": 2.0}
    assert sum(answer.stages.values()) == 7.0


def test_a_request_is_served_again_with_the_tokens_its_client_has(desk: Desk) -> None:
    answer = desk.answer()
    assert answer.remainder() is answer.request
    answer.deliver(tokens(0, 5, 6), 0.0)
    assert answer.remainder().answer == (5, 6)


def test_a_request_that_comes_with_an_answer_is_continued_behind_it(desk: Desk) -> None:
    answer = desk.answer(answer=(5, 6))
    assert not answer.has_gap_before(tokens(2, 7))
    assert answer.has_gap_before(tokens(3, 8))
    answer.deliver(tokens(2, 7), 0.0)
    assert answer.remainder().answer == (5, 6, 7)


@virtual_time
async def test_a_refusal_comes_after_the_tokens_that_came_before_it() -> None:
    desk = Desk()
    answer = desk.answer()
    answer.deliver(tokens(0, 5), 0.0)
    answer.refuse(Refused("engine_failed", "broken", None))
    chunks = aiter(answer)
    assert await anext(chunks) == tokens(0, 5)
    with pytest.raises(Refused, match="broken"):
        await anext(chunks)
    assert desk.outcomes == ["engine_failed"]


def test_only_the_first_end_counts(desk: Desk) -> None:
    answer = desk.answer()
    answer.deliver(tokens(0, finish="length"), 0.0)
    answer.refuse(Refused("timeout", "late"))
    answer.cancel()
    answer.deliver(tokens(0, 1, finish="stop"), 0.0)
    assert desk.outcomes == ["length"]
    assert desk.cancels == 0


@virtual_time
async def test_a_cancelled_answer_ends_quietly_and_drops_what_nobody_read() -> None:
    desk = Desk()
    answer = desk.answer()
    answer.deliver(tokens(0, 5), 0.0)
    answer.cancel()
    answer.cancel()
    answer.deliver(tokens(1, 6), 0.0)
    assert await read(answer) == []
    assert desk.outcomes == ["cancelled"]
    assert desk.cancels == 1


@virtual_time
async def test_closing_the_iterator_cancels() -> None:
    desk = Desk()
    answer = desk.answer()
    answer.deliver(tokens(0, 5), 0.0)
    answer.deliver(tokens(1, 6), 0.0)
    async with aclosing(aiter(answer)) as chunks:  # type: ignore[type-var]
        await anext(chunks)
    assert desk.cancels == 1


@virtual_time
async def test_cancelling_the_reader_cancels() -> None:
    desk = Desk()
    answer = desk.answer()
    reading = asyncio.create_task(read(answer))
    await settle()
    reading.cancel()
    await asyncio.wait([reading])
    assert desk.cancels == 1


@virtual_time
async def test_a_client_that_does_not_read_costs_at_most_its_answer() -> None:
    desk = Desk()
    answer = desk.answer(max_tokens=50)
    for index in range(50):
        for _ in range(3):  # as if the worker died and repeated itself
            answer.deliver(tokens(index, index), 0.0)
    answer.deliver(tokens(50, finish="length"), 0.0)
    assert sum(len(chunk.tokens) for chunk in answer._buffer) == 50
    assert len(answer._buffer) == 51
    assert [token for chunk in await read(answer) for token in chunk.tokens] == list(range(50))
