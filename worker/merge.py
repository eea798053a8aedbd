"""Reports of a group's ranks become reports of the group.

The leader (rank 0) alone speaks of requests. What every rank is told to do, every rank answers; the group's answer is
given when the last rank's is there. A page-in that fails on one rank fails on all: those on which it did not, or not
yet, are told to undo it, and answer once more. Ranks that disagree in any other way have no common state any more: the
group must be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from engine.request import KvReleased, Resumed, Suspended
from swapper.errors import WorkerError
from swapper.pager import SourceBytes
from worker.protocol import FailPageIn, PagedIn, PagedOut, PageInFailed, PageOutFailed, Report

Answer = PagedIn | PageInFailed | PagedOut | PageOutFailed | KvReleased | Suspended | Resumed
Key = TypeVar("Key")


class ReportMerger:
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._waiting: dict[tuple[str, int], dict[int, Answer]] = {}  # (model, epoch) → rank → its latest answer

    def merge(self, rank: int, reports: Iterable[Report]) -> tuple[Sequence[Report], Sequence[FailPageIn]]:
        """The group's reports that this rank's complete, and what is to be told to all other ranks.

        Raises WorkerError when ranks disagree.
        """
        merged: list[Report] = []
        undo: list[FailPageIn] = []
        for report in reports:
            if not isinstance(report, Answer):
                merged.append(report)
                continue
            if isinstance(report, PageInFailed) and not self._has_failed(report):
                undo.append(FailPageIn(report.model, report.epoch, report.message))
            if (whole := self._collect(rank, report)) is not None:
                merged.append(whole)
        return merged, undo if self._ranks > 1 else ()

    def _has_failed(self, answer: PageInFailed) -> bool:
        others = self._waiting.get((answer.model, answer.epoch), {})
        return any(isinstance(other, PageInFailed) for other in others.values())

    def _collect(self, rank: int, answer: Answer) -> Answer | None:
        key = (answer.model, answer.epoch)
        answers = self._waiting.setdefault(key, {})
        answers[rank] = answer
        if len(answers) < self._ranks or {type(its) for its in answers.values()} == {PagedIn, PageInFailed}:
            return None
        del self._waiting[key]
        return answer if self._ranks == 1 else _combine([answers[rank] for rank in sorted(answers)])


def _combine(answers: Sequence[Answer]) -> Answer:
    kinds = {type(answer) for answer in answers}
    if len(kinds) > 1:
        words = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise WorkerError(f"its ranks disagree about {answers[0].model!r} ({words})")
    first = answers[0]
    if isinstance(first, PagedIn):
        pages_in = [answer for answer in answers if isinstance(answer, PagedIn)]
        return PagedIn(
            model=first.model,
            first=first.first,
            last=first.last,
            epoch=first.epoch,
            seconds=max(answer.seconds for answer in pages_in),
            sources=_add_sources(answer.sources for answer in pages_in),
            stages=_add(answer.stages for answer in pages_in),
        )
    if isinstance(first, PagedOut):
        pages_out = [answer for answer in answers if isinstance(answer, PagedOut)]
        return PagedOut(
            model=first.model,
            keep=first.keep,
            epoch=first.epoch,
            frames=min(answer.frames for answer in pages_out),
            seconds=max(answer.seconds for answer in pages_out),
        )
    if isinstance(first, Suspended):
        suspended = [answer for answer in answers if isinstance(answer, Suspended)]
        return Suspended(
            model=first.model,
            kv_frames=max(answer.kv_frames for answer in suspended),
            epoch=first.epoch,
            kept_bytes=sum(answer.kept_bytes for answer in suspended),
            lost_tokens=max(answer.lost_tokens for answer in suspended),
            seconds=max(answer.seconds for answer in suspended),
        )
    return first


def _add(amounts: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    total: dict[Key, float] = {}
    for amount in amounts:
        for key, value in amount.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _add_sources(sources: Iterable[Mapping[str, SourceBytes]]) -> dict[str, SourceBytes]:
    total: dict[str, SourceBytes] = {}
    for source in sources:
        for name, moved in source.items():
            before = total.get(name, SourceBytes(0, 0))
            total[name] = SourceBytes(before.pages + moved.pages, before.nbytes + moved.nbytes)
    return total
