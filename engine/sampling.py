"""Choosing the next tokens: one batch of logits in, one token a row out, without any state.

A row's order of business, as transformers' `generate` does it (`GenerationMixin._get_logits_processor`): repetition
penalty, presence and frequency penalties, temperature, top-k, top-p, min-p, draw. Conventions:

- repetition penalty `r` (Keskar et al. 2019, section 4.1; transformers' `RepetitionPenaltyLogitsProcessor`): logits of
  tokens seen in prompt or answer are divided by `r` if positive, multiplied by it otherwise.
- presence `p` and frequency `f` (OpenAI's API reference): a token that stands `c > 0` times in the answer so far loses
  `f * c + p`.
- top-k, top-p and min-p keep every token that ties with the last one kept, so that no order among equals matters.
  top-p is measured after top-k, and keeps the smallest set whose mass reaches `p`; min-p keeps what is at least
  `min_p` times as likely as the likeliest.
- log-probabilities are natural, of the raw logits.

The draw inverts the cumulative distribution at a uniform number that is a hash of (seed, position). Every operation
works on each row for itself, so a row's token does not depend on which other rows are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.request import SamplingParams, TokenLogprob

TOP_P_PREFIX = 512
"""Tokens that top-p sorts first; only a row whose likeliest 512 do not reach `top_p` is sorted as a whole."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with. `position` is the place of the new token in the sequence."""

    params: SamplingParams
    position: int
    tokens: Sequence[int] = ()  # prompt and answer
    answer_counts: Mapping[int, int] | None = None  # tokens of the answer, and how often each stands there


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """The next token of each row of `logits` (`[rows, vocabulary]`, float32); None where logits are NaN or infinite.

    `logits` may be written to.
    """
    highest, greedy = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    finite = torch.isfinite(highest).tolist()
    tokens = greedy.tolist()
    logprobs = [i for i, row in enumerate(rows) if row.params.logprobs is not None and finite[i]]
    raw = torch.log_softmax(_select(logits, logprobs), dim=-1) if logprobs else None  # before _draw writes to it

    chosen = [i for i, row in enumerate(rows) if finite[i] and not _takes_the_likeliest(row.params)]
    if chosen:
        drawn = _draw(_select(logits, chosen), [rows[i] for i in chosen])
        for i, token in zip(chosen, drawn, strict=True):
            tokens[i] = token

    reported = dict(zip(logprobs, _logprobs(raw, rows, tokens, logprobs), strict=True)) if raw is not None else {}
    return [Sampled(tokens[i], reported.get(i)) if finite[i] else None for i in range(len(rows))]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), 52 bits of a hash of (seed, position): two rounds of splitmix64's finalizer (Vigna 2015)."""
    state = _mix(seed & _MASK)
    state = _mix((state ^ position) & _MASK)
    return (state >> 12) / (1 << 52)


_MASK = (1 << 64) - 1


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _takes_the_likeliest(params: SamplingParams) -> bool:
    return params.temperature == 0 and not _has_penalties(params)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows: a copy, or the tensor itself where they are all of its rows."""
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Tokens of rows that are not plainly greedy. Writes to `logits`."""
    _penalise(logits, rows)
    tokens = logits.argmax(dim=-1).tolist()  # of rows that are greedy after penalties
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        params = [rows[i].params for i in random]
        # The highest logit of each row becomes 0, so that no temperature, however low, makes it infinite.
        scaled = _select(logits, random)
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / _column(scaled, [p.temperature for p in params])
        drawn = _invert(scaled, params, [uniform(rows[i].params.seed, rows[i].position) for i in random])
        for i, token in zip(random, drawn, strict=True):
            tokens[i] = token
    return tokens


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    for i, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1 and row.tokens:
            seen = torch.tensor(row.tokens, device=logits.device)
            values = logits[i, seen]
            penalty = params.repetition_penalty
            # A token seen twice is written twice with the same value.
            logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
        if row.answer_counts and (params.presence_penalty or params.frequency_penalty):
            answered = torch.tensor(list(row.answer_counts), device=logits.device)
            counts = torch.tensor(list(row.answer_counts.values()), dtype=logits.dtype, device=logits.device)
            logits[i, answered] -= params.frequency_penalty * counts + params.presence_penalty


