"""A simulated group's processor: continuous batches of the models that have requests there, one pass at a time.

Models take turns, those first for which somebody waits for a first token. A model's pass may begin while its pages
come in: what can run on the pages that are in is a piece of the pass, and between two pieces others have the turn.
Requests join a pass until its last piece begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core import actions, events
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.memory import SimulatedMemory

if TYPE_CHECKING:
    from scheduler.simulate.simulator import Simulator


@dataclass(slots=True)
class Running:
    """One request."""

    id: str
    model: SimulatedModel
    arrived: float
    prompt: int  # tokens yet to run
    output: int  # tokens yet to make
    computed: int = 0  # tokens whose keys and values there are
    started: bool = False
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one model, and how much of its present pass is done."""

    model: SimulatedModel
    running: list[Running]
    done: float = 0.0
    queued: bool = False  # it waits for the turn, or has it
    suspend: actions.Suspend | None = None  # asked for; carried out at the end of the pass
    suspended: bool = False


class Processor:
    def __init__(
        self,
        group: GroupSpec,
        models: Mapping[str, SimulatedModel],
        memory: SimulatedMemory,
        simulator: Simulator,
        streaming: bool,
    ) -> None:
        self._group = group.name
        self._way_seconds = group.way_seconds
        self._memory = memory
        self._simulator = simulator
        self._streaming = streaming
        self._models = models
        self._batches: dict[str, Batch] = {}  # of models that ever came here: of thousands, few do
        self._urgent: deque[Batch] = deque()
        self._others: deque[Batch] = deque()
        self._is_free = True
        simulator.outcome.busy_seconds[group.name] = 0.0

    def serve(self, request: Running) -> None:
        batch = self._batch(request.model.spec.name)
        batch.running.append(request)
        self._queue(batch)

    def _batch(self, model: str) -> Batch:
        batch = self._batches.get(model)
        if batch is None:
            batch = self._batches[model] = Batch(self._models[model], [])
        return batch

    def cancel(self, ident: str) -> None:
        """It leaves at the end of the pass."""
        for batch in self._batches.values():
            for request in batch.running:
                if request.id == ident:
                    request.cancelled = True

    def suspend(self, action: actions.Suspend) -> None:
        batch = self._batch(action.model)
        batch.suspend = action
        if not batch.queued:
            self._suspend(batch)

    def resume(self, action: actions.Resume) -> None:
        batch = self._batch(action.model)
        simulator = self._simulator
        simulator.at(simulator.now + self._copy_seconds(batch), self._resumed, batch, action)

    def pages_changed(self, model: str) -> None:
        self._queue(self._batch(model))

    def _suspend(self, batch: Batch) -> None:
        assert batch.suspend is not None
        batch.suspended, batch.done = True, 0.0
        simulator, action, batch.suspend = self._simulator, batch.suspend, None
        simulator.outcome.models[action.model].suspensions += 1
        simulator.at(simulator.now + self._copy_seconds(batch), self._suspended, batch, action)

    def _suspended(self, batch: Batch, action: actions.Suspend) -> None:
        now, frames = self._simulator.now, self._kv_frames(batch)
        self._simulator.tell(events.Suspended(now, action.group, action.model, action.epoch, frames))

    def _resumed(self, batch: Batch, action: actions.Resume) -> None:
        batch.suspended = False
        self._queue(batch)
        self._simulator.tell(events.Resumed(self._simulator.now, action.group, action.model, action.epoch))

    @staticmethod
    def _kv_frames(batch: Batch) -> int:
        tokens = batch.model.kv_frame_tokens
        return -(-sum(request.computed for request in batch.running) // tokens) if tokens else 0

    def _copy_seconds(self, batch: Batch) -> float:
        """To move its keys and values to host memory, or back."""
        return self._memory.copy_seconds(self._kv_frames(batch))

    def _ready(self, batch: Batch) -> float:
        """The share of the pass that can be done by now."""
        share = self._memory.share(batch.model.spec.name)
        return share if self._streaming or share == 1.0 else 0.0

    def _queue(self, batch: Batch) -> None:
        if batch.queued or batch.suspended or not batch.running or self._ready(batch) <= batch.done:
            return
        batch.queued = True
        is_urgent = any(not request.started for request in batch.running)
        (self._urgent if is_urgent else self._others).append(batch)
        if self._is_free:
            self._is_free = False
            # Requests that come at the same moment take part.
            self._simulator.at(self._simulator.now, self._next)

    def _next(self) -> None:
        queue = self._urgent or self._others
        if not queue:
            self._is_free = True
            return
        batch = queue.popleft()
        ready = self._ready(batch)
        model, chosen = batch.model, batch.running[: batch.model.max_batch]
        pieces = self._pieces(model, chosen)
        seconds = (model.pass_seconds + model.token_seconds * sum(pieces)) * (ready - batch.done)
        batch.done = ready
        self._simulator.outcome.busy_seconds[self._group] += seconds
        self._simulator.at(self._simulator.now + seconds, self._end, batch, chosen, pieces)

    @staticmethod
    def _pieces(model: SimulatedModel, chosen: list[Running]) -> list[int]:
        """How many tokens of each request take part: one of each that decodes, and prompts as far as there is room."""
        room = model.max_batch_tokens - len(chosen)
        pieces = []
        for request in chosen:
            piece = min(request.prompt, 1 + room) if request.prompt else 1
            room -= piece - 1
            pieces.append(piece)
        return pieces

    def _end(self, batch: Batch, chosen: list[Running], pieces: list[int]) -> None:
        batch.queued = False
        if batch.suspend is not None and batch.done < 1.0:
            self._suspend(batch)
        elif batch.done < 1.0:
            self._queue(batch)
        else:
            batch.done = 0.0
            self._pass_done(batch, chosen, pieces)
        self._next()

    def _pass_done(self, batch: Batch, chosen: list[Running], pieces: list[int]) -> None:
        ended = []
        for request, piece in zip(chosen, pieces, strict=True):
            request.prompt = max(0, request.prompt - piece)
            request.computed += piece
            if request.cancelled or (not request.prompt and request.output == 1):
                ended.append(request)
        if ended:
            gone = set(map(id, ended))
            batch.running = [request for request in batch.running if id(request) not in gone]
        if batch.suspend is not None:
            self._suspend(batch)
        else:
            self._queue(batch)
        for request in chosen:
            if request.prompt or request.cancelled:
                continue
            request.output -= 1
            if not request.started:
                request.started = True
                self._tell(self._simulator.started, request)
        for request in ended:
            self._tell(self._simulator.finished, request)

    def _tell(self, what: Callable[[Running], None], request: Running) -> None:
        if self._way_seconds:
            self._simulator.at(self._simulator.now + self._way_seconds, what, request)
        else:
            what(request)
