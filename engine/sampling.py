"""Choosing the next tokens: one batch of logits in, one token a row out, without any state.

A row's order of business, as transformers' `generate` does it (`GenerationMixin._get_logits_processor`): bias,
repetition penalty, presence and frequency penalties, mask, temperature, top-k, top-p, min-p, draw. Conventions:

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from engine.grammar import Mask
from engine.request import SamplingParams, TokenLogprob
from engine.upload import upload

LEAST_TEMPERATURE = 1e-5
"""Below it a row is greedy: there is no other token left, and a float32 no room to say so."""

TOP_P_PREFIX = 512
"""Tokens that top-p sorts first; only a row whose likeliest 512 do not reach `top_p` is sorted as a whole."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with. `position` is the place of the new token in the sequence."""

    params: SamplingParams
    position: int
    tokens: Sequence[int] = ()  # prompt and answer
    answer_counts: Mapping[int, int] | None = None  # tokens of the answer, and how often each stands there
    mask: Mask | None = None  # of a grammar
    given: int | None = None  # nothing is sampled: this token is there already, and its log-probability is wanted


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled | None]:
    """The next token of each row of `logits` (`[rows, vocabulary]`, float32); None where logits are NaN or infinite.

    `logits` may be written to. Everything is computed on their device, and comes back in one copy.
    """
    return Choice(logits, rows).take()


def find_likeliest(logits: torch.Tensor) -> torch.Tensor:
    """`[2, rows]` integers: the likeliest token of each row, and whether the row's logits are finite."""
    highest, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
    return torch.stack((tokens, torch.isfinite(highest).long()))


