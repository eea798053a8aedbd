"""What a sweep knows without a daemon: which batches can run at once, and what a line says of a point."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from server.profile import sweep as module
from server.profile.measure import Batch
from server.profile.sweep import Place, Plan, Sweep
from tests.server.profile.test_document import point

PAGE = 1 << 20


class NoClient:
    """Runs nothing that is to be looked at."""

    async def run(self, *_: object) -> None: ...


def sweep(monkeypatch: pytest.MonkeyPatch, told: list[str], *, frames: int = 10) -> Sweep:
    monkeypatch.setattr(module, "calls", lambda image, rank: ())
    shards = [SimpleNamespace(page_count=lambda page: 2)]
    image: Any = SimpleNamespace(manifest=SimpleNamespace(shards=shards, context_length=100, kv_bytes_per_token=4096))
    return Sweep(NoClient(), image, Place(frames, PAGE, 64, 512), told.append)  # type: ignore[arg-type]


def test_a_batch_is_as_large_as_frames_engine_and_context_let_it_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(monkeypatch, []).largest_batch(32) == 8 * PAGE // 4096 // 32  # 8 frames are left by the weights
    assert sweep(monkeypatch, [], frames=1000).largest_batch(16) == 64
    assert sweep(monkeypatch, []).largest_batch(100) > 0
    assert sweep(monkeypatch, []).largest_batch(101) == 0
    assert sweep(monkeypatch, [], frames=1).largest_batch(16) == 0


def test_what_cannot_run_at_once_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    plan = Plan(batches=(65,), prompt_tokens=(16, 99), output_tokens=4, repeat=1)
    assert asyncio.run(sweep(monkeypatch, told).points(plan)) == ()
    assert told == [f"batch 65 of {prompt} + 4 tokens: left out, too large" for prompt in (16, 99)]


def test_as_many_run_at_once_as_tokens_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    its = sweep(monkeypatch, [], frames=1000)
    its._place = replace(its._place, max_batch_tokens=16)
    assert its.largest_batch(16) == 16


@pytest.mark.parametrize("pass_tokens", [96, 128, 512, 2048])
@pytest.mark.parametrize("tokens", [64, 240, 4096])
@pytest.mark.parametrize("sequences", [3, 20, 66])
def test_the_first_answer_lasts_until_the_last_prompt_has_begun(sequences: int, tokens: int, pass_tokens: int) -> None:
    answer = module.lasting_answer(sequences, tokens, pass_tokens)
    prompts, answered = [tokens - answer] * sequences, 0
    while prompts[-1]:
        decoding = prompts.count(0)
        answered += decoding > 0
        budget = pass_tokens - decoding
        for place, left in enumerate(prompts):
            chunk = min(left, budget)
            prompts[place], budget = left - chunk, budget - chunk
    assert answered < answer


def test_a_point_without_a_whole_step_says_what_to_do() -> None:
    assert "20.00 ms a step" in module._line(point(1, 16, by_token=0.0))
    assert "more --output-tokens" in module._line(point(1, 16).model_copy(update={"decode": None}))


def test_collectives_are_counted_in_the_steps_of_the_whole_batch_on_average() -> None:
    def a_pass(at: float, decoded: int, prefilled: int = 0) -> dict[str, Any]:
        return {"name": "pass", "at": at, "seconds": 1.0, "decoded": decoded, "prefilled": prefilled}

    def reduced(at: float) -> dict[str, Any]:
        return {"name": "all_reduce", "at": at, "seconds": 0.25}

    spans = [
        a_pass(0.0, 0, 9),
        reduced(0.5),
        a_pass(1.0, 2),
        a_pass(2.0, 2),
        reduced(2.1),
        reduced(2.2),
        a_pass(3.0, 1),
    ]
    ran = Batch((), 4.0, ({"spans": spans},))
    assert module._seconds_in_steps(ran, "all_reduce", 2) == 0.25, "both of the second step, one of them launched ahead"
    assert module._seconds_in_steps(ran, "all_gather", 2) is None, "nobody saw one"
