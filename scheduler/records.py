"""What moved, as people ask about it: the load of each model from first page to last, and every page-out.

A load begins with the first `PageIn` that the core asks for and ends with the model's last page, however many extents
that took. One that is broken off (nobody waits for it any more, or its group is lost) leaves no record: it neither
succeeded nor failed, and what goes on from its pages later is a load of the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.core import actions
from scheduler.interface import LoadRecord, Observer
from swapper.pager import SourceBytes
from worker.protocol import PagedIn, PagedOut, PageInFailed, PageOutFailed

logger = logging.getLogger(__name__)

Where = tuple[str, str]  # group, model


@dataclass(slots=True)
class _Load:
    at: float  # wall clock
    began: float
    total: int
    outstanding: set[int] = field(default_factory=set)  # epochs
    pages: int = 0
    sources: dict[str, SourceBytes] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)

    def add(self, report: PagedIn) -> None:
        self.outstanding.discard(report.epoch)
        self.pages += report.last - report.first
        for source, moved in report.sources.items():
            before = self.sources.get(source, SourceBytes(0, 0))
            self.sources[source] = SourceBytes(before.pages + moved.pages, before.nbytes + moved.nbytes)
        for stage, seconds in report.stages.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds


@dataclass(slots=True)
class _Drain:
    """A time in which page-outs were under way on a group."""

    began: float
    ended: float | None = None  # None: they are

    def within(self, since: float, now: float) -> float:
        return max(0.0, (now if self.ended is None else self.ended) - max(since, self.began))


class Records:
    """Follows page commands and their reports. Every mapping holds one entry a model and group at most."""

    def __init__(self, observer: Observer, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.last_load: dict[str, LoadRecord] = {}
        self._observer = observer
        self._clock = clock
        self._wall = wall
        self._loads: dict[Where, _Load] = {}
        self._page_outs: dict[Where, tuple[int, str]] = {}  # epoch, reason
        self._drains: dict[str, _Drain] = {}  # by group, the last
        self._resident: dict[Where, int] = {}
        self._used: dict[str, float] = {}  # the last finish, or the first page

    # ---- what the core asks for

    def page_in_asked(self, action: actions.PageIn, total: int, wanted_since: float | None = None) -> None:
        """`wanted_since`: when the oldest came who waits for this model, if anybody does."""
        where = action.group, action.model
        if where not in self._loads:
            now = self._clock()
            self._loads[where] = load = _Load(self._wall(), now, total)
            if wanted_since is not None:
                drain = self._drains.get(action.group, _Drain(now, now)).within(wanted_since, now)
                load.stages = {"queue": now - wanted_since - drain, "drain": drain}
        self._loads[where].outstanding.add(action.epoch)

    def page_out_asked(self, action: actions.PageOut, reason: str) -> None:
        if not any(group == action.group for group, _ in self._page_outs):
            self._drains[action.group] = _Drain(self._clock())
        self._page_outs[action.group, action.model] = action.epoch, reason

    # ---- what the workers report

    def paged_in(self, group: str, report: PagedIn) -> None:
        where = group, report.model
        self._resident[where] = report.last
        self._used.setdefault(report.model, self._clock())
        load = self._loads.get(where)
        if load is None or report.epoch not in load.outstanding:
            return
        load.add(report)
        if report.last == load.total:
            self._close(where, None)

    def extent_decided(self, group: str, model: str) -> None:
        """The core has taken note of a page-in. If it asked for nothing more, the load is broken off."""
        load = self._loads.get((group, model))
        if load is not None and not load.outstanding:
            del self._loads[group, model]

    def page_in_failed(self, group: str, report: PageInFailed) -> None:
        where = group, report.model
        self._resident.pop(where, None)
        load = self._loads.get(where)
        if load is not None and report.epoch in load.outstanding:
            logger.error("Model %s could not be loaded on group %s: %s", report.model, group, report.message)
            self._close(where, report.message)

    def paged_out(self, group: str, report: PagedOut) -> None:
        where = group, report.model
        resident = self._resident.get(where, report.keep)
        self._resident[where] = min(resident, report.keep)
        epoch, reason = self._page_out_ended(where)
        if epoch != report.epoch:
            return
        pages = max(0, resident - report.keep)
        self._observer.paged_out(report.model, pages, report.frames, report.seconds, reason, self.idle(report.model))

    def page_out_failed(self, group: str, report: PageOutFailed) -> None:
        self._page_out_ended((group, report.model))

    def _page_out_ended(self, where: Where) -> tuple[int | None, str]:
        ended = self._page_outs.pop(where, (None, ""))
        if where[0] in self._drains and not any(group == where[0] for group, _ in self._page_outs):
            self._drains[where[0]].ended = self._clock()
        return ended

    def is_whole(self, model: str, pages: int) -> bool:
        """Whether all its pages are in, on some group."""
        return any(name == model and resident >= pages for (_, name), resident in self._resident.items())

    def group_lost(self, group: str) -> None:
        self._drains.pop(group, None)
        for by_place in (self._loads, self._page_outs, self._resident):
            for where in [where for where in by_place if where[0] == group]:
                del by_place[where]

    def finished(self, model: str) -> None:
        """A request of this model has ended."""
        self._used[model] = self._clock()

    def idle(self, model: str) -> float:
        """Seconds since it was used last; 0 before it ever was."""
        return self._clock() - self._used.get(model, self._clock())

    def forget(self, model: str) -> None:
        self.last_load.pop(model, None)
        self._used.pop(model, None)
        for by_place in (self._loads, self._page_outs, self._resident):
            for where in [where for where in by_place if where[1] == model]:
                del by_place[where]

    def _close(self, where: Where, error: str | None) -> None:
        group, model = where
        load = self._loads.pop(where)
        seconds = self._clock() - load.began
        record = LoadRecord(model, group, load.at, seconds, load.pages, load.sources, load.stages, error)
        self.last_load[model] = record
        self._observer.loaded(record)
