"""What is to be done now: run once at the end of every step, on what the event touched.

Models first: what they wait for and where (`sites.py`), jobs that are done, pages that are to go. Then the groups on
which something may have become possible (`group_plan.py`). What nothing touched is not looked at."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from scheduler.core.actions import Done, WakeAt
from scheduler.core.group import Group
from scheduler.core.group_plan import GroupPlan
from scheduler.core.model import Model
from scheduler.core.placement import PAGE_OUT_TRIES, Placement
from scheduler.core.sites import aim
from scheduler.core.state import State
from scheduler.core.timers import Timer
from scheduler.core.transitions import Phase


@mypyc_attr(allow_interpreted_subclasses=True)
class Planner:
    def __init__(self, state: State) -> None:
        self._state = state
        self._group_plan = GroupPlan(state)

    def plan(self) -> None:
        state = self._state
        if state.timers.earliest <= state.now:
            for timer in state.timers.due(state.now):
                self._wake(timer)
        models, groups = state.touched_models, state.touched_groups
        while models or groups:
            if models:
                name = next(iter(models))
                del models[name]
                model = state.models.get(name)
                if model is not None:
                    self._settle(model)
            else:
                group = state.groups[next(iter(groups))]
                del groups[group.name]
                if group.up:
                    self._group_plan.run(group)
        self._ask_to_wake()

    def _wake(self, timer: Timer) -> None:
        state, (_, _, kind, name) = self._state, timer
        match kind:
            case "deadline":
                request = state.requests[name]
                seconds = state.now - request.arrived
                message = f"The request waited {seconds:.1f} s for model {request.model} and its time ran out."
                state.fail(request, "timeout", message)
            case "group":
                state.groups[name].wake_at = None
                state.touched_groups[name] = None
            case "look":
                state.touched_models[name] = None
            case _:
                state.models[name].wake_at = None
                state.touched_models[name] = None

    def _ask_to_wake(self) -> None:
        state = self._state
        if state.wake_at <= state.timers.earliest:
            return
        wake = state.timers.next()
        if wake is not None and wake < state.wake_at:
            state.wake_at = wake
            state.actions.append(WakeAt(wake))

    # ---- a model

    def _settle(self, model: Model) -> None:
        """See what the model wants, and where."""
        if model.jobs:
            self._finish_jobs(model)
        if model.removed and self._is_gone(model):
            self._delete(model)
            return
        if model.is_leaving:
            self._set_targets(model, {})
            self._state.shape(model).homeless.pop(model.spec.name, None)
            self._leave(model)
            return
        targets = self._targets(model)
        homeless = self._state.shape(model).homeless
        if not targets and (model.waiting or model.loads()):
            homeless[model.spec.name] = None  # looked at again when pins change or a group comes up
        else:
            homeless.pop(model.spec.name, None)
        if targets or model.targets:
            self._set_targets(model, targets)
        for placement in list(model.placements.values()):
            unwanted = placement.reserved > placement.issued and not placement.running
            if unwanted and placement.group not in model.targets:
                self._state.revoke(self._state.groups[placement.group], placement)
            if not targets:
                self._state.drop_empty(placement)
        if model.spec.ttl is not None and not targets:
            self._leave_if_idle(model, model.spec.ttl)

    def _targets(self, model: Model) -> dict[str, None]:
        state = self._state
        if state.now < model.retry_at:
            return {}
        targets: dict[str, None] = {}
        if model.waiting or (model.jobs and model.loads()):
            targets = aim(state, model)
        if model.home is not None and self._must_come_home(model):
            targets[model.home] = None
        for placement in model.placements.values():
            if placement.is_suspended:
                targets[placement.group] = None
        return targets

    def _set_targets(self, model: Model, targets: dict[str, None]) -> None:
        state, name = self._state, model.spec.name
        for group in model.targets:
            if group not in targets:
                state.groups[group].wanted.pop(name, state.now)
                state.groups[group].version += 1
                state.touched_groups[group] = None
        for group in targets:
            state.groups[group].wanted.add(name)
            state.touched_groups[group] = None
        model.targets = targets
        state.shape(model).stalled.pop(name, None)

    def _must_come_home(self, model: Model) -> bool:
        home = self._state.groups[model.home] if model.home is not None else None
        if home is None or not home.up:
            return False
        placement = home.placements.get(model.spec.name)
        return placement is None or not placement.is_committed

    # ---- jobs and removal

    def _finish_jobs(self, model: Model) -> None:
        placements = model.placements.values()
        stuck = next((placement for placement in placements if placement.is_stuck), None)
        is_gone = not any(placement.reserved for placement in placements)
        is_all_in = any(placement.phase is Phase.RESIDENT for placement in placements)
        for job in list(model.jobs):
            if is_all_in if job.kind == "load" else is_gone:
                self._state.close_job(job)
                self._state.actions.append(Done(job.id))
            elif job.kind == "evict" and stuck is not None:
                message = (
                    f"Model {model.spec.name} could not be paged out in {PAGE_OUT_TRIES} tries: {stuck.out_message}"
                )
                self._state.fail_job(job, "engine_failed", message)

    def _leave(self, model: Model) -> None:
        """All its pages go once nothing runs. What was suspended goes on first, after the pause of a failed load."""
        for placement in list(model.placements.values()):
            group = self._state.groups[placement.group]
            if placement.is_suspended:
                if self._state.now >= model.retry_at:
                    self._want_back(model, group)
            elif not placement.running:
                if placement.reserved > placement.issued:
                    self._state.revoke(group, placement)
                self._page_out(placement)

    def _want_back(self, model: Model, group: Group) -> None:
        group.wanted.add(model.spec.name)
        model.targets[group.name] = None
        self._state.touched_groups[group.name] = None

    def _page_out(self, placement: Placement) -> None:
        if placement.can_page_out(self._state.now):
            self._state.page_out(placement, 0)

    def _leave_if_idle(self, model: Model, ttl: float) -> None:
        """Its pages go when nothing was asked of it for its time to live."""
        held = [p for p in model.placements.values() if p.reserved]
        if not held or model.pinned is not None or any(p.running for p in held):
            return
        last = max(model.last_finish or 0.0, max(p.used for p in held))
        if self._state.now < last + ttl:
            self._state.wake_model(model, last + ttl)
            return
        idle = self._state.now - last
        self._state.explain(model, "evicted", "It was idle for {:.1f} s; its ttl is {:g} s.", idle, ttl)
        model.sent_away = True
        for placement in held:
            self._page_out(placement)

    def _is_gone(self, model: Model) -> bool:
        return not model.jobs and not any(p.is_held or p.is_busy or p.running for p in model.placements.values())

    def _delete(self, model: Model) -> None:
        name = model.spec.name
        self._set_targets(model, {})
        self._state.shape(model).homeless.pop(name, None)
        for other in self._state.shape(model).groups.values():
            other.known.pop(name, None)
            other.in_vain.pop(name, None)
        for group in model.placements:
            del self._state.groups[group].placements[name]
        self._state.sharing.remove(model)
        del self._state.models[name]
