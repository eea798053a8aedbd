"""A scheduler that answers from a script, so that the server's tests decide what happens and when."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.request import EmbeddingRequest, FinishReason, Request, TokenLogprob, Tokens
from scheduler.interface import GroupMemory, ModelDecision, ModelStatus, Room, ServedModel, WorkerStatus
from swapper.errors import Refused
from worker.protocol import Heartbeat

WAIT = object()
"""A step of a script: nothing more comes until the answer is cancelled."""

Step = Sequence[int] | FinishReason | Refused | asyncio.Event | object

TIMEOUT = 20.0


class FakeAnswer:
    def __init__(self, scheduler: FakeScheduler, request: Request, script: Sequence[Step]) -> None:
        # Of this test: an answer may outlive it by a moment.
        self._waiting, self._cancelled, self._cancellation = (
            scheduler.waiting,
            scheduler.cancelled,
            scheduler.cancellation,
        )
        self._request = request
        self._vectors = scheduler.vectors
        self._script = script
        self.stages: Mapping[str, float] = scheduler.stages
        self._ended = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        index = 0
        for step in self._script:
            await asyncio.sleep(0)
            if step is WAIT:
                self._waiting.set()
                await self._ended.wait()
                return
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            if isinstance(step, Refused):
                raise step
            if isinstance(self._request, EmbeddingRequest):
                made = self._vectors[: len(self._request.inputs)]
                self._ended.set()
                raw = tuple(struct.pack(f"<{len(one)}f", *one) for one in made)
                yield Tokens(self._request.id, 0, (), finish="stop", vectors=raw)
                return
            tokens, finish = ((), step) if isinstance(step, str) else (tuple(step), None)  # type: ignore[arg-type]
            scored = self._request.sampling.logprobs
            logprobs = None
            if scored is not None:
                logprobs = tuple(TokenLogprob(-0.5, dict.fromkeys((token, 0)[:scored], -0.5)) for token in tokens)
            if finish:
                self._ended.set()
            yield Tokens(self._request.id, index, tokens, logprobs, finish, self._prompt_logprobs(index))  # type: ignore[arg-type]
            index += len(tokens)

    def _prompt_logprobs(self, index: int) -> tuple[TokenLogprob, ...] | None:
        sampling = self._request.sampling
        if index or not sampling.score_prompt:
            return None
        tops = [(token,)[: sampling.logprobs] for token in self._request.prompt[1:]]
        return tuple(TokenLogprob(-0.25, dict.fromkeys(top, -0.25)) for top in tops)

    def cancel(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._cancelled.append(self._request.id)
            self._cancellation.set()


class FakeScheduler:
    """Implements `scheduler.interface.Scheduler`. Tests change its attributes before they send requests."""

    def __init__(self) -> None:
        self.reset()
        self.live = True
        self.drained = threading.Event()
        self.served: dict[str, ServedModel] = {}
        self.statuses: dict[str, ModelStatus] = {}
        self.maps: dict[str, GroupMemory] = {}
        self.decided: list[ModelDecision] = []

    def reset(self) -> None:
        self.script: Sequence[Step] = ("stop",)
        self.vectors: Sequence[Sequence[float]] = ()
        self.submitted: list[Any] = []
        self.cancelled: list[str] = []
        self.waiting = threading.Event()
        self.cancellation = threading.Event()
        self.refusals: dict[str, Refused] = {}  # by action: load, evict, pin, unpin
        self.jobs: list[tuple[str, str]] = []
        self.on_job: Callable[[], object] = lambda: None
        self.held_jobs: asyncio.Event | None = None
        self.kv_room: Room | None = None
        self.stages: Mapping[str, float] = {}
        self.timeouts: list[float] = []

    async def start(self) -> None:
        pass

    async def drain(self, timeout: float) -> None:
        self.drained.set()

    async def stop(self) -> None:
        pass

    def add_model(self, model: ServedModel) -> None:
        pages = len(model.page_hashes[0])
        self.served[model.name] = model
        self.statuses[model.name] = ModelStatus(
            model.name, None, "absent", None, False, 0, pages, 0, model.nbytes, 0, 0, 0, None, None
        )

    def change_model(self, model: ServedModel) -> None:
        self.served[model.name] = model

    def remove_model(self, name: str) -> None:
        del self.served[name], self.statuses[name]

    def submit(self, request: Request, timeout: float) -> FakeAnswer:
        self.submitted.append(request)
        self.timeouts.append(timeout)
        return FakeAnswer(self, request, self.script)

    def room(self, model: str) -> Room | None:
        return self.kv_room

    async def load(self, model: str) -> None:
        await self._job("load", model)
        total = self.statuses[model]
        self._change(
            model, state="resident", resident_pages=total.total_pages, resident_bytes=total.total_bytes, group="default"
        )

    async def evict(self, model: str) -> None:
        await self._job("evict", model)
        self._change(model, state="absent", resident_pages=0, resident_bytes=0)

    async def pin(self, model: str) -> None:
        await self._job("pin", model)
        self._change(model, pinned=True)

    async def unpin(self, model: str) -> None:
        await self._job("unpin", model)
        self._change(model, pinned=False)

    def models(self) -> Sequence[ModelStatus]:
        return list(self.statuses.values())

    def workers(self) -> Sequence[WorkerStatus]:
        heartbeat = Heartbeat(
            steps=7, pages_read=3, computing=False, paging=False, frames=10, frames_free=4, resident_bytes=1 << 20
        )
        return [WorkerStatus("default", 0, "up", 4321, 0, "cpu", "pread", heartbeat, 0.1)]

    def memory(self) -> Sequence[GroupMemory]:
        return list(self.maps.values())

    def decisions(self, model: str | None = None) -> Sequence[ModelDecision]:
        return [one for one in self.decided if model in (None, one.model)]

    def is_live(self) -> bool:
        return self.live

    def _change(self, model: str, **values: object) -> None:
        self.statuses[model] = replace(self.statuses[model], **values)  # type: ignore[arg-type]

    async def _job(self, action: str, model: str) -> None:
        self.jobs.append((action, model))
        self.on_job()
        if action in self.refusals:
            raise self.refusals[action]
        if self.held_jobs is not None:
            await asyncio.wait_for(self.held_jobs.wait(), TIMEOUT)
