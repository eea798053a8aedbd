"""Measuring one point on a daemon: a batch of requests over HTTP, while its workers record their passes.

The group must be idle but for us: passes of other models, or of other requests, make a point invalid.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx
import numpy as np

from engine.recorder import TorchProfiler
from server.profile.document import ProfileError

MOST_PROMPTS = 64
"""Of one request."""

BATCH_TIMEOUT = 600.0
"""Seconds that one batch may take, or any other request."""


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
class Answer:
    """When a client had what of the answer to a prompt, in seconds from the batch's beginning."""

    first_token: float
    last_token: float


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of a batch: what clients saw, and each rank's recording."""

    answers: tuple[Answer, ...]
    seconds: float
    ranks: tuple[Mapping[str, Any], ...]

    def passes(self, rank: int = 0) -> list[Mapping[str, Any]]:
        return [span for span in self.ranks[rank]["spans"] if span["name"] == "pass"]

    def readings(self, name: str) -> list[float]:
        """What ranks' GPUs told; nothing on a CPU."""
        return [rank["readings"][name] for rank in self.ranks if name in rank.get("readings", {})]


class Client:
    """A daemon's routes, as a sweep needs them. Raises ProfileError, with the daemon's own words if it has some."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=subject.url, timeout=BATCH_TIMEOUT, limits=limits)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def admin(self, method: str, path: str) -> Any:
        with _answered():
            answer = await self._http.request(method, f"/admin{path}", headers=_bearer(self._subject.admin_key))
        _check(answer)
        return answer.json()

    async def model(self) -> Mapping[str, Any]:
        """The model's state. Raises ProfileError if the daemon does not have it, or it is not alone on its group, where
        pages and KV blocks of others would be taken for its own."""
        models, group = (await self.admin("GET", "/models"))["models"], self._subject.group
        found: Mapping[str, Any] | None = next((m for m in models if m["name"] == self._subject.model), None)
        others = [m["name"] for m in models if m is not found and any(its["group"] == group for its in m["places"])]
        if others:
            raise ProfileError(f"Group {group} is not idle. Evict what it holds of other models: {', '.join(others)}.")
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
        with _answered():
            answer = await self._http.post(
                "/v1/completions", json={"model": self._subject.model, **body}, headers=_bearer(self._subject.api_key)
            )
        _check(answer)
        scored: Mapping[str, Any] = answer.json()["choices"][0]["logprobs"]
        return scored

    async def run(
        self, batch: int, prompt_tokens: int, output_tokens: int, seed: int, torch_profiler: TorchProfiler = "off"
    ) -> Batch:
        """A batch of random prompts, recorded; in as few requests as can be, so that they begin at the same moment."""
        prompts = np.random.default_rng(seed).integers(0, self._subject.vocabulary, (batch, prompt_tokens)).tolist()
        bodies = [prompts[at : at + MOST_PROMPTS] for at in range(0, batch, MOST_PROMPTS)]
        recording = f"/groups/{self._subject.group}/recording"
        await self.admin("POST", f"{recording}?torch_profiler={torch_profiler}")
        began = time.perf_counter()
        tasks = [asyncio.ensure_future(self._generate(body, output_tokens, began)) for body in bodies]
        try:
            async with asyncio.timeout(BATCH_TIMEOUT):
                answers = await asyncio.gather(*tasks)
        except TimeoutError:
            size = f"{batch} sequences of {prompt_tokens} + {output_tokens} tokens"
            raise ProfileError(f"{size} took more than {BATCH_TIMEOUT:g} s. Choose smaller ones.") from None
        finally:
            seconds = time.perf_counter() - began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            recorded = await self.admin("DELETE", recording)
        ran = Batch(tuple(chain.from_iterable(answers)), seconds, tuple(recorded["ranks"]))
        self._check_alone(ran, batch * output_tokens)
        return ran

    async def _generate(self, prompts: list[list[int]], output_tokens: int, began: float) -> list[Answer]:
        body = {"prompt": prompts, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        first: dict[int, float] = {}  # by prompt
        last: dict[int, float] = {}
        with _answered():
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
                        at = time.perf_counter() - began
                        for choice in json.loads(line[6:])["choices"]:
                            first.setdefault(choice["index"], at)
                            last[choice["index"]] = at
        return [Answer(first[prompt], last[prompt]) for prompt in first]

    def _check_alone(self, ran: Batch, tokens: int) -> None:
        """Raises ProfileError if a recording is not whole, or tells of other work than our so many tokens of answers:
        each is sampled once, even if its sequence has to be computed again."""
        if dropped := sum(rank["dropped"] for rank in ran.ranks):
            raise ProfileError(f"The recording was {dropped} spans too long. Use fewer --output-tokens.")
        passes = ran.passes()
        if any(one["model"] != self._subject.model for one in passes):
            raise ProfileError(f"Group {self._subject.group} is not idle: other models ran meanwhile.")
        sampled = sum(one["sampled"] for one in passes)
        if sampled > tokens:
            raise ProfileError(f"Group {self._subject.group} is not idle: other requests of the model ran meanwhile.")
        if sampled < tokens:
            raise ProfileError(
                f"Only {sampled} of {tokens} tokens were made on group {self._subject.group}. Name the group that the "
                "model runs on (--group); of several, the daemon chooses one itself."
            )


@contextmanager
def _answered() -> Iterator[None]:
    """Raises ProfileError if a daemon cannot be reached, or leaves in the middle of its answer."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ProfileError(f"{error.request.url} is not answered: {error!r}") from error


def _bearer(key: str | None) -> dict[bytes, bytes]:
    """As bytes: httpx takes text to be ASCII."""
    return {} if key is None else {b"Authorization": b"Bearer " + key.encode(errors="surrogateescape")}


def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        try:
            why = answer.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = answer.text
        raise ProfileError(f"{answer.request.url.path} answered {answer.status_code}: {why}")
