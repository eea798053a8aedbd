"""The states of a model on a group, and every way from one to another, as a table.

An event or action that the table does not list raises InvalidTransition and changes nothing. The diagram in
`docs/scheduler.md` is generated from the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """What a model is on one group. The values are the words that users read."""

    ABSENT = "absent"  # it holds no page
    LOADING = "loading"  # a page-in is under way
    PARTIAL = "partial"  # pages [0, k) are in, k < all
    RESIDENT = "resident"  # all pages are in
    EVICTING = "evicting"  # a page-out is under way
    FAILED = "failed"  # absent, because its page-in failed

    __hash__ = str.__hash__  # that of Enum is not built in, and takes longer than the lookup it is for


class Signal(StrEnum):
    """What moves it. Actions in the imperative, completions in the past tense."""

    PAGE_IN = "PageIn"
    EXTENT_IN = "PagedIn, more to come"
    STOPPED = "PagedIn, no more wanted"
    ALL_IN = "PagedIn, last page"
    IN_FAILED = "PageInFailed"
    PAGE_OUT = "PageOut"
    TAIL_OUT = "PagedOut, some kept"
    ALL_OUT = "PagedOut, none kept"
    OUT_FAILED_WHOLE = "PageOutFailed, all in"
    OUT_FAILED_PART = "PageOutFailed, some in"
    LOST = "WorkerLost"

    __hash__ = str.__hash__


TRANSITIONS: Final[dict[tuple[Phase, Signal], Phase]] = {
    (Phase.ABSENT, Signal.PAGE_IN): Phase.LOADING,
    (Phase.FAILED, Signal.PAGE_IN): Phase.LOADING,
    (Phase.PARTIAL, Signal.PAGE_IN): Phase.LOADING,
    (Phase.LOADING, Signal.PAGE_IN): Phase.LOADING,
    (Phase.LOADING, Signal.EXTENT_IN): Phase.LOADING,
    (Phase.LOADING, Signal.STOPPED): Phase.PARTIAL,
    (Phase.LOADING, Signal.ALL_IN): Phase.RESIDENT,
    (Phase.LOADING, Signal.IN_FAILED): Phase.FAILED,
    (Phase.PARTIAL, Signal.PAGE_OUT): Phase.EVICTING,
    (Phase.RESIDENT, Signal.PAGE_OUT): Phase.EVICTING,
    (Phase.EVICTING, Signal.TAIL_OUT): Phase.PARTIAL,
    (Phase.EVICTING, Signal.ALL_OUT): Phase.ABSENT,
    (Phase.EVICTING, Signal.OUT_FAILED_WHOLE): Phase.RESIDENT,
    (Phase.EVICTING, Signal.OUT_FAILED_PART): Phase.PARTIAL,
    **{(phase, Signal.LOST): Phase.ABSENT for phase in Phase},
}


class InvalidTransition(Exception):
    """Something happened that cannot happen: a defect here or below. Nothing was changed.

    `story` holds the last events, oldest first, ending with the one that could not be.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.story: tuple[object, ...] = ()

    def attach(self, events: Iterable[object]) -> None:
        self.story = tuple(events)

    def __str__(self) -> str:
        lines = [super().__str__(), *(f"  {event}" for event in self.story)]
        return "\n".join(lines)


def impossible(phase: Phase, signal: Signal, what: str) -> InvalidTransition:
    """For a way that the table does not have."""
    return InvalidTransition(f"{what} is {phase}: {signal!s} cannot happen to it")


def diagram() -> str:
    """The table as a Mermaid state diagram; WorkerLost, which leads from anywhere to absent, is left out."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.ABSENT}"]
    lines += [
        f"    {before} --> {after}: {signal}"
        for (before, signal), after in TRANSITIONS.items()
        if signal is not Signal.LOST
    ]
    return "\n".join(lines) + "\n"
