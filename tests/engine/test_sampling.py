"""Sampling: filters and penalties as the reference libraries define them, draws that are pure and fair."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import SamplingParams
from engine.sampling import TOP_P_PREFIX, SamplingRow, sample, uniform

VOCABULARY = 40


def logits(rows: int = 1, vocabulary: int = VOCABULARY, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(scores: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    results = sample(scores.clone(), rows)
    assert all(result is not None for result in results)
    return [result.token for result in results if result is not None]


def distribution(scores: torch.Tensor, params: SamplingParams, draws: int, **row: object) -> Counter[int]:
    """How often each token comes out, over as many positions."""
    rows = [SamplingRow(params, position, **row) for position in range(draws)]  # type: ignore[arg-type]
    return Counter(tokens(scores.expand(draws, -1), rows))


def assert_follows(counts: Counter[int], probabilities: torch.Tensor) -> None:
    """Pearson's chi-square, against its 99.99 % quantile (Wilson and Hilferty's approximation)."""
    draws = counts.total()
    assert all(probabilities[token] > 0 for token in counts), "a token came out that was ruled out"
    rare = [token for token in range(len(probabilities)) if 0 < probabilities[token] * draws < 5]
    bins = [[token] for token in range(len(probabilities)) if probabilities[token] * draws >= 5]
    bins += [rare] if sum(probabilities[token] for token in rare) * draws >= 5 else []
    statistic = 0.0
    for members in bins:
        expected = sum(probabilities[token].item() for token in members) * draws
        statistic += (sum(counts[token] for token in members) - expected) ** 2 / expected
    freedom = max(len(bins) - 1, 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def reference(scores: torch.Tensor, params: SamplingParams, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Probabilities of one row by transformers' processors; OpenAI's penalties by its formula."""
    ids = torch.tensor([prompt + answer])
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias.items()})(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token, count in Counter(answer).items():
        scores = scores.clone()
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0]


CASES = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.4),
    "bias": SamplingParams(logit_bias={3: 2.0, 11: -4.0}),
    "bias and penalty": SamplingParams(logit_bias={3: 5.0}, repetition_penalty=1.5),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.02),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence and frequency": SamplingParams(presence_penalty=0.9, frequency_penalty=0.4),
    "everything": SamplingParams(
        temperature=0.9, top_k=25, top_p=0.95, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.5
    ),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_distribution_of_the_reference(params: SamplingParams) -> None:
    scores = logits(spread=1.5)
    prompt, answer = [3, 3, 5], [7, 8, 7, 7, 30]
    counts = distribution(scores, params, 6000, tokens=prompt + answer, answer_counts=Counter(answer))
    expected = reference(scores.clone(), params, prompt, answer)
    assert_follows(counts, expected)
    assert {i for i in range(VOCABULARY) if expected[i] > 1e-2} <= set(counts), "a likely token never came"


def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals() -> None:
    scores = logits()
    best = int(scores.argmax())
    assert tokens(scores, [SamplingRow(SamplingParams(temperature=0), 0)]) == [best]
    scores[0, best - 1] = scores[0, best]
    assert tokens(scores, [SamplingRow(SamplingParams(temperature=0), 0)]) == [best - 1]


def test_penalties_change_a_greedy_choice() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.9]])
    params = SamplingParams(temperature=0, frequency_penalty=0.06)
    assert tokens(scores, [SamplingRow(params, 1, [1], {1: 1})]) == [1]
    assert tokens(scores, [SamplingRow(params, 2, [1, 1], {1: 2})]) == [2]


def test_presence_counts_once_however_often_a_token_came() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.9]])
    params = SamplingParams(temperature=0, presence_penalty=0.06)
    assert tokens(scores, [SamplingRow(params, 2, [1, 1], {1: 2})]) == [1]


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.9]])
    presence = SamplingParams(temperature=0, presence_penalty=1)
    repetition = SamplingParams(temperature=0, repetition_penalty=1.1)
    assert tokens(scores, [SamplingRow(presence, 1, [1], {})]) == [1]
    assert tokens(scores, [SamplingRow(repetition, 1, [1], {})]) == [2]


