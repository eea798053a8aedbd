"""What request handlers work with, gathered in one place: `request.app.state.service`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest

from engine.request import Request
from scheduler.interface import Answer, Scheduler
from server.adds import Adds
from server.background import Background
from server.catalog import Catalog
from server.config import Config
from server.events import Events
from server.metrics import Metrics
from server.openai.body import Bodies
from server.tokens import Tokenizers

if TYPE_CHECKING:
    from server.tracing import Tracing


@dataclass(slots=True)
class Service:
    config: Config
    scheduler: Scheduler
    catalog: Catalog
    tokenizers: Tokenizers
    metrics: Metrics
    events: Events = field(default_factory=Events)
    tracing: Tracing | None = None
    background: Background = field(default_factory=Background)
    adds: Adds = field(init=False)
    load: Callable[[], Config] | None = None  # reads the configuration again
    bodies: Bodies = field(default_factory=Bodies)
    draining: bool = False

    def __post_init__(self) -> None:
        self.adds = Adds(self.config.store, self.catalog.refresh)

    def submit(self, request: Request, timeout: float | None, keep_alive: float | None) -> Answer:
        """`timeout` is the request's own, in seconds; it may be shorter than the server's. So is `keep_alive`: how long
        its model stays when nothing is asked of it any more.
        """
        longest = self.config.timeouts.request
        answer = self.scheduler.submit(request, longest if timeout is None else min(timeout, longest))
        self.catalog.keep_alive(request.model, keep_alive)  # not before: a model that is to stay no longer would go
        return answer if self.tracing is None else self.tracing.follow(answer, request)

    def begin_draining(self) -> None:
        self.draining = True
        self.bodies.drain()


def service_of(request: HttpRequest) -> Service:
    service: Service = request.app.state.service
    return service
