"""The scheduler's pure core: `SchedulerCore.step(event) -> list[Action]`.

Deterministic and synchronous: no clock (events carry the time), no I/O, no randomness; the same events give the same
actions. A step checks the event against what can be, lets it change the state (`admission.py`, `completions.py`),
and then plans what is to be done (`planner.py`). Failures below are events; only a defect raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final, Literal

from mypy_extensions import mypyc_attr

from scheduler.core import admission, completions, events
from scheduler.core.actions import Action
from scheduler.core.config import CoreConfig, PolicyName
from scheduler.core.fitting import kv_room
from scheduler.core.model import Model
from scheduler.core.placement import Placement
from scheduler.core.planner import Planner
from scheduler.core.state import State
from scheduler.core.transitions import InvalidTransition, Phase
from scheduler.core.view import Decision, GroupView, KvRoom, ModelView, PlacementView
from scheduler.policy.base import Policy
from scheduler.policy.computron import Computron
from scheduler.policy.gswapd import Gswapd
from scheduler.policy.lru import Lru

__all__ = ["CoreConfig", "InvalidTransition", "SchedulerCore"]

POLICIES: Mapping[PolicyName, type[Policy]] = {"gswapd": Gswapd, "lru": Lru, "computron": Computron}

HISTORY: Final = 32
"""Events that an InvalidTransition tells of."""


def _drain_began(state: State, event: events.DrainBegan) -> None:
    state.draining = True


def _woken(state: State, event: events.Tick) -> None:
    """The planner, which runs after every event, does what there is to do, and asks for the next Tick. Not before this
    one has come: until then, its driver takes no wish for a later one."""
    if state.wake_at <= state.now:
        state.wake_at = inf


_HANDLERS: Final[dict[type[events.Event], Callable[[State, Any], None]]] = {
    events.Arrived: admission.arrived,
    events.Cancelled: admission.cancelled,
    events.LoadWanted: admission.load_wanted,
    events.EvictWanted: admission.evict_wanted,
    events.Pinned: admission.pinned,
    events.Unpinned: admission.unpinned,
    events.ModelAdded: admission.model_added,
    events.ModelChanged: admission.model_changed,
    events.ModelRemoved: admission.model_removed,
    events.PagedIn: completions.paged_in,
    events.PageInFailed: completions.page_in_failed,
    events.PagedOut: completions.paged_out,
    events.PageOutFailed: completions.page_out_failed,
    events.KvWanted: completions.kv_wanted,
    events.KvReleased: completions.kv_released,
    events.Finished: completions.finished,
    events.WorkerUp: completions.worker_up,
    events.WorkerLost: completions.worker_lost,
    events.DrainBegan: _drain_began,
    events.Started: completions.started,
    events.Suspended: completions.suspended,
    events.Resumed: completions.resumed,
    events.Tick: _woken,
}


@mypyc_attr(allow_interpreted_subclasses=True)
class SchedulerCore:
    """Owned by one driver, which alone calls `step`. Everything else here only looks."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._state = State(config, POLICIES[config.policy]())
        self._planner = Planner(self._state)
        self._history: deque[events.Event] = deque(maxlen=HISTORY)

    def step(self, event: events.Event) -> list[Action]:
        """Take in one event; returns what to do, in order.

        Raises InvalidTransition, with the last events attached, if the event cannot have happened.
        """
        self._history.append(event)
        state = self._state
        try:
            kind = type(event)
            check = _CHECKS.get(kind)
            if check is not None:
                check(state, event)
            if event.at > state.now:
                state.now = event.at
            _HANDLERS[kind](state, event)
            self._planner.plan()
        except InvalidTransition as error:
            error.attach(self._history)
            raise
        finally:
            actions, state.actions = state.actions, []
        return actions

    # ---- looking

    def models(self) -> tuple[ModelView, ...]:
        """All models that are known, those that are being removed among them."""
        return tuple(self._model_view(model) for model in self._state.models.values())

    def model(self, name: str) -> ModelView | None:
        """None once a model is gone: never added, or removed with all its pages out."""
        model = self._state.models.get(name)
        return self._model_view(model) if model is not None else None

    def groups(self) -> tuple[GroupView, ...]:
        return tuple(
            GroupView(group.name, group.ranks, group.up, group.ledger.capacity, group.ledger.least_free)
            for group in self._state.groups.values()
        )

    def request(self, request: str) -> Literal["waiting", "running"] | None:
        """None once it has had its last word."""
        known = self._state.requests.get(request)
        if known is None:
            return None
        return "waiting" if known.group is None else "running"

    def kv_room(self, model: str) -> KvRoom | None:
        """The most KV frames that one request of a model can have; None while that cannot be told."""
        known = self._state.models.get(model)
        return None if known is None else kv_room(self._state, known)

    def decisions(self, model: str) -> tuple[Decision, ...]:
        """The last decisions about a model, oldest first; empty when it is not known."""
        known = self._state.models.get(model)
        return known.decisions() if known is not None else ()

    @property
    def unfinished(self) -> int:
        """Requests and jobs that have not had their last word."""
        return len(self._state.requests) + len(self._state.jobs)

    def _model_view(self, model: Model) -> ModelView:
        name = model.spec.name
        placements = list(model.placements.values())
        main = max(placements, key=_prominence, default=None)
        stuck = next((placement for placement in placements if placement.is_stuck), None)
        return ModelView(
            name=name,
            pages=model.pages,
            group=main.group if main is not None and main.phase is not Phase.ABSENT else None,
            phase=main.phase if main is not None else Phase.ABSENT,
            resident=main.resident if main is not None else 0,
            kv_frames=main.kv.reserved if main is not None else 0,
            pinned=model.pinned is not None,
            home=model.home,
            waiting=len(model.waiting),
            running=sum(len(placement.running) for placement in placements),
            last_finish=model.last_finish,
            failure=model.failure or (stuck.out_message if stuck is not None else None),
            retry_at=_retry_at(model),
            placements=tuple(_placement_view(placement) for placement in placements),
        )


