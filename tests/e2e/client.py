"""What the end-to-end tests ask a daemon, over plain HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Client:
    """A daemon's routes. Requests that must overlap run in threads."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=200))
        self._threads = ThreadPoolExecutor(64)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown()
        self._http.close()

    def post(self, path: str, **query: Any) -> httpx.Response:
        return self._http.post(path, params=query)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def models(self) -> dict[str, dict[str, Any]]:
        answer = self._http.get("/admin/models").raise_for_status().json()
        return {model["name"]: model for model in answer["models"]}

    def workers(self) -> list[dict[str, Any]]:
        """One for each rank of each group."""
        workers: list[dict[str, Any]] = self._http.get("/admin/workers").raise_for_status().json()["workers"]
        return workers

    def complete(self, model: str, prompt: str = "The sky is", max_tokens: int = 8, **more: Any) -> httpx.Response:
        """A greedy text completion; the raw response."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return self._http.post("/v1/completions", json=body)

    def text(self, model: str, **more: Any) -> str:
        """A greedy completion's text."""
        text = self.complete(model, **more).raise_for_status().json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    def start(self, model: str, **more: Any) -> Future[httpx.Response]:
        """A completion in a thread of its own."""
        return self._threads.submit(self.complete, model, **more)

    @contextmanager
    def stream(
        self, model: str, max_tokens: int, prompt: str = "Once upon a time", **more: Any
    ) -> Iterator[Iterator[str]]:
        """A streaming completion: yields its pieces; leaving the block closes the connection."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            yield _pieces(response)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 if there is none yet."""
        families = text_string_to_metric_families(self._http.get("/metrics").raise_for_status().text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Ask again and again until it is so; fails if it is not within `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not so within {seconds:g} s"


def _pieces(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice["text"]
