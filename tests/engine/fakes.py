"""A model and a shard without weights, which make the engine's every move visible."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import StepBatch
from engine.grammar import Grammars
from engine.model import KvCache, PageGate
from engine.request import (
    EngineReport,
    GenerationRequest,
    KvReleased,
    KvWanted,
    RequestFailed,
    SamplingParams,
    Tokens,
)
from swapper.errors import PageInAborted
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS

VOCABULARY = 97
TIMEOUT = 20.0


def next_token(tokens: Sequence[int]) -> int:
    """The fake model's greedy continuation: it depends on every token and its place."""
    state = 1
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What a request with this prompt must be answered."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


@dataclass
class FakeKv:
    region: Region


@dataclass
class FakeModel:
    """Writes tokens into the real KV region and reads them back for its logits, layer by layer through the gate.

    A block that is not mapped is a segmentation fault; one that is shared, lost or not computed gives wrong tokens.
    """

    name: str = "fake"
    vocab_size: int = VOCABULARY
    context_length: int = 512
    kv_bytes_per_token: int = 4
    grammars: Grammars | None = None
    layers: int = 1
    before: Callable[[StepBatch], None] | None = None  # called at the start of each pass
    flat: bool = False  # every token is as likely as any other
    poison: int | None = None  # a pass that samples after this token gives NaN
    batches: list[StepBatch] = field(default_factory=list)
    ahead: list[bool] = field(
        default_factory=list
    )  # of each pass, whether it was launched before its tokens were known
    layers_done: list[int] = field(default_factory=list)

    @property
    def likeliest(self) -> None:
        """It finds nothing by the way."""

    def kv_cache(self, region: Region) -> FakeKv:
        return FakeKv(region)

    def settle(self) -> None:
        """Nothing but passes needs its pages."""

    def close(self) -> None:
        """It leaves nothing anywhere."""

    def forward(
        self, batch: StepBatch, kv: KvCache, gate: PageGate, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        packed = batch.tokens if tokens is None else tokens.tolist()
        self.batches.append(batch)
        self.ahead.append(tokens is not None)
        if self.before is not None:
            self.before(batch)
        for layer in range(self.layers):
            gate(layer + 1)
            self.layers_done.append(layer)
        logits = torch.zeros(len(batch.sampled), self.vocab_size)
        for part in batch.slices:
            assert len(part.blocks) == -(-part.context // KV_BLOCK_TOKENS)
            for i in range(part.length):
                position = batch.positions[part.start + i]
                assert position == part.context - part.length + i
                self._slot(kv, part.blocks, position).value = packed[part.start + i]
            last = part.start + part.length - 1
            if last in batch.sampled:
                seen = [self._slot(kv, part.blocks, i).value for i in range(part.context)]
                row = batch.sampled.index(last)
                logits[row, next_token(seen)] = 0.0 if self.flat else 8.0
                if seen[-1] == self.poison:
                    logits[row, 0] = torch.nan
        return logits

    def _slot(self, kv: KvCache, blocks: tuple[int, ...], position: int) -> ctypes.c_uint32:
        slot = blocks[position // KV_BLOCK_TOKENS] * KV_BLOCK_TOKENS + position % KV_BLOCK_TOKENS
        return ctypes.c_uint32.from_address(kv.region.address + slot * self.kv_bytes_per_token)


class FakeShard:
    """A shard of `nbytes` one-byte pages, of which a test brings in as many as it likes."""

    def __init__(self, nbytes: int = 1, resident: int | None = None) -> None:
        self.page_count = nbytes
        self.region = Region(0, 0, "cpu")
        self.resident = nbytes if resident is None else resident
        self.waiting = threading.Event()  # a forward pass waits for pages
        self._changed = threading.Condition()
        self._failed = False

    def is_ready(self, nbytes: int) -> bool:
        return nbytes <= self.resident

    def wait(self, nbytes: int, given_up: Callable[[], bool] | None = None) -> None:
        with self._changed:
            while nbytes > self.resident:
                if self._failed or (given_up is not None and given_up()):
                    raise PageInAborted("the pages will not come")
                self.waiting.set()
                assert self._changed.wait(TIMEOUT), "nobody brought the pages in"
                self.waiting.clear()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def bring(self, resident: int) -> None:
        with self._changed:
            self.resident = resident
            self._failed = False
            self._changed.notify_all()

    def fail(self) -> None:
        """A page-in failed: nothing is ready any more, and waits raise."""
        with self._changed:
            self._failed = True
            self.resident = 0
            self._changed.notify_all()


def request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    model: str = "fake",
    answer: Sequence[int] = (),
    **sampling: object,
) -> GenerationRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling})  # type: ignore[arg-type]
    return GenerationRequest(name, model, tuple(prompt), params, tuple(answer))


class Reports:
    """Collects what an engine emits, proves that indices are exact, and waits for what a test wants to see."""

    def __init__(self) -> None:
        self.all: list[EngineReport] = []
        self.lists: list[Sequence[EngineReport]] = []
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self._changed = threading.Condition()

    def emit(self, reports: Sequence[EngineReport]) -> None:
        with self._changed:
            self.lists.append(reports)
            for report in reports:
                self.all.append(report)
                if isinstance(report, Tokens):
                    assert report.request not in self.finished, "a report after the last word"
                    answer = self.answers.setdefault(report.request, [0] * report.index)
                    assert report.index == len(answer), "a token was lost or came twice"
                    answer.extend(report.tokens)
                    if report.finish:
                        self.finished[report.request] = report.finish
                elif isinstance(report, RequestFailed):
                    self.failed[report.request] = report.message
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT), f"never came; so far: {self.all[-20:]}"

    def wait_for(self, *requests: str) -> None:
        """Until all these have ended, well or not."""
        self.wait_until(lambda: all(name in self.finished or name in self.failed for name in requests))

    def wait_for_grant(self, epoch: int) -> None:
        self.wait_until(lambda: any(isinstance(r, KvReleased) and r.epoch == epoch for r in self.all))

    def of(self, name: str) -> list[EngineReport]:
        return [r for r in self.all if not isinstance(r, KvReleased | KvWanted) and r.request == name]

    @property
    def wanted(self) -> list[int]:
        return [r.frames for r in self.all if isinstance(r, KvWanted)]

    def answer(self, name: str) -> tuple[int, ...]:
        return tuple(self.answers[name])