class Choice:
    """A batch's next tokens, chosen on the device and on their way to the host. Nobody waits for them before `take`."""

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], likeliest: torch.Tensor | None = None
    ) -> None:
        """`logits` may be written to. `likeliest` is what `find_likeliest` says of them and maybe rows behind them."""
        self._rows = rows
        self._reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        given = [i for i, row in enumerate(rows) if row.given is not None]
        self._chosen = [i for i, row in enumerate(rows) if row.given is None and not _takes_the_likeliest(row)]
        # Each operation lets other threads have the interpreter, and a decode should not wait for them often.
        found = find_likeliest(logits) if likeliest is None else likeliest
        # A copy: the next pass but one takes them when others may have put something else in the graphs' memory.
        tokens = found[0, : len(rows)].clone()
        # Before penalties are written to the logits.
        self._raw = torch.log_softmax(_select(logits, self._reported), dim=-1) if self._reported else None
        if given:
            tokens = _put(tokens, given, _index([rows[i].given or 0 for i in given], logits.device))
        self._draw = _Draw(_select(logits, self._chosen), [rows[i] for i in self._chosen]) if self._chosen else None
        self._reached: torch.Tensor | None = None
        if self._draw is not None:
            drawn, self._reached = self._draw.tokens(TOP_P_PREFIX)
            tokens = _put(tokens, self._chosen, drawn)
        self.tokens = tokens
        """On the device. Any token, but one of the vocabulary, where logits are not finite."""
        self.revised = False
        """Whether `take` has found that some row needed a longer look, and replaced `tokens`."""
        # Of a longer look, the same is true.
        self._finite = found[1, : len(rows)] if self._draw is None else found[1, : len(rows)].clone()
        self._is_found = not (self._chosen or given or self._reported)  # nothing else is to be told
        self._sent = _Sent(found) if self._is_found else self._send()

    def take(self) -> list[Sampled | None]:
        """The tokens, once they are here."""
        if self._is_found:
            (numbers,) = self._sent.take()
            finite = numbers[len(numbers) // 2 :]
            return [Sampled(int(numbers[i])) if finite[i] else None for i in range(len(self._rows))]
        parts = self._sent.take()
        finite, _tokens, reached, *_ = parts
        if self._draw is not None and not all(r or not finite[i] for i, r in zip(self._chosen, reached, strict=True)):
            self.tokens = _put(self.tokens, self._chosen, self._draw.tokens(self._draw.vocabulary)[0])
            self.revised = True
            parts = self._send().take()
        return _sampled(self._rows, self._reported, parts)

    def _send(self) -> _Sent:
        logprobs = _logprobs(self._raw, self._rows, self.tokens, self._reported)
        return _Sent(self._finite, self.tokens, self._reached, *logprobs)


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


def _takes_the_likeliest(row: SamplingRow) -> bool:
    params = row.params
    return params.temperature < LEAST_TEMPERATURE and not (
        _has_penalties(params) or params.logit_bias or row.mask is not None
    )


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


# ---- between host and device


def _to_device(device: torch.device, *columns: Sequence[float]) -> list[torch.Tensor]:
    """Numbers of the host as columns of float64, in one upload."""
    numbers = upload(torch.tensor(list(chain.from_iterable(columns)), dtype=torch.float64), device)
    return [part.unsqueeze(1) for part in torch.split(numbers, [len(column) for column in columns])]


class _Sent:
    """The numbers of some tensors, on their way to the host in one copy; none of those that are None."""

    def __init__(self, *parts: torch.Tensor | None) -> None:
        self._sizes = [0 if part is None else part.numel() for part in parts]
        there = [part for part in parts if part is not None]
        flat = there[0].view(-1) if len(there) == 1 else torch.cat([part.flatten().double() for part in there])
        self._arrived: torch.cuda.Event | None = None
        if flat.is_cuda:
            pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            flat = pinned.copy_(flat, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()
        self._flat = flat

    def take(self) -> list[list[float]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        flat = self._flat.tolist()
        ends = list(accumulate(self._sizes))
        return [flat[end - size : end] for end, size in zip(ends, self._sizes, strict=True)]


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows: a copy, or the tensor itself where they are all of its rows."""
    return logits if len(rows) == len(logits) else logits.index_select(0, _index(rows, logits.device))


def _put(tokens: torch.Tensor, rows: Sequence[int], new: torch.Tensor) -> torch.Tensor:
    """Tokens with those of some rows replaced."""
    return new if len(rows) == len(tokens) else tokens.index_copy(0, _index(rows, tokens.device), new)


def _index(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return _to_device(device, rows)[0].squeeze(1).long()


# ---- drawing


class _Draw:
    """Rows that are not plainly greedy, after penalties and temperature, ready to be drawn from."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        """Writes to `logits`."""
        _favour(logits, rows)
        _penalise(logits, rows)
        _mask(logits, rows)
        params = [row.params for row in rows]
        self.vocabulary = vocabulary = logits.shape[-1]
        self._greedy = logits.argmax(dim=-1)  # for rows that are greedy after penalties
        self._top_k = max((p.top_k for p in params if p.top_k < vocabulary), default=0)
        self._has_top_p = any(p.top_p < 1 for p in params)
        temperatures, self._ks, self._top_ps, self._min_ps, self._uniforms = _to_device(
            logits.device,
            [p.temperature for p in params],
            [p.top_k if p.top_k < vocabulary else 0 for p in params],
            [p.top_p for p in params],
            [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params],
            [uniform(p.seed, row.position) for p, row in zip(params, rows, strict=True)],
        )
        self._is_random = temperatures.squeeze(1) >= LEAST_TEMPERATURE
        divisors = torch.where(temperatures >= LEAST_TEMPERATURE, temperatures, 1.0).to(logits.dtype)
        # The highest logit of each row becomes 0, so that no temperature, however low, makes it infinite.
        self._logits = (logits - logits.amax(dim=-1, keepdim=True)) / divisors
        self._probabilities = torch.softmax(self._logits, dim=-1)

    def tokens(self, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's token, and whether it is right: `prefix` likeliest tokens were enough for the row's top-p.

        It is the token, of those that the filters keep, at which the row's mass first exceeds its uniform share of the
        whole. With 52 bits in the uniform number, the product stays below the row's total even after rounding, so the
        token found always has some probability.
        """
        floors, reached = self._floors(prefix)
        mass = self._mass(floors)
        drawn = torch.searchsorted(mass, self._uniforms * mass[:, -1:], right=True).squeeze(1)
        drawn = drawn.clamp(max=mass.shape[-1] - 1)  # of a row of NaNs, which has no token
        return torch.where(self._is_random, drawn, self._greedy), reached | ~self._is_random

    def _mass(self, floors: torch.Tensor) -> torch.Tensor:
        """Running sums of the probabilities of tokens that are not below their row's floor."""
        return (self._probabilities * (self._logits >= floors)).cumsum(dim=-1, dtype=torch.float64)

    def _floors(self, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest logit that each row's filters keep, as a column. The highest logit of a row is 0."""
        floors = self._logits.new_full((len(self._logits), 1), -torch.inf)
        reached = torch.ones_like(self._is_random)
        if self._top_k:
            best = self._logits.topk(self._top_k, dim=-1).values
            floors = torch.where(self._ks > 0, best.gather(1, self._ks.long().clamp(min=1) - 1), floors)
        if self._has_top_p:
            lowest, enough = self._top_p_floors(floors, min(prefix, self._logits.shape[-1]))
            uses = self._top_ps < 1
            floors = torch.where(uses, torch.maximum(floors, lowest), floors)
            reached = (enough | ~uses).squeeze(1)
        # p(token) >= min_p * p(likeliest), in logits
        return torch.maximum(floors, self._min_ps.to(floors.dtype)), reached

    def _top_p_floors(self, floors: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest logit of each row's smallest set of likeliest tokens whose mass reaches top-p, measured above
        `floors`, and whether it does within `count` tokens (if not, the last of their logits)."""
        wanted = self._top_ps * self._mass(floors)[:, -1:]
        best = self._logits.topk(count, dim=-1)
        mass = self._probabilities.gather(1, best.indices).cumsum(dim=-1, dtype=torch.float64)
        places = torch.searchsorted(mass, wanted)
        return best.values.gather(1, places.clamp(max=count - 1)), (places < count) | (count == self._logits.shape[-1])


def _favour(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    biases = [
        (i, token, bias)
        for i, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
        if token < logits.shape[-1]
    ]
    if biases:
        where, added = _places(logits, biases)
        logits[where] += added


def _mask(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Leave the tokens that a row's grammar does not allow no probability."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    stacked = np.stack([row.mask for row in rows if row.mask is not None], dtype=np.int64)
    words = upload(torch.from_numpy(stacked), logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[-1]].bool()
    index = _index(masked, logits.device)
    logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    seen = [(i, token, row.params.repetition_penalty) for i, row in enumerate(rows)
            if row.params.repetition_penalty != 1 for token in row.tokens]  # fmt: skip
    answered = [
        (i, token, row.params.frequency_penalty * count + row.params.presence_penalty)
        for i, row in enumerate(rows)
        if row.params.presence_penalty or row.params.frequency_penalty
        for token, count in (row.answer_counts or {}).items()
    ]
    if seen:
        where, penalties = _places(logits, seen)
        values = logits[where]
        # A token seen twice is written twice with the same value.
        logits[where] = torch.where(values > 0, values / penalties, values * penalties)
    if answered:
        where, losses = _places(logits, answered)
        logits[where] -= losses


def _places(
    logits: torch.Tensor, items: Sequence[tuple[int, int, float]]
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows, tokens and numbers, as an index into `logits` and a tensor of their type."""
    rows, tokens, numbers = (column.squeeze(1) for column in _to_device(logits.device, *zip(*items, strict=True)))
    return (rows.long(), tokens.long()), numbers.to(logits.dtype)


# ---- results


def _logprobs(
    raw: torch.Tensor | None, rows: Sequence[SamplingRow], tokens: torch.Tensor, reported: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Of the `reported` rows, whose log-probabilities are the rows of `raw`: that of the token, and the likeliest."""
    if raw is None:
        return ()
    chosen = raw.gather(1, (tokens if len(reported) == len(rows) else tokens[_index(reported, raw.device)])[:, None])
    best = raw.topk(_alternatives(rows, reported, raw.shape[-1]), dim=-1)
    return chosen, best.indices, best.values


def _alternatives(rows: Sequence[SamplingRow], reported: Sequence[int], vocabulary: int) -> int:
    return max(min(rows[i].params.logprobs or 0, vocabulary) for i in reported)


def _sampled(
    rows: Sequence[SamplingRow], reported: Sequence[int], parts: Sequence[Sequence[float]]
) -> list[Sampled | None]:
    finite, tokens, _reached, *logprobs = parts
    logs: dict[int, TokenLogprob] = {}
    if reported:
        chosen, ids, values = logprobs
        width = len(ids) // len(reported)
        for place, i in enumerate(reported):
            likeliest = range(place * width, place * width + min(rows[i].params.logprobs or 0, width))
            logs[i] = TokenLogprob(chosen[place], {int(ids[n]): values[n] for n in likeliest})
    return [Sampled(int(tokens[i]), logs.get(i)) if finite[i] else None for i in range(len(rows))]
