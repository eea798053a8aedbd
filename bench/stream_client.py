"""A client that reads many streamed completions at once, and notes when each token came. For benches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httptools
import orjson


@dataclass
class Answer:
    """One streamed completion. `times` has one moment for each token; the clock is `time.perf_counter`'s."""

    sent: float
    text: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.sent

    def intervals(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]


class StreamClient:
    """Completions of one daemon, greedy, by prompts of token numbers."""

    def __init__(self, url: str, timeout: float = 120.0) -> None:
        self._host, port = url.removeprefix("http://").rsplit(":", 1)
        self._port = int(port)
        self._timeout = timeout

    async def complete(
        self,
        model: str,
        prompt: Sequence[int],
        max_tokens: int,
        heard: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Stream one completion; `heard` is called after each event. Raises RuntimeError if it is refused or cut."""
        body = orjson.dumps(
            {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        answer = Answer(time.perf_counter())
        reading = _Reading(answer)
        async with asyncio.timeout(self._timeout):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                answer.sent = time.perf_counter()
                writer.write(head.encode() + body)
                while data := await reader.read(1 << 16):
                    reading.feed(data)
                    heard(answer)
            finally:
                writer.close()
        if not reading.done:
            raise RuntimeError(f"{model} did not answer in full: {reading.rest[-500:]!r}")
        return answer


class _Reading:
    """The parts of one response."""

    def __init__(self, answer: Answer) -> None:
        self.done = False
        self.rest = b""
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        *events, self.rest = (self.rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b":"):  # a comment: the daemon says what a long wait is for
                continue
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                self.done = True
                continue
            parsed: dict[str, Any] = orjson.loads(data)
            if "error" in parsed:
                raise RuntimeError(parsed["error"]["message"])
            text = "".join(choice["text"] for choice in parsed["choices"])
            self._answer.text += text
            self._answer.times += [now] * text.count(" ")  # each token is a word
