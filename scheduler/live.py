"""The live driver: runs the scheduler core against the clock, the workers and the clients.

One task owns the core. Whatever happens (a request, a job, a worker's report, a timer) is put into one inbox as an
event; the task takes a turn: it steps the core through all of them, carries out the actions, and posts each group its
commands at once. Nothing is awaited within a turn, so there is nothing to lock. Tokens do not pass the core: they
go from the report straight into their request's answer, and the core hears of the finish.

Bounds. A new request or job is refused while `inbox_limit` events wait. Reports of workers, cancellations and ticks
are never refused, and need not be: a report answers a command or names a request, the core bounds both, and every turn
empties the inbox.

A defect in the core ends the task. Then every request and job, present and future, is refused with `engine_failed`,
what runs is cancelled, `is_live` turns false for good, and the log holds the defect with its history: a scheduler
that no longer knows what it decided must not go on deciding, and a restart is for whoever supervises the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from engine.recorder import Recording, TorchProfiler
from engine.request import Request, RequestFailed, Started, Suspended, Tokens
from scheduler.admitted import AdmittedRequests, again
from scheduler.alarm import Alarm
from scheduler.answers import LiveAnswer
from scheduler.core import actions, events
from scheduler.core.core import CoreConfig, SchedulerCore
from scheduler.inbox import Inbox
from scheduler.interface import (
    GroupClient,
    GroupMemory,
    ModelDecision,
    ModelStatus,
    Observer,
    Room,
    ServedModel,
    WorkerStatus,
)
from scheduler.jobs import JobKind, Jobs
from scheduler.journal import Journal
from scheduler.link import GroupLink
from scheduler.memory_map import memory_map
from scheduler.records import Records
from scheduler.status import model_status
from scheduler.translate import CoreReport, command_of, event_of, model_spec
from swapper.errors import Refused, WorkerError
from swapper.geometry import KV_BLOCK_TOKENS, kv_capacity_blocks, kv_frames
from worker import protocol
from worker.protocol import GroupLost, GroupUp, Report

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between two turns at most."""

STALLED_AFTER = 5.0
"""Seconds without a turn after which the scheduler does not count as live."""

BUSY_RETRY_AFTER = 1.0
"""Seconds until a full inbox has surely been emptied."""


