"""What is to be done now: run once at the end of every step, on whatever the event left behind.

Demands (waiting requests, loads, pins) are considered in the order that policy gives. One that fits into free memory
is admitted at once: its frames are reserved, its page-in begun, its request served. One that does not fit gets room
made for it out of idle models' tails and KV granted beyond need; the frames that it waits for are its claim, which
nothing younger may take. If only busy models could make room, it waits, without a claim until its wait bound has
passed; from then on with one, and the busy models that must go take no more work.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.actions import Done, WakeAt
from scheduler.core.fitting import can_hold
from scheduler.core.placement import PAGE_OUT_TRIES, Placement
from scheduler.core.state import Group, Model, State
from scheduler.core.transitions import Phase
from scheduler.policy import oldest_first as policy
from scheduler.policy.view import Demand, Holder, Memory, Site


class Planner:
    """Made anew for every step; what it remembers is of this step only."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._claims: dict[str, list[int]] = {}  # group → frames on each rank that older demands wait for
        self._held_back: set[tuple[str, str]] = set()  # (group, model) that take no more work
        self._short_of_memory: set[str] = set()  # groups on which a demand waits for memory
        self._blocked: dict[str, int] = {}  # model → KV frames of the smallest demand that did not fit
        self._oldest: dict[str, int] = {}  # model → number of its oldest demand
        self._wakes: list[float] = []

    def plan(self) -> None:
        self._expire()
        self._end_unwanted()
        self._finish_jobs()
        demands = policy.in_order(self._demands())
        for demand in demands:
            self._oldest.setdefault(demand.model, demand.number)
        for demand in demands:
            self._consider(demand)
        self._grant_wishes()
        for group in self._state.groups.values():
            for placement in group.placements.values():
                self._state.issue_extents(placement)
        self._ask_to_wake()

    # ---- what has come to its end

    def _expire(self) -> None:
        """A request's time is for its first step: it runs out for one that waits here or, served, for its pages."""
        for request in list(self._state.requests.values()):
            if request.started or request.cancelled:
                continue
            if request.deadline <= self._state.now:
                seconds = self._state.now - request.arrived
                message = f"The request waited {seconds:.1f} s for model {request.model} and its time ran out."
                self._state.fail(request, "timeout", message)
            else:
                self._wakes.append(request.deadline)

    def _end_unwanted(self) -> None:
        """Stop page-ins that nobody waits for, take KV from idle models, page out what is to go."""
        for group in self._state.groups.values():
            for placement in group.placements.values():
                model = self._state.models[placement.model]
                if placement.phase is Phase.LOADING and not self._is_wanted(model, placement):
                    self._state.revoke(group, placement)
                if not placement.running:
                    placement.kv.wanted = 0
                    if placement.kv.granted:
                        self._state.grant(placement, 0)
                if placement.out_retry_at > self._state.now and not placement.is_stuck:
                    self._wakes.append(placement.out_retry_at)
                if model.is_leaving and placement.can_page_out(self._state.now):
                    self._state.page_out(placement, 0)

    def _is_wanted(self, model: Model, placement: Placement) -> bool:
        """A cancelled request wants its pages until it has finished: a forward pass may be waiting for them."""
        if placement.running:
            return True
        if model.is_leaving:
            return False
        return bool(model.waiting or model.loads()) or model.home == placement.group

    def _finish_jobs(self) -> None:
        for model in list(self._state.models.values()):
            name = model.spec.name
            placements = list(self._state.placements(name))
            stuck = next((placement for placement in placements if placement.is_stuck), None)
            is_gone = not any(placement.reserved for placement in placements)
            is_all_in = any(placement.phase is Phase.RESIDENT for placement in placements)
            for job in list(model.jobs):
                if is_all_in if job.kind == "load" else is_gone:
                    self._done(model, job.id)
                elif job.kind == "evict" and stuck is not None:
                    message = f"Model {name} could not be paged out in {PAGE_OUT_TRIES} tries: {stuck.out_message}"
                    self._state.fail_job(job, "engine_failed", message)
            if model.removed and not model.jobs and not any(p.is_held or p.is_busy for p in placements):
                for group in self._state.groups.values():
                    group.placements.pop(name, None)
                del self._state.models[name]

    def _done(self, model: Model, job_id: str) -> None:
        model.jobs = [job for job in model.jobs if job.id != job_id]
        self._state.actions.append(Done(job_id))

    # ---- what is wanted

    def _demands(self) -> list[Demand]:
        demands = []
        for name, model in self._state.models.items():
            if not model.waiting and not model.jobs:
                model.target = None
            if model.is_leaving:
                continue
            demands += [Demand(r.number, r.arrived, name, r.kv_frames, r.id) for r in model.waiting]
            if not any(self._state.is_in(placement) for placement in self._state.placements(name)):
                demands += [Demand(job.number, job.at, name, 0) for job in model.loads()]
            if model.pinned is not None and self._must_come_home(model):
                demands.append(Demand(model.pinned, model.pinned_at, name, 0, pin=True))
        return demands

    def _must_come_home(self, model: Model) -> bool:
        home = self._state.groups.get(model.home) if model.home is not None else None
        if home is None or not home.up:
            return False
        if model.retry_at > self._state.now:
            self._wakes.append(model.retry_at)
            return False
        placement = home.placements.get(model.spec.name)
        return placement is None or not self._state.is_in(placement)

    # ---- whether and where it fits

    def _consider(self, demand: Demand) -> None:
        model = self._state.models[demand.model]
        if not demand.pin and demand.kv_frames >= self._blocked.get(demand.model, demand.kv_frames + 1):
            return  # an older one of this model that needs no more did not fit
        busy = self._state.busy(demand.model)
        if demand.request is not None and busy and len(busy.running) >= self._state.config.max_running:
            return
        if busy is not None and not self._can_join(model, busy, demand):
            # It has to run elsewhere, so the model must first come to rest where it is.
            if self._is_overdue(demand):
                self._held_back.add((busy.group, demand.model))
            return
        group = self._state.groups[busy.group] if busy is not None else self._choose_group(model, demand)
        if group is None or (group.name, demand.model) in self._held_back:
            return
        lacking = self._lacking(group, model, demand)
        if self._fits(group, demand, lacking):
            self._admit(group, model, demand)
            return
        if not demand.pin:
            self._blocked[demand.model] = demand.kv_frames
        self._make_room(group, model, demand, lacking)

    def _can_join(self, model: Model, busy: Placement, demand: Demand) -> bool:
        if demand.pin:
            return busy.group == model.home
        return can_hold(self._state, self._state.groups[busy.group], model, demand.kv_frames)

    def _choose_group(self, model: Model, demand: Demand) -> Group | None:
        sites = []
        for group in self._state.groups.values():
            if not group.up or group.mesh != model.spec.mesh:
                continue
            if demand.pin and group.name != model.home:
                continue
            if can_hold(self._state, group, model, demand.kv_frames):
                placement = group.placements.get(demand.model)
                held = placement.resident if placement is not None else 0
                free = min(group.ledger.free())
                sites.append(
                    Site(group.name, held, free, home=group.name == model.home, target=group.name == model.target)
                )
        return self._state.groups[policy.choose_site(sites).group] if sites else None

    def _lacking(self, group: Group, model: Model, demand: Demand) -> list[int]:
        """Frames that the demand needs on each rank beyond those that the model holds and does not give back."""
        placement = group.placements.get(demand.model)
        granted = placement.kv.granted if placement is not None else 0
        kv = max(0, demand.kv_frames - granted)
        return [pages + kv for pages in group.ledger.missing(model.spec.shards)]

    def _unclaimed(self, group: Group) -> list[int]:
        """Frames on each rank that are free, or KV that is being given back, less what older demands wait for."""
        coming = sum(placement.kv.reserved - placement.kv.granted for placement in group.placements.values())
        claims = self._claims.get(group.name, [0] * group.ranks)
        return [free + coming - claimed for free, claimed in zip(group.ledger.free(), claims, strict=True)]

    def _fits(self, group: Group, demand: Demand, lacking: Sequence[int]) -> bool:
        """Whether it can have its frames now, without taking what an older demand waits for.

        KV that the model itself is giving back is not free yet, but it can keep it, unless an older one waits for it.
        """
        placement = group.placements.get(demand.model)
        kept = 0
        if placement is not None:
            if placement.phase is Phase.EVICTING:
                return False  # its page-out has to end first
            kept = max(0, min(placement.kv.reserved, demand.kv_frames) - placement.kv.granted)
        ranks = zip(lacking, group.ledger.free(), self._unclaimed(group), strict=True)
        return all(need - kept <= free and need <= max(0, unclaimed) for need, free, unclaimed in ranks)

    def _admit(self, group: Group, model: Model, demand: Demand) -> None:
        model.target = None
        placement = self._state.placement(group, model)
        if placement.reserved < placement.pages:
            self._state.reserve(group, placement)
            self._state.issue_extents(placement)
        if demand.request is not None:
            if demand.kv_frames > placement.kv.granted:
                self._state.grant(placement, demand.kv_frames)
            self._state.serve(placement, self._state.requests[demand.request])

    # ---- making room

    def _make_room(self, group: Group, model: Model, demand: Demand, lacking: Sequence[int]) -> None:
        self._short_of_memory.add(group.name)
        if not demand.pin:
            model.target = group.name
        memory = self._memory(group, model, demand, lacking)
        room = policy.make_room(memory)
        surplus = self._surplus(group, demand.model)
        if room.short <= sum(frames for _, frames in surplus):
            for tail in room.tails:
                self._state.page_out(group.placements[tail.model], tail.keep)
            self._take_back(surplus, room.short)
        elif self._is_overdue(demand):
            if any((group.name, holder.model) not in self._held_back for holder in memory.busy):
                self._held_back |= {(group.name, name) for name in policy.who_must_drain(memory)}
        else:
            return
        claims = self._claims.setdefault(group.name, [0] * group.ranks)
        self._claims[group.name] = [claimed + need for claimed, need in zip(claims, lacking, strict=True)]

    def _is_overdue(self, demand: Demand) -> bool:
        at = policy.overdue_at(demand, self._state.config.wait_bound)
        if self._state.now >= at:
            return True
        self._wakes.append(at)
        return False

    def _memory(self, group: Group, model: Model, demand: Demand, lacking: Sequence[int]) -> Memory:
        """The group's memory as this demand sees it."""
        placements = group.placements.values()
        others = [placement for placement in placements if placement.model != demand.model]
        idle = [p for p in others if p.can_page_out(self._state.now) and self._may_take(group, p, demand)]
        return Memory(
            short=[need - unclaimed for need, unclaimed in zip(lacking, self._unclaimed(group), strict=True)],
            incoming=model.identities,
            counts=group.ledger.holders,
            leaving=[(self._holder(p), p.leaving.keep) for p in placements if p.leaving is not None],
            idle=[self._holder(placement) for placement in idle],
            busy=[self._holder(placement) for placement in others if placement.running],
        )

    def _may_take(self, group: Group, placement: Placement, demand: Demand) -> bool:
        if self._state.models[placement.model].home == group.name:
            return False
        return self._oldest.get(placement.model, demand.number) >= demand.number

    def _holder(self, placement: Placement) -> Holder:
        model = self._state.models[placement.model]
        pinned = model.home == placement.group
        kv = placement.kv.granted
        return Holder(
            placement.model, model.spec.shards, placement.reserved, kv, placement.used, placement.number, pinned
        )

    def _surplus(self, group: Group, besides: str) -> list[tuple[Placement, int]]:
        """KV frames granted beyond what the longest running request may need, largest first."""
        surplus = [
            (placement, placement.kv.granted - placement.least_kv)
            for placement in group.placements.values()
            if placement.model != besides and placement.kv.granted > placement.least_kv
        ]
        return sorted(surplus, key=lambda pair: (-pair[1], pair[0].number))

    def _take_back(self, surplus: Sequence[tuple[Placement, int]], frames: int) -> None:
        for placement, most in surplus:
            taken = min(most, frames)
            if taken > 0:
                self._state.grant(placement, placement.kv.granted - taken)
                frames -= taken

    def _grant_wishes(self) -> None:
        """Give batches the KV they could use, out of frames that nobody waits for."""
        for group in self._state.groups.values():
            if group.name in self._short_of_memory:
                continue
            for placement in group.placements.values():
                kv = placement.kv
                most = kv.reserved + min(group.ledger.free())
                if kv.wanted > kv.granted and most > kv.granted:
                    self._state.grant(placement, min(kv.wanted, most))

    def _ask_to_wake(self) -> None:
        state = self._state
        if state.wake_at is not None and state.wake_at <= state.now:
            state.wake_at = None
        wake = min((at for at in self._wakes if at > state.now), default=None)
        if wake is not None and (state.wake_at is None or wake < state.wake_at):
            state.wake_at = wake
            state.actions.append(WakeAt(wake))
