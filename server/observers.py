"""Those who are told of everything the scheduler does, as one `scheduler.interface.Observer`."""

from __future__ import annotations

from scheduler.interface import LoadRecord
from server.events import Events
from server.metrics import Metrics


class Observers:
    """What is counted, and what is shown."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.events = Events()
        self._all = (self.metrics, self.events)

    def loaded(self, record: LoadRecord) -> None:
        for one in self._all:
            one.loaded(record)

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        for one in self._all:
            one.paged_out(model, pages, frames, seconds, reason, age)

    def suspended(self, model: str, kept_bytes: int, lost_tokens: int, seconds: float) -> None:
        for one in self._all:
            one.suspended(model, kept_bytes, lost_tokens, seconds)

    def request_started(self, model: str, waited: float, cold: bool) -> None:
        for one in self._all:
            one.request_started(model, waited, cold)

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        for one in self._all:
            one.request_ended(model, outcome, seconds)

    def worker_restarted(self, group: str) -> None:
        for one in self._all:
            one.worker_restarted(group)
