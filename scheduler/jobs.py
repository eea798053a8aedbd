"""What administrators asked for and wait for: load, evict, pin and unpin, until the core has its last word on each."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Literal

from swapper.errors import Refused

JobKind = Literal["load", "evict", "pin", "unpin"]


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    kind: JobKind
    model: str
    at: float
    done: asyncio.Future[None]


class Jobs:
    """Open jobs by id. A job whose asker went away goes on; its result is then for nobody."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, Job] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        return len(self._open) >= self._limit

    def open(self, kind: JobKind, model: str, at: float) -> Job:
        job = Job(f"job/{next(self._numbers)}", kind, model, at, asyncio.get_running_loop().create_future())
        self._open[job.id] = job
        return job

    def is_evicting(self, model: str) -> bool:
        """Whether somebody asked for this model's eviction and waits for it."""
        return any(job.kind == "evict" and job.model == model for job in self._open.values())

    def load_wanted_since(self, model: str) -> float | None:
        """When the oldest open job was opened that brings this model in."""
        return next((job.at for job in self._open.values() if job.model == model and job.kind in ("load", "pin")), None)

    def resolve(self, id: str) -> None:
        """The core's last word on a job; nothing if it has ended here before, as at the end of a drain."""
        job = self._open.pop(id, None)
        if job is not None and not job.done.done():  # done: cancelled, when the asker went away
            job.done.set_result(None)

    def refuse(self, id: str, refusal: Refused) -> None:
        """Likewise."""
        job = self._open.pop(id, None)
        if job is not None and not job.done.done():
            job.done.set_exception(refusal)

    def refuse_all(self, refusal: Refused) -> None:
        for id in list(self._open):
            self.refuse(id, Refused(refusal.reason, str(refusal), refusal.retry_after))