def _check_request(state: State, event: events.Arrived) -> None:
    _check_new(state, event.request)


def _check_job(state: State, event: events.LoadWanted | events.EvictWanted) -> None:
    _check_new(state, event.job)


def _check_new(state: State, ident: str) -> None:
    if ident in state.requests or ident in state.jobs:
        raise InvalidTransition(f"{ident} names a request or job that has not ended yet")


def _check_added(state: State, event: events.ModelAdded) -> None:
    if event.model.name in state.models:
        raise InvalidTransition(f"model {event.model.name} is known already; it has to be gone before it is added")


def _check_kv_released(state: State, event: events.KvReleased) -> None:
    placement = completions.find(state, event.group, event.model)
    if placement is not None and placement.kv.awaits(event.epoch) and event.frames > placement.kv.reserved:
        raise InvalidTransition(
            f"{event.model} may hold {placement.kv.reserved} KV frames on {event.group}, not {event.frames}"
        )


def _check_paged_out(state: State, event: events.PagedOut) -> None:
    placement = completions.find(state, event.group, event.model)
    leaving = placement.leaving if placement is not None else None
    if leaving is not None and leaving.epoch == event.epoch and leaving.keep != event.keep:
        raise InvalidTransition(f"{leaving.keep} pages were to be kept, not {event.keep}")


def _check_paged_in(state: State, event: events.PagedIn) -> None:
    placement = completions.find(state, event.group, event.model)
    if placement is None or not placement.extents:
        return
    first = placement.extents[0]
    if (first.epoch != event.epoch or first.last != event.last) and placement.awaits(event.epoch):
        raise InvalidTransition(f"extents come in order: the next ends at page {first.last}, epoch {first.epoch}")


_CHECKS: Final[dict[type[events.Event], Callable[[State, Any], None]]] = {
    events.Arrived: _check_request,
    events.LoadWanted: _check_job,
    events.EvictWanted: _check_job,
    events.ModelAdded: _check_added,
    events.PagedIn: _check_paged_in,
    events.KvReleased: _check_kv_released,
    events.PagedOut: _check_paged_out,
}
"""What neither a client, nor a worker, nor a race between them can cause raises InvalidTransition here."""


def _prominence(placement: Placement) -> tuple[bool, int, bool]:
    return placement.is_busy, placement.resident, placement.phase is Phase.FAILED


def _retry_at(model: Model) -> float | None:
    return model.retry_at if model.failure is not None else None


def _placement_view(placement: Placement) -> PlacementView:
    return PlacementView(
        group=placement.group,
        phase=placement.phase,
        resident=placement.resident,
        reserved=placement.reserved,
        kv_frames=placement.kv.reserved,
        running=len(placement.running),
    )
