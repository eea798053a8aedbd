"""What policy decides on: frozen views of waiting work and of one group's memory, made by the core's planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Something that needs a model's pages: a waiting request, a load, or a pin whose model is not in."""

    number: int  # order of arrival
    since: float
    model: str
    kv_frames: int
    request: str | None = None  # None: the pages are wanted for themselves
    pin: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A group on which a model could run."""

    group: str
    held: int  # pages of the model that are in already
    free: int  # frames free on its fullest rank
    home: bool = False  # the model is pinned here
    target: bool = False  # room is being made for it here


@dataclass(frozen=True, slots=True)
class Holder:
    """A model's pages and KV frames on the group in question."""

    model: str
    shards: Sequence[Sequence[int]]
    pages: int  # it holds pages [0, pages)
    kv: int
    used: float
    number: int  # order in which models came to the group
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Tail:
    """Pages `[keep, …)` of a model."""

    model: str
    keep: int


@dataclass(frozen=True, slots=True)
class Memory:
    """One group's memory, and how much of it an incoming model lacks."""

    short: Sequence[int]  # frames lacking, for each rank; those that are becoming free are not counted yet
    incoming: Sequence[frozenset[int]]  # for each rank, the pages of the incoming model
    counts: Sequence[Mapping[int, int]]  # for each rank, how often each page is held
    leaving: Sequence[tuple[Holder, int]]  # page-outs under way, and what they keep
    idle: Sequence[Holder]  # may be taken
    busy: Sequence[Holder]  # may be taken once they are done


@dataclass(frozen=True, slots=True)
class Room:
    """What to take. `short` is what lacks even then, on the worst rank."""

    tails: tuple[Tail, ...]
    short: int
