"""Hypothesis drives the core: anything may happen in any order, with a few episodes that chance seldom brings about."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.core import events as ev
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from tests.scheduler.machine_world import CONFIG, GROUPS, MODELS, NEVER, World

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

    @rule(model=names, ttl=st.sampled_from([None, 0.0, 2.0]), priority=st.sampled_from([-1, 0, 5]))
    def something_else_is_expected_of_a_model(self, model: str, ttl: float | None, priority: int) -> None:
        spec = ev.ModelSpec(model, self.world.shards[model], ttl=ttl, priority=priority)
        self.world.send(ev.ModelChanged(self.world.now, spec))

    @precondition(lambda self: self.world.now > 20)
    @rule()
    def drain_begins(self) -> None:
        self.world.send(ev.DrainBegan(self.world.now))

    @rule(model=names)
    def load_is_overtaken_by_evict(self, model: str) -> None:
        self.world.job("load", model)
        self.world.obey_all()
        self.world.job("evict", model)

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

    @rule(model=names)
    def long_answers_take_turns(self, model: str) -> None:
        self.world.arrive(model, 2)
        self.world.take_turns()

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
