"""A group of workers for tests: does what real workers do, with nothing but counters.

Commands wait in a mailbox, work is done bit by bit and in any order, reports wait in an outbox. The group keeps its own
account of the frames that are really taken, made from the commands alone, and fails the test when they are more than
it has, or when a command breaks a rule that workers rely on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.core import actions as act
from scheduler.core import events as ev

Shards = tuple[tuple[int, ...], ...]

MOST_OUT_FAILURES = 3
"""Page-outs of a model that fail in a row: fewer than make the core give up."""


@dataclass
class Slot:
    """One model on a simulated group."""

    mapped: int = 0  # pages that have a frame: in, or being read
    ready: int = 0
    reading: deque[act.PageIn] = field(default_factory=deque)
    leaving: act.PageOut | None = None
    out_failures: int = 0
    kv_limit: int = 0
    kv_held: int = 0
    grants: deque[act.GrantKv | act.Suspend | act.Resume] = field(default_factory=deque)
    is_suspended: bool = False
    kv_kept: int = 0  # frames that bring back what is suspended
    sequences: dict[str, bool] = field(default_factory=dict)  # requests, in order; False: it was told to stop

    @property
    def can_fill_kv(self) -> bool:
        runs = self.ready > 0 and bool(self.sequences) and not self.is_suspended
        return runs and self.kv_held < self.kv_limit


def frames_of(grant: act.GrantKv | act.Suspend | act.Resume) -> int:
    match grant:
        case act.GrantKv():
            return grant.frames
        case act.Resume():
            return grant.kv_frames
        case act.Suspend():
            return 0


class SimulatedGroup:
    def __init__(
        self, name: str, ranks: int, frames: int, shards: Mapping[str, Shards], models: Mapping[str, str]
    ) -> None:
        self.name, self.ranks, self.frames = name, ranks, frames
        self._shards = shards  # of each model
        self._models = models  # of each request
        self.up = False
        self.clear()

    def clear(self) -> None:
        self.mailbox: deque[act.Action] = deque()
        self.outbox: deque[Callable[[float], ev.Event]] = deque()
        self.slots: dict[str, Slot] = {}

    def slot(self, model: str) -> Slot:
        return self.slots.setdefault(model, Slot())

    @property
    def used(self) -> int:
        """Frames that are really taken, on the fullest rank."""
        kv = sum(slot.kv_held for slot in self.slots.values())
        pages = [
            {page for name, slot in self.slots.items() for page in self._shards[name][rank][: slot.mapped]}
            for rank in range(self.ranks if self.slots else 0)
        ]
        return kv + max(map(len, pages), default=0)

    def check_frames(self) -> None:
        assert self.used <= self.frames, f"group {self.name} would need {self.used} frames, of {self.frames}"

    # ---- commands

    def obey(self) -> None:
        """Take the next command out of the mailbox."""
        match command := self.mailbox.popleft():
            case act.PageIn():
                self._page_in(command)
            case act.PageOut():
                slot = self.slot(command.model)
                assert not slot.reading, f"{command} during a page-in"
                for request in [request for request, runs in slot.sequences.items() if not runs]:
                    self.finish(command.model, request)  # at the latest
                assert not slot.sequences or slot.is_suspended, f"{command} under a lease of {list(slot.sequences)}"
                assert slot.leaving is None, f"{command} during a page-out"
                assert command.keep < slot.mapped, f"{command} takes nothing"
                slot.leaving = command
            case act.GrantKv():
                slot = self.slot(command.model)
                slot.grants.append(command)
                slot.kv_limit = max(slot.kv_limit, command.frames)
            case act.Suspend():
                slot = self.slot(command.model)
                assert not slot.is_suspended, f"{command} of what is suspended"
                slot.is_suspended = bool(slot.sequences)
                slot.kv_kept = slot.kv_held
                slot.grants.append(command)
            case act.Resume():
                slot = self.slot(command.model)
                assert slot.is_suspended or not slot.sequences, f"{command} of what is not suspended"
                assert command.kv_frames >= slot.kv_kept, f"{command} does not bring {slot.kv_kept} frames back"
                slot.is_suspended = False
                slot.grants.append(command)
                slot.kv_limit = max(slot.kv_limit, command.kv_frames)
            case act.Serve():
                self.slot(self._models[command.request]).sequences[command.request] = True
            case act.Cancel():
                model = self._models[command.request]
                slot = self.slot(model)
                if command.request in slot.sequences:
                    slot.sequences[command.request] = False
                    if not slot.mapped or slot.is_suspended:
                        self.finish(model, command.request)  # it came after the model had failed, or nothing runs
        self.check_frames()

    def _page_in(self, command: act.PageIn) -> None:
        slot = self.slot(command.model)
        if command.first != slot.mapped:
            # Sent before our failure was heard of: it continues what is gone.
            assert slot.mapped == 0, f"{command} does not continue page {slot.mapped}"
            self._report(lambda at: ev.PageInFailed(at, self.name, command.model, command.epoch, "out of order"))
            return
        assert slot.leaving is None, f"{command} during a page-out"
        assert len(slot.reading) < 2, f"{command} is a third extent"
        slot.mapped = command.last
        slot.reading.append(command)

    # ---- work

    def extent_in(self, model: str) -> None:
        slot = self.slots[model]
        command = slot.reading.popleft()
        slot.ready = command.last
        self._report(lambda at: ev.PagedIn(at, self.name, model, command.epoch, command.last))

    def extent_failed(self, model: str) -> None:
        slot = self.slots[model]
        failed = list(slot.reading)
        slot.mapped = slot.ready = slot.kv_held = 0
        slot.reading.clear()
        slot.sequences.clear()
        slot.is_suspended = False
        for command in failed:
            self._report(lambda at, c=command: ev.PageInFailed(at, self.name, model, c.epoch, "short read"))

    def tail_out(self, model: str) -> None:
        slot = self.slots[model]
        command = slot.leaving
        assert command is not None
        slot.leaving, slot.out_failures = None, 0
        slot.mapped = slot.ready = command.keep
        self._report(lambda at: ev.PagedOut(at, self.name, model, command.epoch, command.keep))

    def tail_stays(self, model: str) -> None:
        slot = self.slots[model]
        command = slot.leaving
        assert command is not None
        slot.leaving = None
        slot.out_failures += 1
        self._report(lambda at: ev.PageOutFailed(at, self.name, model, command.epoch, "EINVAL"))

    def grant_done(self, model: str) -> None:
        slot = self.slots[model]
        done = slot.grants.popleft()
        slot.kv_limit = max(frames_of(grant) for grant in (done, *slot.grants))
        slot.kv_held = min(slot.kv_held, slot.kv_limit)
        match done:
            case act.Suspend():
                kept = slot.kv_kept
                self._report(lambda at: ev.Suspended(at, self.name, model, done.epoch, kept))
            case act.Resume():
                self._report(lambda at: ev.Resumed(at, self.name, model, done.epoch))
            case act.GrantKv():
                self._report(lambda at: ev.KvReleased(at, self.name, model, done.epoch, done.frames))

    def fill_kv(self, model: str) -> None:
        """Its batch uses all it was granted and would use one frame more."""
        slot = self.slots[model]
        slot.kv_held = slot.kv_limit
        self.check_frames()
        wanted = slot.kv_limit + 1
        self._report(lambda at: ev.KvWanted(at, self.name, model, wanted))

    def fill_all_kv(self) -> None:
        for name, slot in self.slots.items():
            if slot.can_fill_kv:
                self.fill_kv(name)

    def finish(self, model: str, request: str) -> None:
        slot = self.slots[model]
        del slot.sequences[request]
        if not slot.sequences:
            slot.kv_held = slot.kv_kept = 0
            slot.is_suspended = False
        self._report(lambda at: ev.Finished(at, request))

    def can_finish(self, model: str) -> list[str]:
        """Even a cancelled request first waits for all pages: the engine may be inside a forward pass."""
        slot = self.slots[model]
        if slot.is_suspended:
            return [request for request, runs in slot.sequences.items() if not runs]
        return list(slot.sequences) if slot.ready == len(self._shards[model][0]) else []

    def work(self, finish: bool = True) -> list[Callable[[], None]]:
        """Everything that may happen here next without anything going wrong; no request ends unless it may `finish`."""
        possible: list[Callable[[], None]] = [self.obey] if self.mailbox else []
        for name, slot in self.slots.items():
            if slot.reading:
                possible.append(lambda n=name: self.extent_in(n))
            if slot.leaving is not None:
                possible.append(lambda n=name: self.tail_out(n))
            if slot.grants:
                possible.append(lambda n=name: self.grant_done(n))
            if slot.can_fill_kv:
                possible.append(lambda n=name: self.fill_kv(n))
            if finish:
                possible += [lambda n=name, r=request: self.finish(n, r) for request in self.can_finish(name)]
        return possible

    def trouble(self) -> list[Callable[[], None]]:
        possible: list[Callable[[], None]] = []
        for name, slot in self.slots.items():
            if slot.reading:
                possible.append(lambda n=name: self.extent_failed(n))
            if slot.leaving is not None and slot.out_failures < MOST_OUT_FAILURES:
                possible.append(lambda n=name: self.tail_stays(n))
        return possible

    def _report(self, event: Callable[[float], ev.Event]) -> None:
        self.outbox.append(event)