class LiveScheduler:
    """Implements `scheduler.interface.Scheduler`. All methods are called on one event loop."""

    def __init__(
        self,
        groups: Sequence[GroupClient],
        config: CoreConfig,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        inbox_limit: int = 4096,
        after_turn: Callable[[SchedulerCore], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`after_turn` is for tests: it sees the core whenever a turn has ended. `journal` is closed by `stop`."""
        self._journal = journal
        self._core = SchedulerCore(config)
        self._observer = observer
        self._clock = clock
        self._wall = wall
        self._after_turn = after_turn
        self._links = {client.name: GroupLink(client) for client in groups}
        self._models: dict[str, ServedModel] = {}
        self._removing: set[str] = set()
        self._inbox = Inbox(inbox_limit)
        self._requests = AdmittedRequests(self._inbox.put, observer, clock)
        self._jobs = Jobs(inbox_limit)
        self._records = Records(observer, clock, wall)
        self._alarm = Alarm(clock, self._tick, HEARTBEAT)
        self._owner: asyncio.Task[None] | None = None
        self._closed: Refused | None = None  # why nothing is taken any more
        self._draining = False
        self._drained = asyncio.Event()
        self._last_turn = clock()

    # ---- lifecycle

    async def start(self) -> None:
        for name, link in self._links.items():
            link.client.subscribe(partial(self._heard, name))
        self._owner = asyncio.create_task(self._own_core(), name="scheduler")
        self._owner.add_done_callback(self._owner_ended)
        self._alarm.start()
        try:
            async with asyncio.TaskGroup() as starts:
                for link in self._links.values():
                    starts.create_task(link.client.start())
        except* WorkerError as failures:
            await self.stop()
            raise failures.exceptions[0] from None

    async def drain(self, timeout: float) -> None:
        if self._closed is None:
            self._inbox.put(events.DrainBegan(self._clock()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout)
        late = Refused("draining", "The daemon is shutting down, and this did not end within its drain time.")
        self._requests.cancel_all(late)
        self._jobs.refuse_all(late)

    async def stop(self) -> None:
        self._close(Refused("draining", "The daemon is shutting down."))
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner])
        async with asyncio.TaskGroup() as stops:
            for link in self._links.values():
                stops.create_task(link.client.stop())
        if self._journal is not None:
            self._journal.close()

    # ---- what the server asks

    def add_model(self, model: ServedModel) -> None:
        """Raises ValueError while a model of that name is listed by `models`."""
        if model.name in self._models:
            raise ValueError(f"model {model.name} is served already; it has to be gone before it is added anew")
        self._models[model.name] = model
        self._inbox.put(events.ModelAdded(self._clock(), model_spec(model)))

    def change_model(self, model: ServedModel) -> None:
        """Its pages stay as they are."""
        if model.name in self._models and model.name not in self._removing:
            self._models[model.name] = model
            self._inbox.put(events.ModelChanged(self._clock(), model_spec(model)))

    def remove_model(self, name: str) -> None:
        """Its pages go once nothing runs on it; until then `models` lists it. Idempotent."""
        if name in self._models:
            self._removing.add(name)
            self._inbox.put(events.ModelRemoved(self._clock(), name))

    def submit(self, request: Request, timeout: float) -> LiveAnswer:
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is being answered already; every request needs an id of its own")
        refusal = self._refusal(request.model, self._inbox.is_full)
        if refusal is not None:
            answer = self._requests.new(request)
            answer.refuse(refusal)
            return answer
        model = self._models[request.model]
        frames = kv_frames(request.kv_tokens, model.kv_bytes_per_token, model.page_bytes)
        answer = self._requests.open(request)
        answer.cold = not self._records.is_whole(model.name, len(model.page_hashes[0]))
        self._inbox.put(events.Arrived(answer.at, request.id, request.model, frames, answer.at + timeout))
        if self._journal is not None:
            self._journal.asked(
                answer.at, request.id, request.prompt_tokens, max(0, request.kv_tokens - request.prompt_tokens)
            )
        return answer

    def room(self, model: str) -> Room | None:
        room = self._core.kv_room(model)
        served = self._models.get(model)
        if room is None or served is None or not served.kv_bytes_per_token:
            return None
        blocks = [kv_capacity_blocks(max(0, n), served.kv_bytes_per_token, served.page_bytes) for n in room]
        return Room(*(count * KV_BLOCK_TOKENS for count in blocks))

    async def load(self, model: str) -> None:
        await self._job("load", model, events.LoadWanted)

    async def evict(self, model: str) -> None:
        await self._job("evict", model, events.EvictWanted)

    async def pin(self, model: str) -> None:
        await self._job("pin", model, events.Pinned)

    async def unpin(self, model: str) -> None:
        await self._job("unpin", model, events.Unpinned)

    def models(self) -> Sequence[ModelStatus]:
        to_wall = self._wall() - self._clock()
        views = {view.name: view for view in self._core.models()}
        last_loads = self._records.last_load
        since, now = self._requests.waiting_since(), self._clock()
        return [
            model_status(model, views.get(name), last_loads.get(name), to_wall, now - since.get(name, now))
            for name, model in self._models.items()
        ]

    async def record(self, group: str, on: bool, torch_profiler: TorchProfiler) -> Sequence[Recording | None]:
        if group not in self._links:
            raise WorkerError(f"There is no group {group!r}; there are {', '.join(sorted(self._links))}.")
        return await self._links[group].client.record(on, torch_profiler)

    def workers(self) -> Sequence[WorkerStatus]:
        return [worker for link in self._links.values() for worker in link.client.workers]

    def memory(self) -> Sequence[GroupMemory]:
        return memory_map(self._models, self._core.models(), self._core.groups(), self._core.config.page_bytes)

    def decisions(self, model: str | None = None) -> Sequence[ModelDecision]:
        to_wall = self._wall() - self._clock()
        decided = [
            ModelDecision(name, to_wall + one.at, one.kind, one.message)
            for name in (self._models if model is None else (model,))
            for one in self._core.decisions(name)
        ]
        return sorted(decided, key=lambda one: one.at, reverse=True)

    def is_live(self) -> bool:
        turns = self._closed is None and self._clock() - self._last_turn < STALLED_AFTER
        return turns and any(link.up for link in self._links.values())

    async def _job(self, kind: JobKind, model: str, event: Callable[[float, str, str], events.Event]) -> None:
        refusal = self._refusal(model, self._inbox.is_full or self._jobs.is_full)
        if refusal is not None:
            raise refusal
        job = self._jobs.open(kind, model, self._clock())
        self._inbox.put(event(self._clock(), job.id, model))
        await job.done

    def _refusal(self, model: str, full: bool) -> Refused | None:
        """Why new work is not even put into the inbox."""
        if self._closed is not None:
            return again(self._closed)
        if full:
            return Refused("queue_full", "The scheduler has too much to do; try again shortly.", BUSY_RETRY_AFTER)
        if model not in self._models:
            return Refused("model_not_found", f"There is no model {model!r} here.")
        return None

    # ---- what happens below

    def _tick(self) -> None:
        self._inbox.put(events.Tick(self._clock()))

    def _heard(self, name: str, reports: Sequence[Report | GroupUp | GroupLost]) -> None:
        """A group's reports, in order."""
        if self._closed is not None:
            return
        for report in reports:
            match report:
                case Tokens():
                    if self._journal is not None and report.time is not None:
                        tokens = report.index + len(report.tokens)
                        self._journal.answered(self._clock(), report.request, tokens, report.time.computing)
                    self._used(self._requests.heard_tokens(report))
                case RequestFailed():
                    self._used(self._requests.heard_failure(report))
                case _:
                    self._note(name, report)
                    self._inbox.put(event_of(report, name, self._clock()))

    def _note(self, group: str, report: CoreReport) -> None:
        """Keep what people want to know and the core does not."""
        match report:
            case Started():
                self._requests.heard_start(report)
            case protocol.PagedIn():
                self._records.paged_in(group, report)
                if self._journal is not None:
                    pages = {source: moved.pages for source, moved in report.sources.items()}
                    self._journal.moved(self._clock(), group, report.model, report.epoch, pages)
            case protocol.PageInFailed():
                self._records.page_in_failed(group, report)
            case protocol.PagedOut():
                self._records.paged_out(group, report)
            case protocol.PageOutFailed():
                self._records.page_out_failed(group, report)
            case Suspended():
                self._observer.suspended(report.model, report.kept_bytes, report.lost_tokens, report.seconds)

    def _used(self, model: str | None) -> None:
        if model is not None:
            self._records.finished(model)

    # ---- the owner of the core

    async def _own_core(self) -> None:
        while True:
            await self._inbox.wait()
            self._turn()

    def _turn(self) -> None:
        self._last_turn = self._clock()
        for event in self._inbox.take_all():
            self._prepare(event)
            for action in self._step(event):
                self._carry_out(action)
            self._conclude(event)
        self._forget_removed()
        for link in self._links.values():
            link.post()
        if self._draining and not self._requests and not self._jobs:
            self._drained.set()
        if self._journal is not None:
            self._journal.flush()
        if self._after_turn is not None:
            self._after_turn(self._core)

    def _step(self, event: events.Event) -> list[actions.Action]:
        return self._core.step(event) if self._journal is None else self._journal.step(self._core, event)

    def _prepare(self, event: events.Event) -> None:
        """Let what a group lost be gone before the core decides anew."""
        match event:
            case events.WorkerUp():
                link = self._links[event.group]
                if link.came_up(event.ranks, event.pp):
                    self._observer.worker_restarted(event.group)
                for model in self._models.values():
                    link.introduce(model)
            case events.ModelAdded():
                for link in self._links.values():
                    link.introduce(self._models[event.model.name])
            case events.WorkerLost():
                self._links[event.group].lost()
                self._records.group_lost(event.group)

    def _conclude(self, event: events.Event) -> None:
        """Let go of what the core has let go of."""
        match event:
            case events.Cancelled():
                if self._core.request(event.request) is None:
                    self._requests.drop(event.request)
            case events.PagedIn():
                self._records.extent_decided(event.group, event.model)
            case events.DrainBegan():
                self._draining = True

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Serve():
                request = self._requests.serve(action.request, action.group)
                self._links[action.group].send(protocol.Serve(request))
            case actions.PageIn():
                model = self._models[action.model]
                self._records.page_in_asked(action, len(model.page_hashes[0]), self._wanted_since(action.model))
                self._links[action.group].page_in(action, model)
            case actions.PageOut():
                self._records.page_out_asked(action, self._page_out_reason(action.model))
                self._links[action.group].send(command_of(action))
            case actions.GrantKv() | actions.Suspend() | actions.Resume() | actions.Cancel():
                self._links[action.group].send(command_of(action))
            case actions.Reject() | actions.Fail():
                # Whose asker has had an end already (a finish that was heard while the event waited in the inbox, the
                # end of a drain) is in neither, and is told nothing.
                refusal = Refused(action.reason, action.message, action.retry_after)
                self._requests.refuse(action.id, refusal)
                self._jobs.refuse(action.id, refusal)
            case actions.Done():
                self._jobs.resolve(action.job)
            case actions.WakeAt():
                self._alarm.wake_at(action.at)

    def _forget_removed(self) -> None:
        for name in [name for name in self._removing if self._core.model(name) is None]:
            self._removing.remove(name)
            del self._models[name]
            self._records.forget(name)
            for link in self._links.values():
                link.forget(name)

    def _wanted_since(self, model: str) -> float | None:
        asked = self._requests.waiting_since().get(model), self._jobs.load_wanted_since(model)
        return min((at for at in asked if at is not None), default=None)

    def _page_out_reason(self, model: str) -> str:
        if model in self._removing:
            return "removed"
        if self._jobs.is_evicting(model):
            return "evicted"
        ttl = self._models[model].ttl
        return "idle" if ttl is not None and self._records.idle(model) >= ttl else "memory"

    def _owner_ended(self, owner: asyncio.Task[None]) -> None:
        """The core's owner ends only when it is stopped, or by a defect."""
        if owner.cancelled():
            return
        logger.critical("The scheduler stopped on a defect. Restart the daemon.", exc_info=owner.exception())
        self._close(Refused("engine_failed", "The scheduler stopped on a defect, which its log tells of. Restart it."))
        for group, request in self._requests.served():
            self._links[group].send(protocol.Cancel(request))
        for link in self._links.values():
            link.post()

    def _close(self, refusal: Refused) -> None:
        """Take nothing any more, and leave nobody waiting."""
        if self._closed is None:
            self._closed = refusal
            self._alarm.stop()
            self._requests.cancel_all(refusal)
            self._jobs.refuse_all(refusal)
            self._drained.set()
