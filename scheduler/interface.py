"""What the live driver needs from below and offers above, so that both sides can be faked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.recorder import Recording, TorchProfiler
from engine.request import Request, Tokens
from scheduler.core.view import DecisionKind
from swapper.pager import SourceBytes
from worker.protocol import Command, Report
from worker.protocol import GroupLost as GroupLost
from worker.protocol import GroupUp as GroupUp
from worker.protocol import WorkerStatus as WorkerStatus

GroupCommand = Command

# ---- below: a group of workers


class GroupClient(Protocol):
    """One group of workers. It restarts them itself when they die or hang."""

    name: str

    def post(self, commands: Sequence[GroupCommand]) -> None:
        """Send commands to every rank, in order, without waiting. Dropped while the group is down."""

    def subscribe(self, sink: Callable[[Sequence[Report | GroupUp | GroupLost]], None]) -> None:
        """Call `sink` on the event loop with every report, in order. After GroupLost no report of before comes.

        Called once, before `start`. A report of several ranks comes once, when the last rank has sent it.
        """

    async def start(self) -> None:
        """Start the workers; GroupUp follows. Raises WorkerError when they cannot be started at all."""

    async def stop(self) -> None:
        """Stop the workers; returns when their processes are gone."""

    async def record(self, on: bool, torch_profiler: TorchProfiler) -> Sequence[Recording | None]:
        """Begin a recording of what the workers do, or end it: then each rank's. Raises WorkerError."""

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """One entry a rank."""


# ---- above: what the server asks


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the driver must know it, made by the server from an image."""

    name: str
    path: str
    identity: str  # of the image: see swapper.image.Image
    page_bytes: int
    page_hashes: tuple[tuple[str, ...], ...]  # a rank, a page; as many pages for every rank
    nbytes: int  # of all ranks' data
    kv_bytes_per_token: int
    context_length: int
    pp: int = 1  # pipeline stages of its mesh
    max_wait: float | None = None  # what is expected of it: see scheduler.core.events.ModelSpec
    slo: float | None = None
    priority: int = 0
    ttl: float | None = None
    page_seconds: float | None = None  # of its profile, if it has one: see scheduler.core.events.ModelSpec
    run_seconds: float | None = None
    profiled: float | None = None  # when that was made, unix time


ModelState = Literal["absent", "loading", "resident", "partial", "evicting", "failed"]


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One finished or failed load of a model: from the first PageIn to the last page.

    `stages` are seconds by stage. What went before `at`: `queue`, the wait for a turn and for busy models, and `drain`,
    that for page-outs. Within: `map`, `read`, `verify`, `bind`, summed over threads.
    """

    model: str
    group: str
    at: float  # wall clock, when it began
    seconds: float
    pages: int
    sources: Mapping[str, SourceBytes]
    stages: Mapping[str, float]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """A model on one of the groups that hold something of it."""

    group: str
    state: ModelState
    resident_pages: int
    kv_frames: int
    running: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """`group`, `state` and `resident_pages` speak of the group that a model runs on, or that holds most of it."""

    name: str
    group: str | None
    state: ModelState
    reason: str | None  # why it failed
    pinned: bool
    resident_pages: int
    total_pages: int
    resident_bytes: int  # on all groups
    total_bytes: int
    waiting: int
    running: int
    kv_frames: int  # on all groups
    last_used: float | None  # wall clock, last finish
    last_load: LoadRecord | None
    oldest_wait: float = 0.0  # seconds that its oldest request without a first forward pass has waited
    places: tuple[ModelPlace, ...] = ()
    profiled: float | None = None  # when its profile was made, unix time; None: it has none


FrameUse = Literal["weights", "loading", "kv"]


@dataclass(frozen=True, slots=True)
class Holding:
    """Frames that the same models hold for the same use; `loading`: reserved for pages that are not in yet."""

    models: tuple[str, ...]
    use: FrameUse
    frames: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    group: str
    ranks: int
    up: bool
    frames: int  # of one rank
    page_bytes: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class ModelDecision:
    """Why something was done to a model or not, for people."""

    model: str
    at: float  # wall clock
    kind: DecisionKind
    message: str


class Room(NamedTuple):
    """Tokens of one request, prompt and answer, that memory can hold: beside what is pinned now, and with no pins."""

    now: int
    ever: int


class Answer(Protocol):
    """One request's answer as it is made. Iterating raises Refused when the request ends without one."""

    def __aiter__(self) -> AsyncIterator[Tokens]: ...

    @property
    def stages(self) -> Mapping[str, float]:
        """Where an answer's time went, in seconds: queue, transport, batch, page, compute.

        Only what is known so far, until it has come to its own end.
        """

    def cancel(self) -> None:
        """Nobody reads any more: the sequence leaves the batch. Idempotent; harmless after the end."""


class Observer(Protocol):
    """Told of everything a dashboard shows. Called on the event loop; must not raise or wait."""

    def loaded(self, record: LoadRecord) -> None: ...

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        """`age` is the time in seconds since the model was last used."""

    def suspended(self, model: str, kept_bytes: int, lost_tokens: int, seconds: float) -> None:
        """A model's running requests were stopped for another's sake; `lost_tokens` will be computed again."""

    def request_started(self, model: str, waited: float, cold: bool) -> None:
        """`waited` is from arrival to Started, in seconds; `cold`: it found its model not wholly in memory."""

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        """`outcome`: stop, length, cancelled, or a Refused reason."""

    def worker_restarted(self, group: str) -> None: ...


class Scheduler(Protocol):
    """The live driver, as the server sees it. All methods are called on the event loop."""

    async def start(self) -> None: ...

    async def drain(self, timeout: float) -> None:
        """Admit nothing more; return when everything admitted has ended, or cancel the rest after `timeout` seconds."""

    async def stop(self) -> None: ...

    def add_model(self, model: ServedModel) -> None: ...

    def change_model(self, model: ServedModel) -> None:
        """Take over what is expected of a model that is known: `max_wait`, `slo`, `priority`, `ttl`."""

    def remove_model(self, name: str) -> None: ...

    def submit(self, request: Request, timeout: float) -> Answer:
        """Queue a request; `timeout` bounds its wait for a first step, in seconds. Refusals come out of the Answer."""

    def room(self, model: str) -> Room | None:
        """For how many tokens one request of a model can have KV memory; None while that is not known."""

    async def load(self, model: str) -> None:
        """Return once the whole model is in. Raises Refused. Idempotent."""

    async def evict(self, model: str) -> None: ...

    async def pin(self, model: str) -> None: ...

    async def unpin(self, model: str) -> None: ...

    async def record(self, group: str, on: bool, torch_profiler: TorchProfiler) -> Sequence[Recording | None]:
        """See GroupClient. Raises WorkerError, also for a group that is not there."""

    def models(self) -> Sequence[ModelStatus]: ...

    def workers(self) -> Sequence[WorkerStatus]: ...

    def memory(self) -> Sequence[GroupMemory]: ...

    def decisions(self, model: str | None = None) -> Sequence[ModelDecision]:
        """The last decisions about a model, or about all of them, newest first."""

    def is_live(self) -> bool:
        """Whether the scheduler makes progress: its loop turns, and a group is up."""
