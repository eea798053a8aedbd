"""What policy decides on: frozen views of what is wanted on a group and of who holds its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from scheduler.policy.history import History


class Want(NamedTuple):
    """A model that is wanted on a group: for waiting requests, a load, a pin, or to go on where it was suspended.

    Nothing in it changes with time alone.
    """

    model: str
    number: int  # the order of arrival of the oldest that waits
    since: float  # when that came
    due: float  # from then on it goes before everything that is not overdue
    queue: int  # how many wait, at least 1 and at most a batch
    waiting: int  # how many wait
    arrived: float  # the times at which those came, added up
    load: float  # seconds of the link until all its pages are in
    run: float  # seconds that a batch of it takes
    priority: int = 0
    best_by: float | None = None  # brought in later, its objective cannot be met any more; None: it has none
    is_next: bool = False  # the link's last extent or page-out was for it
    is_in: bool = False  # all its pages are in or on their way for good: only KV may lack
    rivals: int = 0  # when room is made for it: how many other models wait for the link

    def waited(self, now: float) -> float:
        """Seconds that they have waited, all together."""
        return self.waiting * now - self.arrived


class Rank(NamedTuple):
    """A want's place among others: the lower tier first; in a tier, the lower `base + slope · now`; then the older."""

    tier: tuple[int, ...]
    base: float
    slope: float = 0.0
    until: float = inf  # its tier or line is another from then on


class Holder(NamedTuple):
    """A model's pages and KV frames on the group in question."""

    model: str
    shards: Sequence[Sequence[int]]
    pages: int  # it holds pages [0, pages)
    kv: int
    used: float
    number: int  # order in which models came to the group
    pinned: bool = False
    history: History | None = None
    load: float = 0.0  # seconds to bring back all that it holds
    priority: int = 0
    is_wanted: bool = False  # something waits for it
    missing: float = 0.0  # the part of it that is not in
    is_copy: bool = False  # it is whole on another group too
    is_alone: bool = False  # it has no page in common with another model, nor one twice
    run: float = 0.0  # if it is busy: seconds that what runs there takes


class Tail(NamedTuple):
    """Pages `[keep, …)` of a model."""

    model: str
    keep: int


class Memory(NamedTuple):
    """One group's memory, and how much of it an incoming model lacks."""

    short: Sequence[int]  # frames lacking, for each rank; those that are becoming free are not counted yet
    incoming: Sequence[frozenset[int]]  # for each rank, the pages of the incoming model
    counts: Sequence[Mapping[int, int]]  # for each rank, how often each page is held
    leaving: Sequence[tuple[Holder, int]]  # page-outs under way, and what they keep


class Prefetch(NamedTuple):
    """Bring in the next extent of `model`, out of free frames and of what `victims` hold; or ask again later."""

    model: str | None
    victims: Sequence[Holder] = ()
    ask_at: float | None = None


class Room(NamedTuple):
    """What to take. `short` is what lacks even then, on the worst rank."""

    tails: tuple[Tail, ...]
    short: int
