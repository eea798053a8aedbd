"""What happens to the scheduler: past tense, stamped with the time in seconds of one monotonic clock.

Amounts of memory are in frames. A page is known by its content identity, an int that is equal for equal bytes, so
that shared pages are counted once. A group's ranks move in lockstep: page `k` means page `k` of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.message import message

Mesh = tuple[int, int]
"""Ranks, and how many pipeline stages they make."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the core must know of a model: for each rank of its mesh, the identity of each page, in page order.

    What is expected of it (`max_wait`, `slo`, `priority`, `ttl`) comes from the configuration. `page_seconds` and
    `run_seconds` are a first guess, where there is one: the core goes by what it sees.
    """

    name: str
    shards: tuple[tuple[int, ...], ...]
    pp: int = 1  # pipeline stages of its mesh; the rest of the ranks is tensor parallel
    max_wait: float | None = None  # bound of a request's wait for memory; None: that of the configuration
    slo: float | None = None  # seconds in which an answer should be complete
    priority: int = 0  # the higher goes first, within the others' bounds
    ttl: float | None = None  # its pages go when it was idle for so long; None: they stay until they are in the way
    page_seconds: float | None = None  # to read one page of each rank
    run_seconds: float | None = None  # from the first forward pass of a request to its end

    def __post_init__(self) -> None:
        if not self.shards or not self.shards[0] or len({len(shard) for shard in self.shards}) > 1:
            raise ValueError(f"model {self.name}: every rank must have the same number of pages, at least one")
        if self.pp < 1 or len(self.shards) % self.pp:
            raise ValueError(f"model {self.name}: {len(self.shards)} ranks do not make {self.pp} stages")
        times = (self.max_wait, self.slo, self.ttl, self.page_seconds, self.run_seconds)
        if any(seconds is not None and seconds < 0 for seconds in times):
            raise ValueError(f"model {self.name}: times must not be negative")

    @property
    def mesh(self) -> Mesh:
        return len(self.shards), self.pp


@message
class Event:
    at: float


@message
class Arrived(Event):
    """A request. `kv_frames` hold its prompt and its longest answer; a worker must have begun it before `deadline`."""

    request: str
    model: str
    kv_frames: int
    deadline: float


@message
class Cancelled(Event):
    """Nobody waits for this request any more.

    If it waited, it is over, without a word. If it ran, a Cancel goes out and it ends by Finished or Fail.
    """

    request: str


@message
class Started(Event):
    """A request took part in a first forward pass. No decision hangs on it; it is here for the journal."""

    request: str


@message
class Finished(Event):
    """The worker is done with a request, whatever came of it, and holds nothing of it."""

    request: str


@message
class PagedIn(Event):
    group: str
    model: str
    epoch: int
    last: int  # exclusive


@message
class PageInFailed(Event):
    """The model is absent from the group and holds no frame there; its running requests were dropped."""

    group: str
    model: str
    epoch: int
    message: str


@message
class PagedOut(Event):
    group: str
    model: str
    epoch: int
    keep: int


@message
class PageOutFailed(Event):
    group: str
    model: str
    epoch: int
    message: str


@message
class KvWanted(Event):
    """A model's batch would use `frames` KV frames in all, more than its grant."""

    group: str
    model: str
    frames: int


@message
class KvReleased(Event):
    """A changed grant took effect: the model holds at most `frames` KV frames."""

    group: str
    model: str
    epoch: int
    frames: int


@message
class Suspended(Event):
    """A model's running requests stopped between two passes. Their keys and values are out of its KV frames, which are
    free now; with `kv_frames` frames they can be brought back.
    """

    group: str
    model: str
    epoch: int
    kv_frames: int


@message
class Resumed(Event):
    """A suspended model's requests run again from where they stopped."""

    group: str
    model: str
    epoch: int


@message
class WorkerUp(Event):
    """A group is ready, empty, with this many frames a rank. It serves models that were packed for its mesh."""

    group: str
    frames: int
    ranks: int = 1
    pp: int = 1  # pipeline stages that the ranks make


@message
class WorkerLost(Event):
    """A group is gone with everything it held. Requests that ran there wait again."""

    group: str
    message: str


@message
class ModelAdded(Event):
    """A model of this name is not known, or is gone: one that is being removed still is known."""

    model: ModelSpec


@message
class ModelChanged(Event):
    """Something else is expected of a model: `max_wait`, `slo`, `priority` or `ttl`. Nothing of it moves for that."""

    model: ModelSpec


@message
class ModelRemoved(Event):
    """Waiting requests fail, running ones finish, then its pages go."""

    model: str


@message
class LoadWanted(Event):
    """Bring the whole model in. `job` is answered by Done, Reject or Fail, as a request is."""

    job: str
    model: str


@message
class EvictWanted(Event):
    """Page the model out once its running requests are done; new ones wait behind."""

    job: str
    model: str


@message
class Pinned(Event):
    """Never evict this model, and bring it in. Answered at once: Done, or Reject if the pins do not fit together."""

    job: str
    model: str


@message
class Unpinned(Event):
    job: str
    model: str


@message
class DrainBegan(Event):
    """Admit nothing more; finish what was admitted."""


@message
class Tick(Event):
    """Time passed: what WakeAt asked for."""