def test_a_very_low_temperature_is_greedy_and_stays_finite() -> None:
    scores = logits(spread=1000)
    assert tokens(scores, [SamplingRow(SamplingParams(temperature=1e-40), 0)]) == [int(scores.argmax())]


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 1e-46, 5e-324])
def test_a_temperature_that_float32_cannot_hold_is_greedy(temperature: float) -> None:
    scores = logits(spread=10)
    params = SamplingParams(temperature=temperature, repetition_penalty=1.1)
    row = SamplingRow(params, 3, [1], {})
    assert tokens(scores, [row]) == tokens(scores, [replace(row, params=replace(params, temperature=0.0))])


def test_top_p_zero_keeps_the_likeliest() -> None:
    scores = logits()
    assert set(distribution(scores, SamplingParams(top_p=0.0), 50)) == {int(scores.argmax())}


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, -50.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        assert set(distribution(scores, params, 300)) == {0, 1, 2, 3}


def test_top_p_reaches_beyond_the_prefix_that_is_sorted_first() -> None:
    scores = logits(vocabulary=4 * TOP_P_PREFIX, spread=0.1)  # nearly flat: 0.9 of the mass takes most of the tokens
    params = SamplingParams(top_p=0.9)
    expected = reference(scores.clone(), params, [0], [])
    counts = distribution(scores, params, 3000)
    assert all(expected[token] > 0 for token in counts)
    assert len(counts) > TOP_P_PREFIX


def test_minus_infinity_rules_a_token_out() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert set(distribution(scores, SamplingParams(), 100)) == {0, 2}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other(value: float) -> None:
    scores = logits(3)
    scores[1, 17] = value
    rows = [SamplingRow(SamplingParams(logprobs=1), 0) for _ in range(3)]
    results = sample(scores.clone(), rows)
    assert results[1] is None
    assert [results[0], results[2]] == sample(scores[[0, 2]], [rows[0], rows[2]])


def test_a_row_of_minus_infinity_has_no_token() -> None:
    assert sample(torch.full((1, 4), -torch.inf), [SamplingRow(SamplingParams(), 0)]) == [None]


def packed(allowed: set[int], vocabulary: int = VOCABULARY) -> npt.NDArray[np.int32]:
    bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_a_mask_leaves_what_it_allows_in_proportion() -> None:
    scores = logits()
    allowed = {1, 5, 31, 32, 39}
    expected = scores[0].clone()
    expected[[token for token in range(VOCABULARY) if token not in allowed]] = -torch.inf
    assert_follows(distribution(scores, SamplingParams(), 2000, mask=packed(allowed)), expected.softmax(-1))


def test_a_mask_holds_greedy_rows_and_no_other_rows() -> None:
    scores = logits(3)
    unlikely = int(scores[1].argmin())
    rows = [SamplingRow(SamplingParams(temperature=0), 0) for _ in range(3)]
    rows[1] = replace(rows[1], mask=packed({unlikely}))
    assert tokens(scores, rows) == [int(scores[0].argmax()), unlikely, int(scores[2].argmax())]


def test_a_bias_can_force_and_forbid_a_token() -> None:
    scores = logits()
    best, worst = int(scores.argmax()), int(scores.argmin())
    for params in (SamplingParams(temperature=0), SamplingParams(seed=3)):
        assert tokens(scores, [SamplingRow(replace(params, logit_bias={worst: 100.0}), 0)]) == [worst]
        assert tokens(scores, [SamplingRow(replace(params, logit_bias={best: -100.0}), 0)]) != [best]


# ---- purity


