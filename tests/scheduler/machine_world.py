"""A world around a core for tests: simulated groups, and the books of what was asked and answered.

Every event goes through `World.send`, which carries the actions out, checks the core's invariants, and compares the
core with the books: everybody is answered once, pauses are kept, queues are bounded, frames thought free are free.
"""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core import actions as act
from scheduler.core import events as ev
from scheduler.core import invariants
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from tests.scheduler.machine_group import MOST_OUT_FAILURES, Shards, SimulatedGroup

NEVER = 1e9
"""Seconds until a deadline that no test should see."""

CONFIG = CoreConfig(
    page_bytes=1,
    max_queue=6,
    max_queue_total=12,
    max_running=3,
    extent_pages=2,
    wait_bound=5.0,
    load_backoff=1.0,
    load_backoff_max=8.0,
    time_slice=1.0,
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
        if isinstance(event, ev.PagedIn) and event.last == len(self.shards[event.model][0]):
            self.retry_at.pop(event.model, None)  # what began before the failure, on another group, has succeeded
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
            case act.PageIn(group=name, model=model, first=first):
                paused = self.now < self.retry_at.get(model, 0.0)  # what began on another group before may go on
                assert not paused or first, f"{model} is tried again before its pause is over"
                self._post(name, action)
            case act.GrantKv(group=name) | act.Suspend(group=name) | act.Resume(group=name):
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
            assert retry_at <= self.retry_at.get(model, retry_at) + 1e-6, (
                f"the pause of {model} grows by itself: {action}"
            )
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
                assert not self.waiting(model), f"{model} could not be loaded, and nobody who waits was told"
                self.arrive(model)

    def fail_evict(self, model: str) -> None:
        """The model's page-out fails, if one is under way: somebody must be woken for the next try."""
        self.obey_all()
        failed = False
        for group in self.groups.values():
            slot = group.slots.get(model)
            if slot is not None and slot.leaving is not None and slot.out_failures < MOST_OUT_FAILURES:
                group.tail_stays(model)
                failed = True
        self.deliver_all()
        if failed:
            assert self.wake_at is not None, f"nobody is woken to page {model} out"
            assert self.wake_at <= self.now + CONFIG.load_backoff_max, f"{model} is paged out too late"

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

    def take_turns(self) -> None:
        """No answer ends for a long time, and every model is asked for."""
        for model in self.shards:
            self.arrive(model)
        for _ in range(4):
            for group in self.groups.values():
                for _ in range(60):
                    possible = group.work(finish=False)
                    if possible:
                        possible[-1]()
                    if group.outbox:
                        self.deliver(group.name)
            self.advance(3.0)

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
