"""A group of workers as the core knows it, and the groups of one mesh together."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from mypy_extensions import mypyc_attr

from scheduler.core.events import Mesh
from scheduler.core.ledger import Ledger
from scheduler.core.placement import EXTENTS_AHEAD, Placement
from scheduler.core.wanted import Wanted

if TYPE_CHECKING:
    from scheduler.core.model import Model


SLACK: Final = 16
"""Places of groups that may be out of date before they are swept, beside a few for each group."""


class Vain(NamedTuple):
    """A demand for which no room could be made: nothing to try again before something changes, or the time comes."""

    version: int
    queue: int
    ask_at: float
    is_nothing_left: bool  # for nobody, whatever went for it


@dataclass(slots=True)
class Group:
    """One that was lost is remembered: it is expected to come back."""

    name: str
    ranks: int
    ledger: Ledger
    pp: int = 1
    up: bool = True
    placements: dict[str, Placement] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=Wanted)  # models that wait for its memory or its batch
    busy: dict[str, Placement] = field(default_factory=dict)  # what has requests here, suspended ones among them
    pinned: dict[str, Model] = field(default_factory=dict)  # in the order in which they were pinned
    loading: dict[str, Placement] = field(default_factory=dict)  # what has reserved pages that were not asked for yet
    known: dict[str, None] = field(default_factory=dict)  # models that were paged out here, the latest last
    version: int = 0  # changes when pages or KV become free or idle
    in_vain: dict[str, Vain] = field(default_factory=dict)  # by model
    prefetch_at: float = 0.0  # when it may pay to bring something in ahead
    next_in: str = ""  # the model that room was made for, or pages asked for, last
    outstanding: int = 0  # extents asked for and not in
    extent_in_at: float = 0.0  # when the last one came in
    page_seconds: float | None = None  # measured: of the link, a page
    wake_at: float | None = None  # when it is to be looked at though nothing happens
    tick_at: float | None = None  # nothing is decided before (policies with a tick); None: nobody waits for it
    listed: tuple[int, int] | None = None  # its place among the groups of its shape
    mesh: Mesh = field(init=False)

    def __post_init__(self) -> None:
        self.mesh = self.ranks, self.pp

    def turn_to(self, model: str) -> None:
        """Its link is for this model now."""
        if self.next_in != model:
            self.wanted.touch(self.next_in)
            self.wanted.touch(model)
            self.next_in = model

    @property
    def is_reading(self) -> bool:
        """Whether the link has as much to read as it may be asked for."""
        return self.outstanding >= EXTENTS_AHEAD

    @property
    def extents_wanted(self) -> int:
        """With how many more it is."""
        return max(0, EXTENTS_AHEAD - self.outstanding)


class Sizes(NamedTuple):
    """What the groups of a shape can hold: frames of a rank."""

    largest: int
    largest_unpinned: int  # of groups on which nothing is pinned; 0 if there is none
    pinned: tuple[Group, ...]


@mypyc_attr(allow_interpreted_subclasses=True)
class Shape:
    """All groups of one mesh, whether they are up or expected back."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.stalled: dict[str, None] = {}  # models that wait for memory on a group that has none to give
        self.homeless: dict[str, None] = {}  # models that wait and fit on no group that is up, beside its pins
        self._sizes: Sizes | None = None
        self._heap: list[tuple[tuple[int, int], str]] = []  # the groups by how little they have to do and how much room
        self._changed: dict[str, None] = {}  # groups that are in another place than where the heap has them

    def rank(self, group: Group) -> None:
        """What the group has to do, or its free memory, may have changed."""
        self._changed[group.name] = None

    def freest(self, count: int) -> list[Group]:
        """The groups that have least to do, at most `count` of those that are up."""
        self._rank_changed()
        heap, entries = self._heap, list[tuple[tuple[int, int], str]]()
        found: list[Group] = []
        while heap and len(found) < count:
            entry = heappop(heap)
            if entries and entries[-1] == entry:
                continue  # it was at this place before, was elsewhere, and came back
            group = self.groups.get(entry[1])
            if group is not None and group.up and group.listed == entry[0]:
                entries.append(entry)
                found.append(group)
        for entry in entries:
            heappush(heap, entry)
        return found

    def _rank_changed(self) -> None:
        for name in self._changed:
            group = self.groups.get(name)
            if group is not None:
                place = len(group.wanted), -group.ledger.least_free
                if place != group.listed:
                    group.listed = place
                    heappush(self._heap, (place, name))
        self._changed = {}
        if len(self._heap) > 4 * len(self.groups) + SLACK:
            self._heap = [(group.listed, name) for name, group in self.groups.items() if group.listed is not None]
            heapify(self._heap)

    @property
    def sizes(self) -> Sizes:
        if self._sizes is None:
            groups = self.groups.values()
            self._sizes = Sizes(
                largest=max((group.ledger.capacity for group in groups), default=0),
                largest_unpinned=max((group.ledger.capacity for group in groups if not group.pinned), default=0),
                pinned=tuple(group for group in groups if group.pinned),
            )
        return self._sizes

    def changed(self) -> None:
        """A group came, went, or has other pins."""
        self._sizes = None
