"""Who asks for which model when: made from a distribution, or read from a trace.

A gap between two requests of one model is gamma distributed: `cv` is its coefficient of variation (1: a Poisson
process; below: smoother; above: burstier). Traces are CSV files with a header:

| column | meaning |
|---|---|
| `time` | seconds, of any zero |
| `model` | its name |
| `prompt_tokens`, `output_tokens` | of the request |

The layout of the public Azure LLM inference trace (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`) loads too: it has
no models, so its requests are given to models at random, by their popularity.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

OURS = ("time", "model", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Workload:
    """Requests in order of time; `models[which[i]]` is asked at `at[i]`."""

    models: tuple[str, ...]
    at: Times
    which: Counts
    prompt: Counts
    output: Counts

    def __len__(self) -> int:
        return len(self.at)


def gamma(
    rates: Mapping[str, float], cv: float, seconds: float, seed: int, *, prompt: int = 1, output: int = 1
) -> Workload:
    """Each model's requests are a gamma renewal process of its own, at `rates` requests a second."""
    streams = _streams(len(rates), seed)
    arrivals = [_until(seconds, rate, cv, stream) for rate, stream in zip(rates.values(), streams, strict=True)]
    return _merged(tuple(rates), arrivals, prompt, output)


def computron_gamma(rates: Mapping[str, float], cv: float, seconds: float, seed: int) -> Workload:
    """What Computron's published generator really sends: it takes the last sleep off every gap, so that requests are
    denser and burstier than their labels say. For comparison with its figures only.
    """

    def slept(times: Times) -> Times:
        sleep, sleeps = 0.0, []
        for gap in np.diff(times, prepend=0.0):
            sleep = max(0.0, float(gap) - sleep)
            sleeps.append(sleep)
        return np.cumsum(sleeps)

    streams = _streams(len(rates), seed)
    denser = 4 * seconds  # nominal seconds, so that there are enough requests to cut
    arrivals = [slept(_until(denser, rate, cv, stream)) for rate, stream in zip(rates.values(), streams, strict=True)]
    return _merged(tuple(rates), [times[times < seconds] for times in arrivals], 1, 1)


def power_law(models: Sequence[str], total_rate: float, exponent: float) -> dict[str, float]:
    """Rates that add up to `total_rate`; the `k`-th model's is proportional to `k ** -exponent`."""
    weights = [float(k) ** -exponent for k in range(1, len(models) + 1)]
    return {model: total_rate * weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


def read_trace(path: Path, popularity: Mapping[str, float] | None = None, seed: int = 0) -> Workload:
    """Raises ValueError that says what is wrong with the file. `popularity` is for traces without models."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        columns = tuple(rows.fieldnames or ())
        try:
            if set(OURS) <= set(columns):
                return named([(float(row["time"]), row["model"], *_tokens(row, *OURS[2:])) for row in rows])
            if set(AZURE) <= set(columns):
                if not popularity:
                    raise ValueError("it names no models; say which models it is for")
                calls = [(_timestamp(row["TIMESTAMP"]), *_tokens(row, *AZURE[1:])) for row in rows]
                weights = np.array(list(popularity.values()))
                chosen = np.random.default_rng(seed).choice(list(popularity), len(calls), p=weights / weights.sum())
                return named([(at, str(model), *tokens) for (at, *tokens), model in zip(calls, chosen, strict=True)])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    raise ValueError(f"{path} has columns {', '.join(columns) or '(none)'}; it needs {', '.join(OURS)}")


def _tokens(row: Mapping[str, Any], prompt: str, output: str) -> tuple[int, int]:
    return max(1, int(float(row[prompt]))), max(1, int(float(row[output])))


def _timestamp(text: str) -> float:
    """The trace has up to seven digits of a second, of which `datetime` reads six."""
    fraction = re.search(r"\.\d+", text)
    if fraction is None:
        return datetime.fromisoformat(text).timestamp()
    return datetime.fromisoformat(text.replace(fraction[0], "")).timestamp() + float(fraction[0])


def named(calls: Sequence[tuple[Any, ...]]) -> Workload:
    calls = sorted(calls, key=lambda call: call[0])
    models = tuple(dict.fromkeys(call[1] for call in calls))
    number = {model: index for index, model in enumerate(models)}
    first = calls[0][0] if calls else 0.0
    return Workload(
        models,
        np.array([call[0] - first for call in calls], np.float64),
        np.array([number[call[1]] for call in calls], np.int64),
        np.array([call[2] for call in calls], np.int64),
        np.array([call[3] for call in calls], np.int64),
    )


def _streams(count: int, seed: int) -> list[np.random.Generator]:
    return [np.random.default_rng(stream) for stream in np.random.SeedSequence(seed).spawn(count)]


def _until(seconds: float, rate: float, cv: float, stream: np.random.Generator) -> Times:
    """Times below `seconds` of a gamma renewal process."""
    times = np.zeros(0)
    last = 0.0
    while last < seconds:
        more = last + np.cumsum(stream.gamma(cv**-2, cv**2 / rate, size=max(16, int(rate * seconds) + 1)))
        times, last = np.concatenate([times, more]), float(more[-1])
    return times[times < seconds]


def _merged(models: tuple[str, ...], arrivals: Sequence[Times], prompt: int, output: int) -> Workload:
    at = np.concatenate(arrivals)
    which = np.repeat(np.arange(len(models)), [len(times) for times in arrivals])
    order = np.argsort(at, kind="stable")
    tokens = np.ones(len(at), np.int64)
    return Workload(models, at[order], which[order], tokens * prompt, tokens * output)