def _column(like: torch.Tensor, values: Sequence[float], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def _invert(logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """The token, of those that the filters keep, at which each row's mass first exceeds its uniform share of the whole.

    With 52 bits in the uniform number, the product stays below the row's total even after rounding, so the token
    found always has some probability.
    """
    probabilities = torch.softmax(logits, dim=-1)
    mass = _mass(logits, probabilities, _floors(logits, probabilities, params))
    return torch.searchsorted(mass, _column(mass, uniforms) * mass[:, -1:], right=True).squeeze(1).tolist()


def _mass(logits: torch.Tensor, probabilities: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """Running sums of the probabilities of tokens that are not below their row's floor."""
    return (probabilities * (logits >= floors)).cumsum(dim=-1, dtype=torch.float64)


def _floors(logits: torch.Tensor, probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The lowest logit that each row's filters keep, as a column. The highest logit of a row is 0."""
    floors = logits.new_full((len(logits), 1), -torch.inf)
    top_k = [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1]]
    top_p = [i for i, p in enumerate(params) if p.top_p < 1]
    min_p = [i for i, p in enumerate(params) if p.min_p > 0]
    if top_k:
        floors[top_k] = _top_k_floors(_select(logits, top_k), [params[i].top_k for i in top_k])
    if top_p:
        some, their, floor = _select(logits, top_p), _select(probabilities, top_p), floors[top_p]
        wanted = _column(floor, [params[i].top_p for i in top_p], torch.float64) * _mass(some, their, floor)[:, -1:]
        floors[top_p] = torch.maximum(floor, _top_p_floors(some, their, wanted))
    if min_p:  # p(token) >= min_p * p(likeliest), in logits
        floors[min_p] = torch.maximum(floors[min_p], _column(floors, [params[i].min_p for i in min_p]).log())
    return floors


def _top_k_floors(logits: torch.Tensor, ks: Sequence[int]) -> torch.Tensor:
    """The k-th highest logit of each row."""
    return logits.topk(max(ks), dim=-1).values.gather(1, _column(logits, ks, torch.int64) - 1)


def _top_p_floors(logits: torch.Tensor, probabilities: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The lowest logit of each row's smallest set of likeliest tokens whose mass reaches what is wanted."""
    vocabulary = logits.shape[-1]
    count = min(TOP_P_PREFIX, vocabulary)
    floors, reached = _floors_among_best(logits, probabilities, wanted, count)
    short = [i for i, ok in enumerate(reached) if not ok] if count < vocabulary else []
    if short:
        # Sorting more finds the same values in the same places, so which way a row goes does not change its result.
        floors[short] = _floors_among_best(logits[short], probabilities[short], wanted[short], vocabulary)[0]
    return floors


def _floors_among_best(
    logits: torch.Tensor, probabilities: torch.Tensor, wanted: torch.Tensor, count: int
) -> tuple[torch.Tensor, list[bool]]:
    """The logit at which each row's mass, summed from the likeliest token down, reaches `wanted`, and whether it does
    within `count` tokens (if not, the last of their logits)."""
    best = logits.topk(count, dim=-1)
    mass = probabilities.gather(1, best.indices).cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(mass, wanted)
    return best.values.gather(1, places.clamp(max=count - 1)), (places < count).squeeze(1).tolist()


def _logprobs(
    raw: torch.Tensor, rows: Sequence[SamplingRow], tokens: Sequence[int], wanted: Sequence[int]
) -> list[TokenLogprob]:
    """The report of each of the `wanted` rows, whose log-probabilities are the rows of `raw`."""
    chosen = raw.gather(1, _column(raw, [tokens[i] for i in wanted], torch.int64)).squeeze(1).tolist()
    counts = [min(rows[i].params.logprobs or 0, raw.shape[-1]) for i in wanted]
    best = raw.topk(max(counts), dim=-1)
    return [
        TokenLogprob(logprob, dict(zip(ids[:count], values[:count], strict=True)))
        for logprob, count, ids, values in zip(chosen, counts, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
