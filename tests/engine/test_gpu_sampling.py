"""Sampling on a GPU: the same function of (seed, position) as on the CPU, in one copy."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import TOP_P_PREFIX, SamplingRow, sample
from tests.engine.test_sampling import CASES, logits, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


def both(scores: torch.Tensor, rows: list[SamplingRow]) -> tuple[list[object], list[object]]:
    here, there = sample(scores.clone(), rows), sample(scores.cuda(), rows)
    return [one and one.token for one in here], [one and one.token for one in there]


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_the_same_tokens_as_on_the_cpu(params: SamplingParams) -> None:
    scores = logits(200, vocabulary=5000)
    answer = [7, 8, 7, 7, 30]
    rows = [SamplingRow(params, position, [3, 3, 5, *answer], Counter(answer)) for position in range(200)]
    here, there = both(scores, rows)
    assert here == there


def test_rows_of_all_kinds_in_one_batch() -> None:
    """Greedy ones, such as need all of a flat distribution, such as are NaN."""
    scores = logits(40, vocabulary=4 * TOP_P_PREFIX, spread=0.1)
    scores[5] = torch.nan
    kinds = [SamplingParams(temperature=0), SamplingParams(top_p=0.9), *CASES.values()]
    rows = [SamplingRow(kinds[i % len(kinds)], i, [1, 2], {2: 1}) for i in range(40)]
    here, there = both(scores, rows)
    assert here == there
    assert here[5] is None


def test_masks_and_given_tokens() -> None:
    scores = logits(6)
    kinds = [SamplingParams(temperature=0, logprobs=2), SamplingParams(seed=4, logprobs=2)]
    allowed = packed({1, 5, 31, 32, 39})
    rows = [SamplingRow(kinds[i % 2], i, mask=allowed if i < 4 else None, given=7 if i > 4 else None) for i in range(6)]
    here, there = both(scores, rows)
    assert here == there
    assert set(here[:4]) <= {1, 5, 31, 32, 39}
    assert here[5] == 7


def test_logprobs_are_those_of_the_cpu() -> None:
    scores = logits(4)
    rows = [SamplingRow(SamplingParams(logprobs=count), 3) for count in (0, 2, 5, 40)]
    for here, there in zip(sample(scores.clone(), rows), sample(scores.cuda(), rows), strict=True):
        assert here is not None
        assert there is not None
        assert here.logprob is not None
        assert there.logprob is not None
        assert there.logprob.logprob == pytest.approx(here.logprob.logprob, abs=1e-5)
        assert list(there.logprob.top) == list(here.logprob.top)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9, top_k=40, logprobs=3)])
def test_the_host_waits_once(params: SamplingParams) -> None:
    scores = logits(8, vocabulary=5000).cuda()
    rows = [SamplingRow(params, position, [1], {}) for position in range(8)]
    sample(scores.clone(), rows)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        sample(scores.clone(), rows)
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1
