"""What a journal tells of the machine it was written on: enough to simulate the same requests, under any policy.

Service times are means, which keep totals right: of a page that came from below, of an alias, and of a forward pass,
told apart into what a pass takes and what each of its tokens adds, where requests differed enough to tell. What a
request took at least besides its passes is the way to the worker and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scheduler.core import actions, events
from scheduler.core.config import CoreConfig
from scheduler.core.events import ModelSpec
from scheduler.replay import Decided, JournalError, Note, configuration, replay
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.outcome import ModelOutcome, Outcome
from scheduler.simulate.workload import Workload, named

OBJECTIVE = 10.0
"""Seconds to answer in; a journal does not tell what was hoped for."""

TOGETHER = 0.01
"""Seconds within which the ends of one pass are heard of."""

QUICK = 5
"""Percentile of what requests took besides their passes that counts as the way there and back."""


@dataclass(frozen=True)
class Measured:
    config: CoreConfig
    groups: tuple[GroupSpec, ...]
    models: tuple[SimulatedModel, ...]
    workload: Workload
    outcome: Outcome  # as it was


def measure(path: Path) -> Measured:
    """From one file of a journal that begins with the daemon. Raises JournalError if it tells too little."""
    observations = _Observations()
    for line in replay(path):
        if isinstance(line, Decided) and not line.same:
            raise JournalError(f"{path} is of a gswapd that decided otherwise than this one; that one can go by it.")
        observations.take(line)
    return observations.conclude(configuration(path), path)


@dataclass
class _Request:
    model: str
    arrived: float
    kv_frames: int
    prompt: int = 1
    most_tokens: int = 1
    output: int = 1
    computing: float | None = None
    served: float | None = None
    finished: float | None = None


@dataclass
class _Observations:
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    groups: dict[str, events.WorkerUp] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)  # epoch of a page-in → when
    last_in: dict[str, float] = field(default_factory=dict)  # group → when its last page-in ended
    sources: dict[int, dict[str, int]] = field(default_factory=dict)  # epoch → pages
    reading: list[tuple[int, int, float]] = field(default_factory=list)  # aliases, other pages, seconds
    outcome: Outcome = field(default_factory=Outcome)

    def take(self, line: Decided | Note) -> None:
        if isinstance(line, Note):
            self._note(line)
            return
        event = line.event
        match event:
            case events.ModelAdded():
                self.specs[event.model.name] = event.model
            case events.WorkerUp():
                self.groups[event.group] = event
            case events.Arrived():
                request = self._request(event.request)
                request.model, request.arrived, request.kv_frames = event.model, event.at, event.kv_frames
            case events.Finished():
                self._request(event.request).finished = event.at
            case events.PagedIn():
                self._paged_in(event)
        for action in line.actions:
            if isinstance(action, actions.PageIn):
                self.asked[action.epoch] = event.at
            elif isinstance(action, actions.Serve):
                self._request(action.request).served = event.at

    def _note(self, note: Note) -> None:
        match note.word:
            case "asked":
                ident, prompt, most = note.fields
                request = self._request(ident)
                request.prompt, request.most_tokens = prompt, most
            case "answered":
                ident, tokens, computing = note.fields
                request = self._request(ident)
                request.output, request.computing = max(1, tokens), computing
            case "moved":
                self.sources[note.fields[2]] = note.fields[3]

    def _request(self, ident: str) -> _Request:
        return self.requests.setdefault(ident, _Request("", 0.0, 0))

    def _paged_in(self, event: events.PagedIn) -> None:
        """The link of a group brings one page-in after another."""
        began = max(self.asked.pop(event.epoch, event.at), self.last_in.get(event.group, 0.0))
        self.last_in[event.group] = event.at
        pages = self.sources.pop(event.epoch, {})
        aliases = pages.get("alias", 0)
        self.reading.append((aliases, sum(pages.values()) - aliases, event.at - began))

    # ----

    def conclude(self, config: CoreConfig, path: Path) -> Measured:
        ended = [r for r in self.requests.values() if r.finished is not None and r.computing is not None]
        if not ended or not self.groups or not {request.model for request in ended} <= self.specs.keys():
            raise JournalError(
                f"{path} does not begin with a daemon's start and go on to answered requests, so there is too little "
                "to go by."
            )
        alias, page = self._page_seconds()
        way = self._way(ended)
        groups = tuple(
            GroupSpec(
                up.group,
                up.frames,
                config.page_bytes,
                host_rate=config.page_bytes / max(1e-9, page - alias),
                ranks=up.ranks,
                pp=up.pp,
                page_seconds=alias,
                way_seconds=way,
            )
            for up in self.groups.values()
        )
        first = min(request.arrived for request in ended)
        models = tuple(
            _model(spec, [r for r in ended if r.model == name], ended, config) for name, spec in self.specs.items()
        )
        workload = named([(r.arrived, r.model, r.prompt, r.output) for r in ended])
        for name in self.specs:
            mine = [r for r in ended if r.model == name]
            latencies = [r.finished - r.arrived for r in mine if r.finished is not None]
            self.outcome.models[name] = ModelOutcome(OBJECTIVE, latencies)
        self.outcome.seconds = max(r.finished or 0.0 for r in ended) - first
        return Measured(config, groups, models, workload, self.outcome)

    def _page_seconds(self) -> tuple[float, float]:
        """Of an alias, and of a page that comes from below."""
        alone = [(aliases, seconds) for aliases, pages, seconds in self.reading if aliases and not pages]
        alias = sum(seconds for _, seconds in alone) / max(1, sum(aliases for aliases, _ in alone))
        mixed = [(pages, seconds - aliases * alias) for aliases, pages, seconds in self.reading if pages]
        page = sum(seconds for _, seconds in mixed) / max(1, sum(pages for pages, _ in mixed))
        return alias, max(page, alias)

    @staticmethod
    def _way(ended: Sequence[_Request]) -> float:
        besides = [
            r.finished - r.arrived - r.computing
            for r in ended
            if r.finished is not None and r.computing is not None and r.served == r.arrived
        ]
        return max(0.0, float(np.percentile(besides, QUICK))) if besides else 0.0


def _model(
    spec: ModelSpec, mine: Sequence[_Request], everyone: Sequence[_Request], config: CoreConfig
) -> SimulatedModel:
    """A model that nobody asked for costs what the others do."""
    pass_seconds, token_seconds = _service(mine or everyone)
    tokens = [(r.prompt + r.most_tokens) // r.kv_frames for r in mine if r.kv_frames]
    return SimulatedModel(
        spec, pass_seconds, token_seconds, kv_frame_tokens=max(tokens, default=0), max_batch=config.max_running
    )


def _service(requests: Sequence[_Request]) -> tuple[float, float]:
    """Seconds of a pass, and of each token in it."""
    passes, tokens, seconds = zip(*_work(requests), strict=True)
    work, computing = np.array([passes, tokens], np.float64).T, np.array(seconds)
    (by_pass, by_token), *_ = np.linalg.lstsq(work, computing, rcond=None)
    if by_pass <= 0 or by_token < 0:
        return float(computing.sum() / work[:, 0].sum()), 0.0
    return float(by_pass), float(by_token)


def _work(requests: Sequence[_Request]) -> list[tuple[int, int, float]]:
    """Passes, tokens in them, and seconds. Requests of one token that ended together after the same time shared it."""
    work: list[tuple[int, int, float]] = []
    last: _Request | None = None
    for request in sorted(requests, key=lambda request: request.finished or 0.0):
        seconds, tokens = request.computing or 0.0, request.prompt + request.output - 1
        if last is not None and request.output == last.output == 1 and _ended_together(last, request):
            work[-1] = (1, work[-1][1] + tokens, seconds)
        else:
            work.append((request.output, tokens, seconds))
        last = request
    return work


def _ended_together(one: _Request, other: _Request) -> bool:
    return one.computing == other.computing and abs((one.finished or 0.0) - (other.finished or 0.0)) < TOGETHER
