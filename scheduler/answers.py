"""One request's answer, between the worker's token reports and the client that reads them.

Reports are indexed, so a token is delivered once however often it was generated: after a worker's death the request is
served again with the tokens delivered so far, and whatever repeats them is cut off here. The buffer needs no limit
of its own for a slow client: it holds at most the `max_tokens` tokens of one answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from engine.request import EngineTime, Request, Tokens
from swapper.errors import Refused


class LiveAnswer:
    """Implements `scheduler.interface.Answer`. Belongs to one event loop; read it once."""

    def __init__(
        self,
        request: Request,
        at: float,
        ended: Callable[[LiveAnswer, str], None],
        cancelled: Callable[[LiveAnswer], None],
    ) -> None:
        """`ended` is called once, with the outcome; `cancelled` before it when it was the client that went away."""
        self.request = request
        self.at = at  # arrival, on the driver's clock
        self.group: str | None = None  # where it was served last
        self.cold = False  # its model was not wholly in memory when it came
        self.started = False  # a first forward pass was reported, in this life or an earlier one
        self.served_at = at  # when it was sent to a worker last
        self.stages: dict[str, float] = {}
        self.outcome: str | None = None  # set once: how it ended for the client
        self._delivered = list(request.answer)
        self._buffer: deque[Tokens] = deque()
        self._news = asyncio.Event()
        self._refusal: Refused | None = None
        self._ended = ended
        self._cancelled = cancelled

    # ---- the client's side

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        """Yield tokens as they come. However the reading stops, the sequence does not run on for nobody."""
        try:
            while True:
                while self._buffer:
                    yield self._buffer.popleft()
                if self.outcome is not None:
                    break
                self._news.clear()
                await self._news.wait()
            if self._refusal is not None:
                raise self._refusal
        finally:
            self.cancel()

    def cancel(self) -> None:
        if self.outcome is None:
            self._buffer.clear()
            self._cancelled(self)
            self._end("cancelled")

    # ---- the driver's side

    def remainder(self) -> Request:
        """The request to serve now: the one that was made, and the tokens that its client has already."""
        if len(self._delivered) == len(self.request.answer):
            return self.request
        return self.request.continued(tuple(self._delivered))

    def has_gap_before(self, report: Tokens) -> bool:
        """Whether tokens are missing between what was delivered and this report: a defect below."""
        return report.index > len(self._delivered)

    def deliver(self, report: Tokens, now: float) -> None:
        """Pass on what is new in a report; end the answer when it says so. Ignored after the end."""
        if self.outcome is not None:
            return
        known = len(self._delivered) - report.index
        if known > 0:
            logprobs = None if report.logprobs is None else report.logprobs[known:]
            report = replace(report, index=len(self._delivered), tokens=report.tokens[known:], logprobs=logprobs)
        self._delivered += report.tokens
        if report.tokens or report.finish is not None:
            self._buffer.append(report)
            self._news.set()
        if report.time is not None:
            self.stages = self._stages(report.time, now)
        if report.finish is not None:
            self._end(report.finish)

    def _stages(self, engine: EngineTime, now: float) -> dict[str, float]:
        return {
            "queue": self.served_at - self.at,
            "transport": now - self.served_at - engine.total,
            "batch": engine.total - engine.computing - engine.paging,
            "page": engine.paging,
            "compute": engine.computing,
        }

    def refuse(self, refusal: Refused) -> None:
        """End the answer with an error, after the tokens that came before it. Ignored after the end."""
        if self.outcome is None:
            self._refusal = refusal
            self._end(refusal.reason)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self._news.set()
        self._ended(self, outcome)
