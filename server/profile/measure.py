"""Measuring one point on a daemon: a batch of requests over HTTP, while its workers record their passes.

The group must be idle but for us: passes of other models, or of other requests, make a point invalid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from server.profile.document import ProfileError

MOST_PROMPTS = 64
"""Of one request."""

MINUTES = 10.0
"""What one batch may take, at most."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on a group of a daemon."""

    url: str
    model: str
    group: str
    vocabulary: int
    api_key: str | None = None
    admin_key: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """When a client had what of its answer, in seconds from the batch's beginning."""

    first_token: float
    last_token: float


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of a batch: what clients saw, and each rank's recording."""

    requests: tuple[Request, ...]
    seconds: float
    ranks: tuple[Mapping[str, Any], ...]

    def passes(self, rank: int = 0) -> list[Mapping[str, Any]]:
        return [span for span in self.ranks[rank]["spans"] if span["name"] == "pass"]

    def peak(self, name: str) -> int:
        """The largest rank's; 0 if none has it."""
        peaks: list[int] = [rank["peaks"].get(name, 0) for rank in self.ranks]
        return max(peaks)


class Client:
    """A daemon's routes, as a sweep needs them. Raises ProfileError with the daemon's own words."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=subject.url, timeout=MINUTES * 60, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def admin(self, method: str, path: str, **query: Any) -> Any:
        key = self._subject.admin_key
        answer = await self._http.request(method, f"/admin{path}", params=query, headers=_bearer(key))
        _check(answer)
        return answer.json()

    async def model(self) -> Mapping[str, Any]:
        """The model's state. Raises ProfileError if the daemon does not have it."""
        models = (await self.admin("GET", "/models"))["models"]
        found: Mapping[str, Any] | None = next((m for m in models if m["name"] == self._subject.model), None)
        if found is None:
            raise ProfileError(f"The daemon at {self._subject.url} has no model {self._subject.model!r}.")
        return found

    async def load(self) -> Mapping[str, Any]:
        """Evict the model and load it again; what that took."""
        path = f"/models/{self._subject.model}"
        await self.admin("POST", f"{path}/evict")
        await self.admin("POST", f"{path}/load")
        last: Mapping[str, Any] = (await self.model())["last_load"]
        return last

    async def score(self, prompt: Sequence[int]) -> Mapping[str, Any]:
        """The prompt's log-probabilities, and the likeliest successor of each token."""
        body = {"prompt": list(prompt), "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        answer = await self._http.post(
            "/v1/completions", json={"model": self._subject.model, **body}, headers=_bearer(self._subject.api_key)
        )
        _check(answer)
        scored: Mapping[str, Any] = answer.json()["choices"][0]["logprobs"]
        return scored

    async def run(
        self, batch: int, prompt_tokens: int, output_tokens: int, seed: int, prompts_per_request: int = 1
    ) -> Batch:
        """A batch of random prompts, all at once, recorded. Those of one request begin at the same moment."""
        prompts = np.random.default_rng(seed).integers(0, self._subject.vocabulary, (batch, prompt_tokens)).tolist()
        bodies = [prompts[at : at + prompts_per_request] for at in range(0, batch, prompts_per_request)]
        recording = f"/groups/{self._subject.group}/recording"
        await self.admin("POST", recording)
        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(body, output_tokens, began)) for body in bodies]
        except* ProfileError as failures:
            raise failures.exceptions[0] from None
        finally:
            seconds = time.perf_counter() - began
            recorded = await self.admin("DELETE", recording)
        ran = Batch(tuple(task.result() for task in tasks), seconds, tuple(recorded["ranks"]))
        self._check_alone(ran, batch * (prompt_tokens + output_tokens - 1))
        return ran

    async def _generate(self, prompts: list[list[int]], output_tokens: int, began: float) -> Request:
        body = {"prompt": prompts, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        first = last = 0.0
        async with self._http.stream(
            "POST",
            "/v1/completions",
            json={"model": self._subject.model, **body},
            headers=_bearer(self._subject.api_key),
        ) as answer:
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async for line in answer.aiter_lines():
                if line.startswith('data: {"error"'):
                    raise ProfileError(f"A request of the batch failed: {line[6:]}")
                if line.startswith("data: {"):
                    last = time.perf_counter() - began
                    first = first or last
        return Request(first, last)

    def _check_alone(self, ran: Batch, tokens: int) -> None:
        """Raises ProfileError if a recording is not whole, or tells of other work than ours."""
        if dropped := sum(rank["dropped"] for rank in ran.ranks):
            raise ProfileError(f"The recording was {dropped} spans too long. Use fewer --output-tokens.")
        passes = ran.passes()
        if any(one["model"] != self._subject.model for one in passes):
            raise ProfileError(f"Group {self._subject.group} is not idle: other models ran meanwhile.")
        done = sum(one["prefilled"] + one["decoded"] for one in passes)
        if done < tokens:
            raise ProfileError(f"Only {done} of {tokens} tokens ran on group {self._subject.group}.")


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        try:
            why = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = answer.text
        raise ProfileError(f"{answer.request.url.path} answered {answer.status_code}: {why}")
