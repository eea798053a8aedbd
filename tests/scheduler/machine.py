"""A world around the core for tests: groups that obey, answer late, fail and die, and clients that come and go.

`SimulatedGroup` does what real workers do, with nothing but counters: commands wait in a mailbox, work is done bit by
bit, reports wait in an outbox. It keeps its own account of the frames that are really mapped, made from the commands
alone, and fails the test when they are more than it has. `World` puts groups around a core, keeps the books
of who was answered, and checks the invariants after every step. `SchedulerMachine` lets Hypothesis drive it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.core import actions as act
from scheduler.core import events as ev
from scheduler.core import invariants
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore

Shards = tuple[tuple[int, ...], ...]

NEVER = 1e9
"""Seconds until a deadline that no test should see."""

MOST_OUT_FAILURES = 3
"""Page-outs of a model that fail in a row: fewer than make the core give up."""

CONFIG = CoreConfig(
    page_bytes=1,
    max_queue=6,
    max_queue_total=12,
    max_running=3,
    extent_pages=2,
    wait_bound=5.0,
    load_backoff=1.0,
    load_backoff_max=8.0,
)

MODELS = {
    # Siblings share their first pages; `twin` repeats a page of its own.
    "alpha": ((1, 2, 3, 4, 5),),
    "beta": ((1, 2, 13, 14),),
    "twin": ((21, 21, 22, 3),),
    "delta": ((31, 32, 33, 34, 35, 36),),
    # Models of two ranks; both hold page 51 in rank 0 only, and 63 in rank 1 only.
    "pair": ((51, 52, 53), (61, 62, 63)),
    "duet": ((54, 51, 55, 56), (64, 65, 66, 63)),
}
GROUPS = {"solo": (1, 9), "spare": (1, 7), "duo": (2, 8)}  # ranks, frames


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
    grants: deque[act.GrantKv] = field(default_factory=deque)
    sequences: dict[str, bool] = field(default_factory=dict)  # requests, in order

    @property
    def can_fill_kv(self) -> bool:
        return self.ready > 0 and bool(self.sequences) and self.kv_held < self.kv_limit


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
                assert not slot.sequences, f"{command} under a lease of {list(slot.sequences)}"
                assert slot.leaving is None, f"{command} during a page-out"
                assert command.keep < slot.mapped, f"{command} takes nothing"
                slot.leaving = command
            case act.GrantKv():
                slot = self.slot(command.model)
                slot.grants.append(command)
                slot.kv_limit = max(slot.kv_limit, command.frames)
            case act.Serve():
                self.slot(self._models[command.request]).sequences[command.request] = True
            case act.Cancel():
                model = self._models[command.request]
                if command.request in self.slot(model).sequences and not self.slot(model).mapped:
                    self.finish(model, command.request)  # it came after the model had failed; nothing runs
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
        slot.kv_limit = max([done.frames, *(grant.frames for grant in slot.grants)])
        slot.kv_held = min(slot.kv_held, slot.kv_limit)
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
            slot.kv_held = 0
        self._report(lambda at: ev.Finished(at, request))

    def can_finish(self, model: str) -> list[str]:
        """Even a cancelled request first waits for all pages: the engine may be inside a forward pass."""
        slot = self.slots[model]
        return list(slot.sequences) if slot.ready == len(self._shards[model][0]) else []

    def work(self) -> list[Callable[[], None]]:
        """Everything that may happen here next without anything going wrong."""
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


class World:
    """A core, its groups, and the books of what was asked and answered."""

    def __init__(
        self,
        core: SchedulerCore,
        shards: Mapping[str, Shards] = MODELS,
        groups: Mapping[str, tuple[int, int]] = GROUPS,
    ) -> None:
        self.core = core
        self.now = 0.0
        self.wake_at: float | None = None
        self.shards: dict[str, Shards] = dict(shards)
        self.models: dict[str, str] = {}  # of every request there ever was
        self.kv_frames: dict[str, int] = {}
        self.groups = {
            name: SimulatedGroup(name, ranks, frames, self.shards, self.models)
            for name, (ranks, frames) in groups.items()
        }
        self.known_groups: set[str] = set()
        self.live: dict[str, str] = {}  # request → model, until its last word
        self.jobs: dict[str, tuple[str, str]] = {}  # job → kind, model
        self.impatient: set[str] = set()  # requests with a deadline near enough to be missed
        self.pinned: set[str] = set()
        self.removed: set[str] = set()
        self.retry_at: dict[str, float] = {}  # models whose load failed
        self.busy_at: dict[str, str] = {}  # request → group
        self.stale: list[ev.Event] = []  # reports of groups that died
        self.is_sound = True  # no check has failed
        self._count = 0

    # ---- telling the core

    def send(self, event: ev.Event) -> list[act.Action]:
        self.is_sound = False
        done = self.core.step(event)
        for action in done:
            self._carry_out(action)
        invariants.check(self.core)
        self._check_books()
        self.is_sound = True
        return done

    def new_id(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def arrive(self, model: str, kv_frames: int = 1, patience: float = NEVER) -> str:
        request = self.new_id("r")
        self.live[request] = model
        self.models[request] = model
        self.kv_frames[request] = kv_frames
        if patience < NEVER:
            self.impatient.add(request)
        self.send(ev.Arrived(self.now, request, model, kv_frames, self.now + patience))
        if self.core.request(request) == "waiting":
            assert self.waiting(model) <= CONFIG.max_queue, f"the queue of {model} is longer than allowed"
            assert sum(self.waiting(name) for name in self.shards) <= CONFIG.max_queue_total
        return request

    def waiting(self, model: str) -> int:
        view = self.core.model(model)
        return view.waiting if view is not None else 0

    def job(self, kind: str, model: str) -> str:
        job = self.new_id("j")
        self.jobs[job] = kind, model
        event = {"load": ev.LoadWanted, "evict": ev.EvictWanted, "pin": ev.Pinned, "unpin": ev.Unpinned}[kind]
        self.send(event(self.now, job, model))
        return job

    def remove(self, model: str) -> None:
        self.pinned.discard(model)
        self.removed.add(model)
        self.send(ev.ModelRemoved(self.now, model))

    def add(self, model: str) -> None:
        self.removed.discard(model)
        self.retry_at.pop(model, None)
        self.send(ev.ModelAdded(self.now, ev.ModelSpec(model, self.shards[model])))

    def cancel(self, request: str) -> None:
        was_waiting = self.core.request(request) == "waiting"
        if was_waiting:
            del self.live[request]
        self.send(ev.Cancelled(self.now, request))

    def come_up(self, group: str) -> None:
        self.groups[group].up = True
        self.known_groups.add(group)
        self.send(ev.WorkerUp(self.now, group, self.groups[group].frames, self.groups[group].ranks))

    def die(self, group: str) -> None:
        """A killed group's reports may have been on their way; only epochs tell that they come from a world before."""
        reports = [report(self.now) for report in self.groups[group].outbox]
        self.stale += [report for report in reports if not isinstance(report, ev.Finished | ev.KvWanted)]
        self.groups[group].up = False
        self.groups[group].clear()
        self.busy_at = {request: at for request, at in self.busy_at.items() if at != group}
        self.send(ev.WorkerLost(self.now, group, "killed"))

    def deliver(self, group: str) -> None:
        """Hand the group's oldest report to the core."""
        event = self.groups[group].outbox.popleft()(self.now)
        if isinstance(event, ev.Finished) and event.request in self.live:
            del self.live[event.request]
            del self.busy_at[event.request]
        self.send(event)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self.wake_at is not None and self.wake_at <= self.now:
            self.wake_at = None
            self.send(ev.Tick(self.now))

    # ---- what the core says

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.Serve(request=request, group=name):
                assert request in self.live, f"{request} is served after its last word"
                assert request not in self.busy_at, f"{request} is served twice"
                self._check_order(request)
                self.busy_at[request] = name
                self._post(name, action)
            case act.Cancel(request=request, group=name):
                self._post(name, action)
            case act.PageIn(group=name, model=model):
                assert self.now >= self.retry_at.get(model, 0.0), f"{model} is tried again before its pause is over"
                self._post(name, action)
            case act.GrantKv(group=name):
                self._post(name, action)
            case act.PageOut(group=name, model=model):
                ranks = len(self.shards[model])
                homes = [group for group in self.known_groups if self.groups[group].ranks == ranks]
                assert model not in self.pinned or len(homes) > 1, f"{model} is pinned and paged out"
                view = self.core.model(model)
                assert view is not None, f"{model} is gone and paged out"
                assert view.home != name, f"{model} is pinned on {name} and paged out there"
                self._post(name, action)
            case act.Reject(id=ident) | act.Fail(id=ident):
                self._last_word(ident, action)
            case act.Done(job=job):
                assert job in self.jobs, f"{job} has two last words"
                kind, model = self.jobs.pop(job)
                self._note_pin(kind, model)
            case act.WakeAt(at=at):
                self.wake_at = at if self.wake_at is None else min(at, self.wake_at)

    def _check_order(self, request: str) -> None:
        """Equal requests are served in the order of their arrival."""
        for older, model in self.live.items():
            if older == request:
                return
            overtaken = model == self.live[request] and self.kv_frames[older] == self.kv_frames[request]
            assert not overtaken or older in self.busy_at, f"{request} overtakes {older}"

    def _post(self, name: str, action: act.Action) -> None:
        group = self.groups[name]
        assert group.up, f"{action} is sent to a group that is down"
        group.mailbox.append(action)

    def _last_word(self, ident: str, action: act.Reject | act.Fail) -> None:
        assert (ident in self.live) != (ident in self.jobs), f"{ident} has two last words, the second {action}"
        if action.reason == "load_failed" and action.retry_after is not None:
            self._check_pause(self.live.get(ident) or self.jobs[ident][1], action)
        if action.reason == "timeout":
            assert ident in self.impatient, f"{ident} was forgotten until its deadline"
        self.live.pop(ident, None)
        self.jobs.pop(ident, None)
        self.busy_at.pop(ident, None)

    def _check_pause(self, model: str, action: act.Reject | act.Fail) -> None:
        assert action.retry_after is not None
        retry_at = self.now + action.retry_after
        assert retry_at <= self.now + CONFIG.load_backoff_max, f"{model} is given up for ever: {action}"
        if isinstance(action, act.Reject):
            assert retry_at <= self.retry_at[model] + 1e-6, f"the pause of {model} grows by itself: {action}"
        self.retry_at[model] = retry_at

    def _note_pin(self, kind: str, model: str) -> None:
        if kind == "pin":
            self.pinned.add(model)
        elif kind == "unpin":
            self.pinned.discard(model)

    def _check_books(self) -> None:
        for request in self.live:
            state = self.core.request(request)
            assert state is not None, f"{request} has vanished without a word"
            assert (state == "running") == (request in self.busy_at), f"{request} is {state}"
        assert self.core.unfinished == len(self.live) + len(self.jobs)
        for view in self.core.groups():
            used = self.groups[view.name].used
            assert used <= view.frames - view.free, f"{view.name} uses {used} frames and is thought to have {view.free}"

    # ---- episodes: what chance alone seldom brings together

    def obey_all(self) -> None:
        for group in self.groups.values():
            while group.mailbox:
                group.obey()

    def deliver_all(self) -> None:
        for group in self.groups.values():
            while group.outbox:
                self.deliver(group.name)

    def fail_load(self, model: str) -> None:
        """The model's page-in fails, if one is under way, and it is asked for again before anybody has calmed down."""
        self.obey_all()
        for group in self.groups.values():
            if model in group.slots and group.slots[model].reading:
                group.extent_failed(model)
                self.deliver_all()
                self.arrive(model)

    def fail_evict(self, model: str) -> None:
        """The model's page-out fails, if one is under way."""
        self.obey_all()
        for group in self.groups.values():
            slot = group.slots.get(model)
            if slot is not None and slot.leaving is not None and slot.out_failures < MOST_OUT_FAILURES:
                group.tail_stays(model)
        self.deliver_all()

    def restart(self, name: str) -> None:
        """The group dies with reports on their way, comes up, is asked for the same models, and then they arrive."""
        group = self.groups[name]
        idle = [model for model, slot in group.slots.items() if slot.ready and not slot.sequences]
        for model in idle[:1]:
            self.job("evict", model)
        self.obey_all()
        for work in group.work():
            work()
        models = list(group.slots)
        self.die(name)
        self.come_up(name)
        for model in models:
            self.arrive(model)
        for report in self.stale.copy():
            if isinstance(report, ev.PagedOut):
                self.settle()
                self.job("evict", report.model)
        while self.stale:
            self.send(self.stale.pop())

    def grow_batches(self) -> None:
        """Every model that is asked for comes in; every batch uses its KV, wants more, and gets what is free."""
        for _ in range(6):
            self.obey_all()
            for group in self.groups.values():
                for name, slot in group.slots.items():
                    if slot.reading:
                        group.extent_in(name)
                group.fill_all_kv()
            self.deliver_all()

    # ---- to the end

    def settle(self, rounds: int = 2000) -> None:
        """Let everything be carried out and answered, in good order, until nothing is left to do."""
        for _ in range(rounds):
            if not self.turn():
                return
        raise AssertionError("the world does not come to rest")

    def turn(self) -> bool:
        """One bit of work on every group; False if there was none."""
        moved = False
        for group in self.groups.values():
            possible = group.work()
            if possible:
                possible[-1]()
                moved = True
            if group.outbox:
                self.deliver(group.name)
                moved = True
        return moved

    def all_come_up(self) -> None:
        for name, group in self.groups.items():
            if not group.up:
                self.come_up(name)

    def press(self, rounds: int = 200) -> None:
        """Whoever waits longest must get its turn, though every other model is asked for without end."""
        self.all_come_up()
        oldest = next((request for request in self.live if self.core.request(request) == "waiting"), "none")
        for _ in range(rounds):
            if self.core.request(oldest) != "waiting":
                return
            for model in self.shards:
                if model != self.models[oldest] and not self.waiting(model):
                    self.arrive(model)
            self.turn()
            for group in self.groups.values():
                group.fill_all_kv()
            self.advance(1.0)
        raise AssertionError(f"{oldest} starves")

    def finish_everything(self) -> None:
        """Nothing new comes, every group is up, everything is answered: then every request and job must end."""
        self.all_come_up()
        for _ in range(200):
            self.settle()
            if not self.live and not self.jobs and not any(self.core.model(name) for name in self.removed):
                return
            assert self.wake_at is not None, f"{self.live or self.jobs} wait, and nothing will happen"
            assert self.wake_at < NEVER, f"{self.live or self.jobs} wait for ever"
            self.advance(max(0.0, self.wake_at - self.now))
        raise AssertionError(f"{self.live or self.jobs} do not end")


