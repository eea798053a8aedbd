"""The simulator: drives a scheduler core through a workload on simulated groups, in simulated time.

The core is the daemon's own class; everything else is here a model. Events wait in a heap; each is given to the core,
and the core's actions are carried out: by a group's link, which brings page-ins one after another and shares a node's
storage with other groups, and by its processor (`processor.py`). The same workload, groups and configuration give the
same outcome.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from scheduler.core import actions, events
from scheduler.simulate.hardware import GroupSpec, SharedLink, SimulatedModel
from scheduler.simulate.memory import SimulatedMemory
from scheduler.simulate.outcome import ModelOutcome, Outcome
from scheduler.simulate.processor import Processor, Running
from scheduler.simulate.workload import Workload


class Core(Protocol):
    """What is simulated: `SchedulerCore`, or a baseline with the same words."""

    def step(self, event: events.Event) -> Sequence[actions.Action]: ...


class Stuck(Exception):
    """Requests are open, and nothing is going to happen any more: a defect of the core."""


class Simulator:
    """One run. Times are in seconds from its beginning."""

    def __init__(
        self,
        core: Core,
        groups: Sequence[GroupSpec],
        models: Sequence[SimulatedModel],
        *,
        streaming: bool = True,
        timeout: float = 300.0,
        after_step: Callable[[float], None] | None = None,
    ) -> None:
        """`streaming`: a pass may begin before all pages are in. `timeout` bounds a request's wait for its first."""
        self._core = core
        self._timeout = timeout
        self._after_step = after_step
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = count()
        self._wake = float("inf")
        self._open: dict[str, Running] = {}
        self.outcome = Outcome(models={model.spec.name: ModelOutcome(model.objective) for model in models})
        self._models = {model.spec.name: model for model in models}
        nodes = {spec.node: SharedLink() for spec in groups}
        self._memories = {spec.name: SimulatedMemory(spec, self._models, nodes[spec.node], self) for spec in groups}
        self._processors = {
            spec.name: Processor(spec, self._models, self._memories[spec.name], self, streaming) for spec in groups
        }
        for model in models:
            self._step(events.ModelAdded(0.0, model.spec))
        for spec in groups:
            self._step(events.WorkerUp(0.0, spec.name, spec.frames, spec.ranks, spec.pp))

    def run(self, workload: Workload) -> Outcome:
        """Until the last request has ended. Raises Stuck."""
        names = [self._models[name] for name in workload.models]
        which, prompts, outputs = workload.which.tolist(), workload.prompt.tolist(), workload.output.tolist()
        for index, at in enumerate(workload.at.tolist()):
            while self._heap and self._heap[0][0] < at:
                self._advance()
            self.now = at
            self._arrive(f"r{index}", names[which[index]], prompts[index], outputs[index])
        while self._open:
            if not self._heap:
                some = next(iter(self._open))
                raise Stuck(f"{len(self._open)} requests are open at {self.now:.3f} s, among them {some}")
            self._advance()
        self.outcome.seconds = self.now
        return self.outcome

    # ---- for memories and processors

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (when, next(self._sequence), what, args))

    def tell(self, event: events.Event) -> None:
        """An event from below, now."""
        self._step(event)

    def started(self, running: Running) -> None:
        self.outcome.models[running.model.spec.name].first_tokens.append(self.now - running.arrived)
        if running.output:  # what has ended at once has started too
            self._step(events.Started(self.now, running.id))

    def finished(self, running: Running) -> None:
        if self._open.pop(running.id, None) is not None:  # None: the core has given it up before
            self.outcome.models[running.model.spec.name].latencies.append(self.now - running.arrived)
        self._step(events.Finished(self.now, running.id))

    # ----

    def _arrive(self, ident: str, model: SimulatedModel, prompt: int, output: int) -> None:
        self._open[ident] = Running(ident, model, self.now, prompt, output)
        frames = -(-(prompt + output) // model.kv_frame_tokens) if model.kv_frame_tokens else 0
        self._step(events.Arrived(self.now, ident, model.spec.name, frames, self.now + self._timeout))

    def _advance(self) -> None:
        self.now, _, what, args = heapq.heappop(self._heap)
        what(*args)

    def _tick(self, when: float) -> None:
        if when == self._wake:
            self._wake = float("inf")
            self._step(events.Tick(self.now))

    def _step(self, event: events.Event) -> None:
        self.outcome.events += 1
        for action in self._core.step(event):
            self._carry_out(action)
        if self._after_step is not None:
            self._after_step(self.now)

    def _carry_out(self, action: actions.Action) -> None:
        match action:  # the most frequent first: cases are tried one after another
            case actions.PageIn():
                self._memories[action.group].page_in(action)
            case actions.PageOut():
                self._memories[action.group].page_out(action)
            case actions.Serve():
                self._processors[action.group].serve(self._open[action.request])
            case actions.GrantKv():
                self.at(self.now, self._granted, action)
            case actions.Suspend():
                self._processors[action.group].suspend(action)
            case actions.Resume():
                self._processors[action.group].resume(action)
            case actions.Cancel():
                self._processors[action.group].cancel(action.request)
            case actions.WakeAt():
                if action.at < self._wake:
                    self._wake = action.at
                    self.at(action.at, self._tick, action.at)
            case actions.Reject() | actions.Fail():
                self._failed(action)
            case actions.Done():
                pass

    def _granted(self, grant: actions.GrantKv) -> None:
        self._step(events.KvReleased(self.now, grant.group, grant.model, grant.epoch, grant.frames))

    def _failed(self, action: actions.Reject | actions.Fail) -> None:
        running = self._open.pop(action.id, None)
        if running is not None:
            self.outcome.models[running.model.spec.name].failed += 1
            self.outcome.reasons[action.reason] = self.outcome.reasons.get(action.reason, 0) + 1

    # ---- for those below, when pages came

    def pages_changed(self, group: str, model: str) -> None:
        self._processors[group].pages_changed(model)
