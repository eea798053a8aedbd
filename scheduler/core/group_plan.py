"""What is to be done on one group now.

What is wanted there is considered in the order that policy gives. Requests join a model that is in, or coming for
good. For a model that is not, frames are taken (`frames.py`) and pages asked for, while the link has less than two
extents to read: the whole model at once, or extent by extent, each a decision of its own, until what remains takes no
longer than the first requests' run. Then the rest is reserved and the requests are served, for whom the last pages
arrive in time. A link that nobody waits for brings in ahead what may be wanted soon (`ahead.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from mypy_extensions import mypyc_attr

from scheduler.core.ahead import bring_ahead
from scheduler.core.fitting import can_hold
from scheduler.core.frames import Frames
from scheduler.core.group import Group
from scheduler.core.model import Model
from scheduler.core.placement import Activity, Placement
from scheduler.core.ranking import Demand
from scheduler.core.requests import Request
from scheduler.core.state import State
from scheduler.core.transitions import Phase
from scheduler.core.wants import refresh
from scheduler.policy.view import Want

ROUNDING: Final = 1e-6
"""Of a tick: what is so close to one is one."""

STALLED_LOOKED_AT: Final = 4
"""Models waiting elsewhere that an idle group offers itself to."""


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupPlan:
    """What it remembers is of the present pass only."""

    __slots__ = ("_frames", "_group", "_policy", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._policy = state.policy
        self._frames = Frames(state)

    def run(self, group: Group) -> None:
        state = self._state
        self._group = group
        self._frames.begin(group)
        if group.loading:
            for placement in list(group.loading.values()):
                state.issue_extents(group, placement)
        refresh(state, group)
        if not group.wanted:
            group.tick_at = None
            self._offer()
        elif self._policy.tick:
            self._consider_first(self._policy.tick)
        else:
            self._consider_all()
        if group.busy:
            self._frames.lend_kv()
        if group.outstanding == 0 and state.now >= group.prefetch_at and not self._frames.are_coming:
            bring_ahead(state, group, self._frames)
        state.shapes[group.mesh].rank(group)

    def _consider_all(self) -> None:
        group, state = self._group, self._state
        only = group.wanted.only
        if only is not None:
            group.wanted.untold.clear()
            waits_for_link = group.is_reading and not only.want.is_in and state.now < only.want.due
            order: Iterable[Demand] = () if waits_for_link else (only,)
        else:
            order = self._in_order()
        for demand in order:
            self._consider(demand.want)
        if self._frames.are_spoken_for:
            self._let_wait()

    def _consider_first(self, tick: float) -> None:
        """At a tick, and nobody else until the next. What frames were taken for goes on as soon as they are free."""
        group, now = self._group, self._state.now
        if group.tick_at is not None and group.tick_at <= now:
            first = group.wanted.only or next(self._in_order(), None)
            if first is not None:
                self._consider(first.want)
            group.tick_at = now if self._frames.are_coming else None
        if group.tick_at is None:
            group.tick_at = (math.floor(now / tick + ROUNDING) + 1) * tick
        if group.tick_at > now:
            self._state.wake_group(group, group.tick_at)

    def _in_order(self) -> Iterator[Demand]:
        """All that there is something to do for. Who waits for the link has its turn when an extent is in."""
        wanted, now = self._group.wanted, self._state.now
        inside = sorted(wanted.inside.values(), key=lambda demand: demand.key(now), reverse=True)
        for demand in wanted.coming.ordered(now):
            while inside and inside[-1].key(now) < demand.key(now):
                yield inside.pop()
            if self._frames.are_coming or self._frames.are_spoken_for:
                break
            if self._group.is_reading and now < demand.want.due:
                if self._policy.due_first:
                    break
                continue
            wanted.untold.pop(demand.want.model, None)
            yield demand
        yield from reversed(inside)

    def _let_wait(self) -> None:
        """Those who were not considered because no frame is left for them."""
        group, state = self._group, self._state
        for demand in group.wanted.untold.values():
            model = state.models[demand.want.model]
            if state.now < demand.want.due:
                lacking = state.lacking(group, model, group.placements.get(model.spec.name), model.pages)
                self._frames.wait(demand.want, lacking, state.now, True)
        group.wanted.untold.clear()
        change = group.wanted.next_change()
        if change is not None:
            state.wake_group(group, change)

    def _offer(self) -> None:
        """Nothing is wanted here: models that wait for memory on other groups may come."""
        stalled = self._state.shapes[self._group.mesh].stalled
        for name in list(stalled)[:STALLED_LOOKED_AT]:
            del stalled[name]
            self._state.models[name].is_offered = True
            self._state.touched_models[name] = None

    def _consider(self, want: Want) -> None:
        """Do what can be done for it."""
        group = self._group
        model, placement = self._state.models[want.model], group.placements.get(want.model)
        if placement is not None:
            if placement.leaving is not None:
                return  # its page-out has to end first
            if placement.is_committed:
                self._serve(want, model, placement)
                return
        if want.model not in self._frames.held_back:
            self._bring_in(want, model, placement)

    # ---- serving what is in

    def _serve(self, want: Want, model: Model, placement: Placement) -> None:
        """Let as many requests as can be join the batch, in order; a smaller one may go before one that has to wait."""
        if placement.is_suspended:
            self._resume(want, placement)
            return
        if self._policy.whole and (placement.phase is not Phase.RESIDENT or self._is_running()):
            return
        if placement.activity is Activity.SUSPENDING:
            return
        most, blocked = self._state.config.max_running, None
        for request in list(model.waiting):
            if len(placement.running) >= most or want.model in self._frames.held_back:
                break
            kv = request.kv_frames
            if blocked is not None and kv >= blocked:
                continue
            if self._group.pinned and not can_hold(self._group, model, kv):
                continue  # it has to run elsewhere
            if not self._serve_one(placement, request):
                self._frames.make_room(want, [max(0, kv - placement.kv.granted)] * self._group.ranks)
                blocked = kv

    def _is_running(self) -> bool:
        return any(not placement.is_suspended for placement in self._group.busy.values())

    def _serve_one(self, placement: Placement, request: Request) -> bool:
        kv = request.kv_frames
        lacking = kv - placement.kv.granted
        if lacking > 0:
            if not self._frames.has([lacking] * self._group.ranks, placement, kv):
                return False
            self._state.grant(placement, kv)
        self._state.serve(self._group, placement, request)
        return True

    def _resume(self, want: Want, placement: Placement) -> None:
        kv = placement.kv_suspended
        lacking = [max(0, kv - placement.kv.granted)] * self._group.ranks
        if self._frames.has(lacking, placement, kv):
            waited = self._state.now - placement.suspended_at
            model, message = self._state.models[want.model], "{} requests go on after {:.2f} s."
            self._state.explain(model, "resumed", message, len(placement.running), waited)
            self._state.resume(placement)
        else:
            self._frames.make_room(want, lacking)

    # ---- bringing a model in

    def _bring_in(self, want: Want, model: Model, placement: Placement | None) -> None:
        group, state = self._group, self._state
        is_due = state.now >= want.due
        reserved = placement.reserved if placement is not None else 0
        last = min(model.pages, reserved + group.extents_wanted * state.config.extent_pages)
        for_good = self._policy.keeps_to_it or is_due or last == model.pages or want.load <= want.run
        kv = 0
        if for_good:
            last, kv = model.pages, self._first_kv(model, placement)
            lacking = [pages + kv for pages in state.lacking(group, model, placement, last)]
        else:
            lacking = state.lacking(group, model, placement, last)
        if not self._frames.has(lacking, placement, kv):
            self._frames.make_room(want, lacking)
            return
        if group.next_in != want.model:
            group.turn_to(want.model)
            message = "{} wait; {:.2f} s of {}'s link bring it in."
            state.explain(model, "loading", message, want.queue, want.load, group.name)
        group.in_vain.pop(want.model, None)
        placement = state.placement(group, model)
        state.reserve(group, placement, last)
        state.issue_extents(group, placement)
        if for_good and (model.waiting or placement.is_suspended):
            self._serve(want, model, placement)

    def _first_kv(self, model: Model, placement: Placement | None) -> int:
        """KV frames of the first that is to run here."""
        if placement is not None and placement.is_suspended:
            return placement.kv_suspended
        if not self._group.pinned:
            return model.waiting[0].kv_frames if model.waiting else 0
        fitting = (r.kv_frames for r in model.waiting if can_hold(self._group, model, r.kv_frames))
        return next(fitting, 0)
