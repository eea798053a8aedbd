"""Baselines with the words of our core, so that the simulator can drive them. Frozen.

(a) Computron's scheduler, its policy and its mechanism: every 10 ms it looks at the model whose oldest request has
waited longest. If that model is in and the processor takes a batch, the batch goes; if it is absent, the model that was
used least recently and has nothing running goes out, whole, and the absent one comes in, whole; if none can go, or the
model is still coming in, nothing happens in this tick. A model answers once all of it is in
(`Simulator(streaming=False)`). Swapping out costs nothing here, which is kind to it.

(b), plain: least recently used with our mechanism, and nothing else of ours. The link and the processor work side by
side and wait for no tick; a model answers while it comes in, and who comes meanwhile joins; no more goes than is
needed, which is a whole model here, as all are of one size. Link and processor each take the oldest request first, and
what was used least recently goes, though requests wait for it.

And a limit, `foresee`: our own core with a policy that need not guess, because it knows when requests will come.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence

from scheduler.core import actions, events
from scheduler.core.core import SchedulerCore
from scheduler.policy.history import History
from scheduler.simulate.workload import Workload

TICK = 0.01


class ComputronCore:
    """One group, models of equal size of which `most_loaded` fit, batches of at most `max_batch`, one at a time."""

    def __init__(self, most_loaded: int, max_batch: int) -> None:
        self._most_loaded = most_loaded
        self._max_batch = max_batch
        self._pages: dict[str, int] = {}
        self._queues: dict[str, deque[tuple[float, str]]] = {}
        self._loaded: OrderedDict[str, bool] = OrderedDict()  # least recently used first; whether it is all in
        self._running: dict[str, str] = {}  # request → model
        self._group = ""
        self._epoch = 0
        self._wakes_at = 0.0

    def step(self, event: events.Event) -> Sequence[actions.Action]:
        match event:
            case events.ModelAdded():
                self._pages[event.model.name] = len(event.model.shards[0])
                self._queues[event.model.name] = deque()
            case events.WorkerUp():
                self._group = event.group
            case events.Arrived():
                self._queues[event.model].append((event.at, event.request))
            case events.PagedIn():
                self._loaded[event.model] = event.last == self._pages[event.model]
            case events.Finished():
                del self._running[event.request]
            case events.Tick():
                return [*self._tick(), *self._wake(event.at)]
        return self._wake(event.at)

    def _wake(self, now: float) -> list[actions.Action]:
        """At the next tick, while anything waits."""
        if self._wakes_at > now or not any(self._queues.values()):
            return []
        self._wakes_at = (math.floor(now / TICK + 1e-6) + 1) * TICK
        return [actions.WakeAt(self._wakes_at)]

    def _tick(self) -> list[actions.Action]:
        waiting = [(queue[0], model) for model, queue in self._queues.items() if queue]
        if not waiting:
            return []
        model = min(waiting)[1]
        if model not in self._loaded:
            return self._swap_in(model)
        if not self._loaded[model] or self._running:
            return []
        return self._serve(model)

    def _serve(self, model: str) -> list[actions.Action]:
        self._loaded.move_to_end(model)
        queue, room = self._queues[model], self._max_batch - list(self._running.values()).count(model)
        batch = [queue.popleft()[1] for _ in range(min(len(queue), room))]
        self._running |= dict.fromkeys(batch, model)
        return [actions.Serve(request, self._group) for request in batch]

    def _swap_in(self, model: str) -> list[actions.Action]:
        swaps: list[actions.Action] = []
        if len(self._loaded) >= self._most_loaded:
            busy = set(self._running.values())
            victim = next((other for other, whole in self._loaded.items() if whole and other not in busy), None)
            if victim is None:
                return []
            del self._loaded[victim]
            swaps.append(actions.PageOut(self._group, victim, 0, self._next_epoch()))
        self._loaded[model] = False
        return [*swaps, *self._page_in(model, self._pages[model])]

    def _page_in(self, model: str, pages: int) -> list[actions.Action]:
        return [actions.PageIn(self._group, model, 0, pages, self._next_epoch())]

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch


class PlainLruCore(ComputronCore):
    """One page-in at a time, and of complete models one batch at a time."""

    def step(self, event: events.Event) -> Sequence[actions.Action]:
        super().step(event)
        if isinstance(event, events.ModelAdded | events.WorkerUp):
            return []
        waiting = [model for _, model in sorted((queue[0], model) for model, queue in self._queues.items() if queue)]
        decided: list[actions.Action] = []
        absent = next((model for model in waiting if model not in self._loaded), None)
        if absent is not None and all(self._loaded.values()):
            decided += self._swap_in(absent)
        for model in waiting:
            if model in self._loaded and not (self._loaded[model] and self._is_taken()):
                decided += self._serve(model)
        return decided

    def _page_in(self, model: str, pages: int) -> list[actions.Action]:
        """Page by page, each of which lets the pass go on."""
        return [actions.PageIn(self._group, model, page, page + 1, self._next_epoch()) for page in range(pages)]

    def _is_taken(self) -> bool:
        """Whether the processor has a batch of a complete model."""
        return any(self._loaded[model] for model in self._running.values())


class _Foreseen(History):
    """Of one model whose arrivals are known beforehand."""

    def __init__(self, arrivals: Sequence[float]) -> None:
        super().__init__()
        self._arrivals = arrivals

    def value(self, now: float, patience: float) -> float:
        expected = self.next_use(now)
        return math.exp((now - expected) / patience) if expected is not None else 0.0

    def next_use(self, now: float) -> float | None:
        following = bisect_right(self._arrivals, now)
        return self._arrivals[following] if following < len(self._arrivals) else None


def foresee(core: SchedulerCore, workload: Workload) -> None:
    """Let a core that knows its models know when each of their requests will come."""
    for index, name in enumerate(workload.models):
        core._state.models[name].history = _Foreseen(workload.at[workload.which == index].tolist())