times = st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 6.0])
kv = st.sampled_from([0, 1, 1, 2, 3])
names = st.sampled_from(sorted(MODELS))


class SchedulerMachine(RuleBasedStateMachine):
    """Anything may happen in any order; what must hold is checked after each step, and that all ends, at the end."""

    core_class: Callable[[CoreConfig], SchedulerCore] = SchedulerCore

    @initialize()
    def begin(self) -> None:
        self.world = World(type(self).core_class(CONFIG))
        for name in MODELS:
            self.world.add(name)
        self.world.come_up("solo")
        self.world.come_up("duo")

    # ---- clients

    @rule(model=names, kv_frames=kv, patience=st.sampled_from([NEVER, NEVER, NEVER, 2.0]))
    def request_arrives(self, model: str, kv_frames: int, patience: float) -> None:
        self.world.arrive(model, kv_frames, patience)

    @rule(models=st.lists(names, min_size=2, max_size=8))
    def requests_arrive(self, models: list[str]) -> None:
        for model in models:
            self.world.arrive(model)

    @rule(model=names)
    def one_model_is_flooded(self, model: str) -> None:
        for _ in range(CONFIG.max_running + CONFIG.max_queue + 1):
            self.world.arrive(model)

    @rule(models=st.lists(names, min_size=1, max_size=3, unique=True))
    def models_are_pinned_and_others_crowd_in(self, models: list[str]) -> None:
        for model in models:
            self.world.job("pin", model)
        self.world.settle()
        for model in MODELS:
            self.world.arrive(model)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def request_is_cancelled(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(list(self.world.live))))

    @rule(kind=st.sampled_from(["load", "load", "evict", "evict", "pin", "unpin", "unpin"]), model=names)
    def job_is_asked_for(self, kind: str, model: str) -> None:
        self.world.job(kind, model)

    @rule(model=names)
    def model_goes_or_comes(self, model: str) -> None:
        if self.world.core.model(model) is None:
            self.world.add(model)
        else:
            self.world.remove(model)

    @precondition(lambda self: self.world.now > 20)
    @rule()
    def drain_begins(self) -> None:
        self.world.send(ev.DrainBegan(self.world.now))

    # ---- groups

    @rule(group=st.sampled_from(sorted(GROUPS)), count=st.integers(1, 12), data=st.data())
    def group_works(self, group: str, count: int, data: st.DataObject) -> None:
        """Several bits of work in any order; their reports wait, or come at once."""
        worker = self.world.groups[group]
        at_once, unlucky = data.draw(st.booleans()), data.draw(st.sampled_from([False, False, True]))
        for _ in range(count):
            possible = worker.work() + (worker.trouble() if unlucky else [])
            if not possible:
                return
            data.draw(st.sampled_from(possible))()
            while at_once and worker.outbox:
                self.world.deliver(group)

    @rule(group=st.sampled_from(sorted(GROUPS)), count=st.integers(1, 12))
    def reports_come(self, group: str, count: int) -> None:
        for _ in range(count):
            if self.world.groups[group].outbox:
                self.world.deliver(group)

    @precondition(lambda self: self.world.stale)
    @rule()
    def stale_report_comes(self) -> None:
        self.world.send(self.world.stale.pop())

    @rule(model=names)
    def load_fails(self, model: str) -> None:
        for _ in range(CONFIG.max_running + 1):
            self.world.arrive(model)
        self.world.fail_load(model)

    @rule(model=names, evict=st.booleans())
    def page_out_fails(self, model: str, evict: bool) -> None:
        if evict:
            self.world.job("load", model)
            self.world.settle()
            self.world.job("evict", model)
        self.world.fail_evict(model)

    @rule(model=names)
    def batches_grow_and_others_come(self, model: str) -> None:
        self.world.arrive(model)
        self.world.grow_batches()
        for other in MODELS:
            self.world.arrive(other)

    @rule(group=st.sampled_from(sorted(GROUPS)))
    def group_restarts(self, group: str) -> None:
        if self.world.groups[group].up:
            self.world.restart(group)

    @rule(group=st.sampled_from(sorted(GROUPS)))
    def group_dies_or_comes_up(self, group: str) -> None:
        if self.world.groups[group].up:
            self.world.die(group)
        else:
            self.world.come_up(group)

    @rule(seconds=times)
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def everything_settles(self) -> None:
        self.world.settle()

    @precondition(lambda self: any(self.world.waiting(model) for model in MODELS))
    @rule()
    def others_never_stop(self) -> None:
        self.world.press()

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.is_sound:
            self.world.finish_everything()