def test_the_same_seed_and_position_give_the_same_token() -> None:
    scores = logits(spread=0.5)
    first = [tokens(scores, [SamplingRow(SamplingParams(seed=7), position)]) for position in range(50)]
    again = [tokens(scores, [SamplingRow(SamplingParams(seed=7), position)]) for position in reversed(range(50))]
    other = [tokens(scores, [SamplingRow(SamplingParams(seed=8), position)]) for position in range(50)]
    assert first == again[::-1]
    assert first != other


def test_uniform_numbers_are_pinned() -> None:
    """A resumption on another version must go on alike: changing these breaks answers under way."""
    places = ((0, 0), (0, 1), (1, 0), (-1, 5), (2**70, 9))
    pinned = [0.652448486374, 0.034011701304, 0.368189515652, 0.208527757455, 0.564723094021]
    assert [uniform(seed, position) for seed, position in places] == pytest.approx(pinned, abs=1e-11)


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_independent() -> None:
    grid = torch.tensor(
        [[uniform(seed, position) for position in range(100)] for seed in range(100)], dtype=torch.float64
    )
    assert grid.min() >= 0
    assert grid.max() < 1
    for line in (*grid, *grid.T):
        assert abs(line.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / 100)
    assert_follows(Counter((grid * 20).long().flatten().tolist()), torch.full((20,), 0.05))
    shifted = (grid[:, 1:] - 0.5) * (grid[:, :-1] - 0.5)
    assert abs(shifted.mean()) < 4.5 / 12 / math.sqrt(9900)


MIXED = [*CASES.values(), SamplingParams(temperature=0), SamplingParams(temperature=0, logprobs=3, presence_penalty=1)]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 50_000])
def test_a_row_does_not_depend_on_the_rows_beside_it(vocabulary: int) -> None:
    """50,000 is beyond the size at which torch splits one reduction over threads."""
    scores = logits(len(MIXED), vocabulary)
    rows = [
        SamplingRow(replace(params, seed=i, logprobs=i % 4), 10 + i, [1, 2, i], {2: 1, i: 3})
        for i, params in enumerate(MIXED)
    ]
    together = sample(scores.clone(), rows)
    assert together == [sample(scores[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    backwards = sample(scores.flip(0), rows[::-1])
    assert together == backwards[::-1]
    twice = sample(torch.cat([scores, scores]), rows + rows)
    assert together + together == twice


# ---- log-probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits()
    expected = scores.log_softmax(-1)[0]
    params = SamplingParams(temperature=0.5, top_k=1, repetition_penalty=3, logprobs=4)
    [result] = sample(scores.clone(), [SamplingRow(params, 0, [int(scores.argmax())])])
    assert result is not None
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(expected[result.token].item())
    best = expected.topk(4)
    assert list(result.logprob.top) == best.indices.tolist()
    assert list(result.logprob.top.values()) == pytest.approx(best.values.tolist())


def test_a_given_token_is_scored_and_not_sampled() -> None:
    scores = logits(3)
    params = SamplingParams(temperature=0, logprobs=1, logit_bias={2: 50.0})
    rows = [SamplingRow(params, 0), SamplingRow(params, 1, given=7), SamplingRow(SamplingParams(temperature=0), 0)]
    biased, given, plain = sample(scores.clone(), rows)
    assert biased is not None
    assert plain is not None
    assert (biased.token, plain.token) == (2, int(scores[2].argmax()))
    assert given is not None
    assert given.token == 7
    assert given.logprob is not None
    expected = scores[1].log_softmax(-1)
    assert given.logprob.logprob == pytest.approx(expected[7].item())
    assert list(given.logprob.top) == [int(expected.argmax())]


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_nothing() -> None:
    scores = logits(2)
    with_chosen, without = sample(scores, [SamplingRow(SamplingParams(logprobs=n), 0) for n in (0, None)])
    assert with_chosen is not None
    assert with_chosen.logprob is not None
    assert with_chosen.logprob.top == {}
    assert without is not None
    assert without.logprob is None
