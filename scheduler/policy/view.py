"""What policy decides on: frozen views of what is wanted on a group and of who holds its memory.

Several of them are made in each decision, thousands a second. Those are plain classes, because the constructor of a
named tuple or of a dataclass takes longer than all else about them, above all in a compiled build. Nobody writes to
one that policy has been shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from scheduler.policy.history import History


@mypyc_attr(allow_interpreted_subclasses=True)
class Want:
    """A model that is wanted on a group: for waiting requests, a load, a pin, or to go on where it was suspended.

    Nothing in it changes with time alone. `rivals` is filled in when room is made for it.
    """

    __slots__ = (
        "arrived",
        "best_by",
        "due",
        "is_in",
        "is_next",
        "load",
        "model",
        "number",
        "priority",
        "queue",
        "rivals",
        "run",
        "since",
        "waiting",
    )

    def __init__(
        self,
        model: str,
        number: int,
        since: float,
        due: float,
        queue: int,
        waiting: int,
        arrived: float,
        load: float,
        run: float,
        priority: int = 0,
        best_by: float | None = None,
        is_next: bool = False,
        is_in: bool = False,
    ) -> None:
        self.model = model
        self.number = number  # the order of arrival of the oldest that waits
        self.since = since  # when that came
        self.due = due  # from then on it goes before everything that is not overdue
        self.queue = queue  # how many wait, at least 1 and at most a batch
        self.waiting = waiting  # how many wait
        self.arrived = arrived  # the times at which those came, added up
        self.load = load  # seconds of the link until all its pages are in
        self.run = run  # seconds that a batch of it takes
        self.priority = priority
        self.best_by = best_by  # brought in later, its objective cannot be met any more; None: it has none
        self.is_next = is_next  # the link's last extent or page-out was for it
        self.is_in = is_in  # all its pages are in or on their way for good: only KV may lack
        self.rivals = 0  # how many other models wait for the link

    def waited(self, now: float) -> float:
        """Seconds that they have waited, all together."""
        return self.waiting * now - self.arrived


@mypyc_attr(allow_interpreted_subclasses=True)
class Rank:
    """A want's place among others: the lower tier first; in a tier, the lower `base + slope · now`; then the older."""

    __slots__ = ("base", "slope", "tier", "until")

    def __init__(self, tier: tuple[int, ...], base: float, slope: float = 0.0, until: float = inf) -> None:
        self.tier = tier
        self.base = base
        self.slope = slope
        self.until = until  # its tier or line is another from then on


class Holder:
    """A model's pages and KV frames on the group in question."""

    __slots__ = (
        "history",
        "is_alone",
        "is_copy",
        "is_wanted",
        "kv",
        "load",
        "missing",
        "model",
        "number",
        "pages",
        "pinned",
        "priority",
        "run",
        "shards",
        "used",
    )

    def __init__(
        self,
        model: str,
        shards: Sequence[Sequence[int]],
        pages: int,
        kv: int,
        used: float,
        number: int,
        pinned: bool = False,
        history: History | None = None,
        load: float = 0.0,
        priority: int = 0,
        is_wanted: bool = False,
        missing: float = 0.0,
        is_copy: bool = False,
        is_alone: bool = False,
        run: float = 0.0,
    ) -> None:
        self.model = model
        self.shards = shards
        self.pages = pages  # it holds pages [0, pages)
        self.kv = kv
        self.used = used
        self.number = number  # order in which models came to the group
        self.pinned = pinned
        self.history = history
        self.load = load  # seconds to bring back all that it holds
        self.priority = priority
        self.is_wanted = is_wanted  # something waits for it
        self.missing = missing  # the part of it that is not in
        self.is_copy = is_copy  # it is whole on another group too
        self.is_alone = is_alone  # it has no page in common with another model, nor one twice
        self.run = run  # if it is busy: seconds that what runs there takes


class Memory:
    """One group's memory, and how much of it an incoming model lacks."""

    __slots__ = ("counts", "incoming", "leaving", "short")

    def __init__(
        self,
        short: Sequence[int],
        incoming: Sequence[frozenset[int]],
        counts: Sequence[Mapping[int, int]],
        leaving: Sequence[tuple[Holder, int]],
    ) -> None:
        self.short = short  # frames lacking, for each rank; those that are becoming free are not counted yet
        self.incoming = incoming  # for each rank, the pages of the incoming model
        self.counts = counts  # for each rank, how often each page is held
        self.leaving = leaving  # page-outs under way, and what they keep


class Prefetch(NamedTuple):
    """Bring in the next extent of `model`, out of free frames and of what `victims` hold; or ask again later."""

    model: str | None
    victims: Sequence[Holder] = ()
    ask_at: float | None = None


Tail = tuple[str, int]
"""A model, and how many of its pages it keeps: those behind go."""

Room = tuple[list[Tail], int]
"""What to take, and how many frames lack even then, on the worst rank."""
