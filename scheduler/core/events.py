"""What happens to the scheduler: past tense, stamped with the time in seconds of one monotonic clock.

Amounts of memory are in frames. A page is known by its content identity, an int that is equal for equal bytes, so
that shared pages are counted once. A group's ranks move in lockstep: page `k` means page `k` of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the core must know of a model: for each rank of its mesh, the identity of each page, in page order."""

    name: str
    shards: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.shards or not self.shards[0] or len({len(shard) for shard in self.shards}) > 1:
            raise ValueError(f"model {self.name}: every rank must have the same number of pages, at least one")


@dataclass(frozen=True, slots=True)
class Event:
    at: float


@dataclass(frozen=True, slots=True)
class Arrived(Event):
    """A request. `kv_frames` hold its prompt and its longest answer; a worker must have begun it before `deadline`."""

    request: str
    model: str
    kv_frames: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancelled(Event):
    """Nobody waits for this request any more.

    If it waited, it is over, without a word. If it ran, a Cancel goes out and it ends by Finished or Fail.
    """

    request: str


@dataclass(frozen=True, slots=True)
class Started(Event):
    """A request took part in a first forward pass. No decision hangs on it; it is here for the journal."""

    request: str


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The worker is done with a request, whatever came of it, and holds nothing of it."""

    request: str


@dataclass(frozen=True, slots=True)
class PagedIn(Event):
    group: str
    model: str
    epoch: int
    last: int  # exclusive


@dataclass(frozen=True, slots=True)
class PageInFailed(Event):
    """The model is absent from the group and holds no frame there; its running requests were dropped."""

    group: str
    model: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class PagedOut(Event):
    group: str
    model: str
    epoch: int
    keep: int


@dataclass(frozen=True, slots=True)
class PageOutFailed(Event):
    group: str
    model: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class KvWanted(Event):
    """A model's batch would use `frames` KV frames in all, more than its grant."""

    group: str
    model: str
    frames: int


@dataclass(frozen=True, slots=True)
class KvReleased(Event):
    """A changed grant took effect: the model holds at most `frames` KV frames."""

    group: str
    model: str
    epoch: int
    frames: int


@dataclass(frozen=True, slots=True)
class WorkerUp(Event):
    """A group is ready, empty, with this many frames a rank. It serves models of as many shards as it has ranks."""

    group: str
    frames: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A group is gone with everything it held. Requests that ran there wait again."""

    group: str
    message: str


@dataclass(frozen=True, slots=True)
class ModelAdded(Event):
    """A model of this name is not known, or is gone: one that is being removed still is known."""

    model: ModelSpec


@dataclass(frozen=True, slots=True)
class ModelRemoved(Event):
    """Waiting requests fail, running ones finish, then its pages go."""

    model: str


@dataclass(frozen=True, slots=True)
class LoadWanted(Event):
    """Bring the whole model in. `job` is answered by Done, Reject or Fail, as a request is."""

    job: str
    model: str


@dataclass(frozen=True, slots=True)
class EvictWanted(Event):
    """Page the model out once its running requests are done; new ones wait behind."""

    job: str
    model: str


@dataclass(frozen=True, slots=True)
class Pinned(Event):
    """Never evict this model, and bring it in. Answered at once: Done, or Reject if the pins do not fit together."""

    job: str
    model: str


@dataclass(frozen=True, slots=True)
class Unpinned(Event):
    job: str
    model: str


@dataclass(frozen=True, slots=True)
class DrainBegan(Event):
    """Admit nothing more; finish what was admitted."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed: what WakeAt asked for."""
