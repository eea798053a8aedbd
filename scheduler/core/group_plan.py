"""What is to be done on one group now.

What is wanted there is considered in the order that policy gives. Requests join a model that is in, or coming for
good. For a model that is not, frames are taken and pages asked for, while the link has less than two extents to read:
the whole model at once, or extent by extent, each a decision of its own, until what remains takes no longer than the
first requests' run. Then the rest is reserved and the requests are served, for whom the last pages arrive in time.

Frames that lack are made free out of the tails of victims that policy names, and out of KV that batches hold beyond
need. The frames that a demand waits for are its claim in this pass: nothing after it may take them. A demand that only
busy models could make room for waits without a claim until it is due, and with one from then on; those who must go
take no more work, and are suspended if they take long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.core.fitting import can_hold
from scheduler.core.group import Group, Vain
from scheduler.core.measured import load_seconds, remaining_seconds, run_seconds
from scheduler.core.model import Model
from scheduler.core.placement import Activity, Placement
from scheduler.core.requests import Request
from scheduler.core.state import State
from scheduler.core.transitions import Phase
from scheduler.policy.base import Policy
from scheduler.policy.tails import make_room, who_must_drain
from scheduler.policy.view import Holder, Memory, Want

LONG_RUN = 0.5
"""Seconds. What is expected to be done sooner is waited for rather than suspended."""

STALLED_LOOKED_AT = 4
"""Models waiting elsewhere that an idle group offers itself to."""

MOST_KNOWN = 16
"""Models that were paged out here and may be brought in again before they are asked for."""


class GroupPlan:
    """Made anew for every pass; what it remembers is of this pass only."""

    def __init__(self, state: State, policy: Policy, group: Group) -> None:
        self._state = state
        self._policy = policy
        self._group = group
        self._claims: list[int] | None = None  # frames on each rank that those considered before wait for
        self._held_back: set[str] = set()  # models that take no more work
        self._link_is_taken = False  # somebody considered before waits for frames that are coming

    def run(self) -> None:
        group, state = self._group, self._state
        if group.loading:
            for placement in list(group.loading.values()):
                state.issue_extents(group, placement)
        if state.now < group.asleep_until:
            state.wake_group(group, group.asleep_until)
            return
        if group.wanted:
            self._consider_all()
        if group.busy:
            self._lend_kv()
        if not group.wanted:
            self._offer()
        if group.outstanding == 0 and state.now >= group.prefetch_at and not self._link_is_taken:
            self._prefetch()
        state.shapes[group.mesh].rank(group)

    def _consider_all(self) -> None:
        wants = [want for name in list(self._group.wanted) if (want := self._want(name)) is not None]
        now = self._state.now
        for want in self._policy.order(wants, now):
            if not want.is_in and (self._link_is_taken or (self._group.is_reading and now < want.due)):
                continue  # its turn comes when an extent is in
            if not self._consider(want) and self._policy.tick:
                self._group.asleep_until = self._state.now + self._policy.tick
                self._state.wake_group(self._group, self._group.asleep_until)
                return

    def _offer(self) -> None:
        """Nothing is wanted here: models that wait for memory on other groups may come."""
        stalled = self._state.shapes[self._group.mesh].stalled
        for name in list(stalled)[:STALLED_LOOKED_AT]:
            del stalled[name]
            self._state.models[name].is_offered = True
            self._state.touched_models[name] = None

    # ---- what is wanted

    def _want(self, name: str) -> Want | None:
        """None if nothing is wanted any more, or not before an extent is in: it need not be ranked then."""
        state, group = self._state, self._group
        model, placement = state.models[name], group.placements.get(name)
        now, spec, config = state.now, model.spec, state.config
        is_in = placement is not None and placement.is_committed
        if placement is not None and placement.is_suspended:
            since, number, queue = placement.suspended_at, placement.number_suspended, len(placement.running)
            waited = queue * (now - since)
        elif model.waiting and not model.is_leaving:
            oldest = model.waiting[0]
            since, number, queue = oldest.arrived, oldest.number, len(model.waiting)
            waited = queue * now - model.arrived_sum
        elif not is_in and model.jobs and model.loads():
            job = model.loads()[0]
            since, number, queue, waited = job.at, job.number, 1, now - job.at
        elif not is_in and model.home == group.name and model.pinned is not None:
            since, number, queue, waited = model.pinned_at, model.pinned, 1, now - model.pinned_at
        else:
            del group.wanted[name]
            model.targets.pop(group.name, None)
            return None
        bound = spec.max_wait if spec.max_wait is not None else config.wait_bound
        if not is_in and group.is_reading and now < since + (bound - load_seconds(state, group, model)):
            return None  # it is due no earlier than with all of its load ahead
        load = 0.0 if is_in else remaining_seconds(state, group, model)
        run, slo = run_seconds(state, model), spec.slo
        return Want(
            name,
            number,
            since,
            since + (bound - load) if bound > load else since,
            queue if queue < config.max_running else config.max_running,
            waited,
            load,
            run,
            spec.priority,
            None if slo is None else since + slo - run - load - now,
            group.next_in == name,
            is_in,
        )

    def _consider(self, want: Want) -> bool:
        """Do what can be done for it; False if memory has to be waited for."""
        group = self._group
        model, placement = self._state.models[want.model], group.placements.get(want.model)
        if placement is not None:
            if placement.leaving is not None:
                return True  # its page-out has to end first
            if placement.is_committed:
                return self._serve(want, model, placement)
        if want.model in self._held_back:
            return True
        return self._bring_in(want, model, placement)

    # ---- serving what is in

    def _serve(self, want: Want, model: Model, placement: Placement) -> bool:
        """Let as many requests as can be join the batch, in order; a smaller one may go before one that has to wait."""
        if placement.is_suspended:
            return self._resume(want, placement)
        if self._policy.whole and placement.phase is not Phase.RESIDENT:
            return True
        if placement.activity is Activity.SUSPENDING:
            return True
        most, blocked = self._state.config.max_running, None
        for request in list(model.waiting):
            if len(placement.running) >= most or want.model in self._held_back:
                break
            kv = request.kv_frames
            if blocked is not None and kv >= blocked:
                continue
            if self._group.pinned and not can_hold(self._group, model, kv):
                continue  # it has to run elsewhere
            if not self._serve_one(placement, request):
                self._make_room(want, [max(0, kv - placement.kv.granted)] * self._group.ranks)
                blocked = kv
        return blocked is None

    def _serve_one(self, placement: Placement, request: Request) -> bool:
        kv = request.kv_frames
        lacking = kv - placement.kv.granted
        if lacking > 0:
            if not self._has([lacking] * self._group.ranks, placement, kv):
                return False
            self._state.grant(placement, kv)
        self._state.serve(self._group, placement, request)
        return True

    def _resume(self, want: Want, placement: Placement) -> bool:
        kv = placement.kv_suspended
        lacking = [max(0, kv - placement.kv.granted)] * self._group.ranks
        if self._has(lacking, placement, kv):
            waited = self._state.now - placement.suspended_at
            model, message = self._state.models[want.model], "{} requests go on after {:.2f} s."
            self._state.explain(model, "resumed", message, len(placement.running), waited)
            self._state.resume(placement)
            return True
        return self._make_room(want, lacking)

    # ---- bringing a model in

    def _bring_in(self, want: Want, model: Model, placement: Placement | None) -> bool:
        group, state = self._group, self._state
        is_due = state.now >= want.due
        reserved = placement.reserved if placement is not None else 0
        last = min(model.pages, reserved + group.extents_wanted * state.config.extent_pages)
        for_good = self._policy.keeps_to_it or is_due or last == model.pages or want.load <= want.run
        kv = 0
        if for_good:
            last, kv = model.pages, self._first_kv(model, placement)
            lacking = [pages + kv for pages in group.ledger.missing(model.spec.shards)]
        else:
            lacking = group.ledger.missing(model.spec.shards, reserved, last)
        if not self._has(lacking, placement, kv):
            return self._make_room(want, lacking)
        if group.next_in != want.model:
            group.next_in = want.model
            message = "{} wait; {:.2f} s of {}'s link bring it in."
            state.explain(model, "loading", message, want.queue, want.load, group.name)
        group.in_vain.pop(want.model, None)
        placement = state.placement(group, model)
        state.reserve(group, placement, last)
        state.issue_extents(group, placement)
        if for_good and (model.waiting or placement.is_suspended):
            self._serve(want, model, placement)
        return True

    def _first_kv(self, model: Model, placement: Placement | None) -> int:
        """KV frames of the first that is to run here."""
        if placement is not None and placement.is_suspended:
            return placement.kv_suspended
        if not self._group.pinned:
            return model.waiting[0].kv_frames if model.waiting else 0
        fitting = (r.kv_frames for r in model.waiting if can_hold(self._group, model, r.kv_frames))
        return next(fitting, 0)

    def _prefetch(self) -> None:
        """The link has nothing to do: bring in ahead what may be wanted soon."""
        state, group = self._state, self._group
        group.prefetch_at = math.inf
        candidates = [holder for name in list(group.known) if (holder := self._candidate(name)) is not None]
        if not candidates:
            return
        choice = self._policy.prefetch(candidates, self._idle_holders(""), state.now)
        if choice is None:
            return
        if choice.ask_at is not None:
            group.prefetch_at = choice.ask_at
            state.wake_group(group, choice.ask_at)
        if choice.model is None:
            return
        self._bring_ahead(choice.model, choice.victims)

    def _candidate(self, name: str) -> Holder | None:
        """A model that was paged out here, if it could be brought in again."""
        group, model = self._group, self._state.models[name]
        if (
            name in group.wanted
            or model.is_leaving
            or model.sent_away
            or model.history.next_use(self._state.now) is None
        ):
            return None
        placement = group.placements.get(name)
        if placement is None or placement.phase is Phase.ABSENT:
            return self._holder(Placement(name, group.name, model.pages, 0))
        if placement.is_committed:
            del group.known[name]
            return None
        return self._holder(placement) if placement.phase is Phase.PARTIAL else None

    def _bring_ahead(self, name: str, victims: Sequence[Holder]) -> None:
        """Ask for the next extent of a model, or make room for it."""
        state, group = self._state, self._group
        if group.next_in != name:
            group.next_in = name
            message = "The link of {} is idle; it may be wanted soon."
            state.explain(state.models[name], "prefetched", message, group.name)
        model, placement = state.models[name], group.placements.get(name)
        reserved = placement.reserved if placement is not None else 0
        last = min(model.pages, reserved + state.config.extent_pages)
        lacking = group.ledger.missing(model.spec.shards, reserved, last)
        if self._has(lacking, None, 0):
            placement = state.placement(group, model)
            state.reserve(group, placement, last)
            state.issue_extents(group, placement)
            return
        want = Want(name, 0, state.now, state.now, 0, 0.0, 0.0, 0.0)
        room = make_room(self._memory(want, lacking), victims)
        if room.short <= 0:
            for tail in room.tails:
                self._take(want, group.placements[tail.model], tail.keep)

    # ---- frames

    def _has(self, lacking: Sequence[int], placement: Placement | None, kv: int) -> bool:
        """Whether these frames are free on each rank, and nobody considered before waits for them.

        KV that the model itself is giving back is not free yet, but it can keep it, unless somebody waits for it.
        """
        kept = 0
        if placement is not None and kv:
            kept = max(0, min(placement.kv.reserved, kv) - placement.kv.granted)
        for need, there in zip(lacking, self._group.ledger.free(), strict=True):
            if need - kept > there:
                return False
        if self._claims is None:
            return True
        return all(need <= max(0, there) for need, there in zip(lacking, self._unclaimed(), strict=True))

    def _unclaimed(self) -> list[int]:
        """Frames on each rank that are free, or KV that is being given back, less what is claimed."""
        group, coming = self._group, 0
        for name in group.ledger.kv:
            kv = group.placements[name].kv
            coming += kv.reserved - kv.granted
        free = group.ledger.free()
        if self._claims is None:
            return [there + coming for there in free] if coming else free
        return [there + coming - claimed for there, claimed in zip(free, self._claims, strict=True)]

    def _claim(self, lacking: Sequence[int]) -> None:
        before = self._claims or [0] * self._group.ranks
        self._claims = [claimed + need for claimed, need in zip(before, lacking, strict=True)]

    def _make_room(self, want: Want, lacking: Sequence[int]) -> bool:
        """Take what lacks from victims. False if that has to wait for what is busy, or for what is worth keeping."""
        state, now = self._state, self._state.now
        if self._is_in_vain(want):
            return False
        memory = self._memory(want, lacking)
        holders = self._idle_holders(want.model)
        victims = self._policy.victims(want, holders, now)
        room = make_room(memory, victims, self._policy.whole)
        surplus = self._surplus(want.model)
        if room.short <= sum(frames for _, frames in surplus):
            for tail in room.tails:
                self._take(want, self._group.placements[tail.model], tail.keep)
            self._take_back(surplus, room.short)
            self._claim(lacking)
            if not want.is_in:
                self._link_is_taken = True
                self._group.next_in = want.model
            return True
        if now >= want.due:
            self._clear(want, memory, holders)
            self._claim(lacking)
        else:
            worth = self._policy.worth_at(want, holders, now)
            ask_at = want.due if worth is None or worth <= now else min(worth, want.due)
            if want.model not in self._group.in_vain:
                message = "It lacks {} frames on {}, where models are busy or worth keeping."
                state.explain(state.models[want.model], "waiting", message, max(lacking), self._group.name)
            self._group.in_vain[want.model] = Vain(self._group.version, want.queue, ask_at)
            state.wake_group(self._group, ask_at)
            state.shapes[self._group.mesh].stalled[want.model] = None
        return False

    def _is_in_vain(self, want: Want) -> bool:
        """Whether room was looked for before, and neither the group nor the queue has changed since."""
        vain = self._group.in_vain.get(want.model)
        if vain is None or vain.version != self._group.version or vain.queue != want.queue:
            return False
        if self._state.now >= vain.ask_at:
            return False
        self._state.wake_group(self._group, vain.ask_at)
        return True

    def _take(self, want: Want, victim: Placement, keep: int) -> None:
        state = self._state
        model = state.models[victim.model]
        state.explain(
            model,
            "evicted",
            "{} of its {} pages go from {} for {}, for which {} wait, the oldest for {:.2f} s; it was last used "
            "{:.2f} s ago.",
            victim.reserved - keep,
            model.pages,
            victim.group,
            want.model,
            want.queue,
            state.now - want.since,
            state.now - victim.used,
        )
        state.page_out(victim, keep)
        self._group.known.pop(victim.model, None)
        self._group.known[victim.model] = None
        if len(self._group.known) > MOST_KNOWN:
            del self._group.known[next(iter(self._group.known))]

    def _idle_holders(self, besides: str) -> list[Holder]:
        """Whose pages may be taken."""
        now, pinned = self._state.now, self._group.pinned
        return [
            self._holder(placement)
            for name, placement in self._group.placements.items()
            if name != besides and placement.can_page_out(now) and name not in pinned
        ]

    def _memory(self, want: Want, lacking: Sequence[int]) -> Memory:
        """The group's memory as this demand sees it."""
        placements = self._group.placements.values()
        return Memory(
            short=[need - unclaimed for need, unclaimed in zip(lacking, self._unclaimed(), strict=True)],
            incoming=self._state.models[want.model].identities,
            counts=self._group.ledger.holders,
            leaving=[(self._holder(p), p.leaving.keep) for p in placements if p.leaving is not None],
        )

    def _holder(self, placement: Placement) -> Holder:
        model = self._state.models[placement.model]
        name, spec = placement.model, model.spec
        return Holder(  # by position, which is twice as fast
            name,
            spec.shards,
            placement.reserved,
            placement.kv.granted,
            placement.used,
            placement.number,
            model.home == placement.group,
            model.history,
            load_seconds(self._state, self._group, model),
            spec.priority,
            name in self._group.wanted,
            1.0 - placement.reserved / placement.pages,
            len(model.placements) > 1 and self._is_copy(model, placement),
        )

    def _is_copy(self, model: Model, placement: Placement) -> bool:
        return any(p.is_committed and p is not placement for p in model.placements.values())

    # ---- what is due and finds nothing to take

    def _clear(self, want: Want, memory: Memory, idle: Sequence[Holder]) -> None:
        """Busy models must make room: they take no more work, and what would run for long is suspended."""
        busy = [p for p in self._group.busy.values() if p.model != want.model and not p.is_suspended]
        if any(placement.model in self._held_back for placement in busy):
            return
        chosen = who_must_drain(memory, idle, [self._holder(placement) for placement in busy])
        self._held_back.update(chosen)
        if self._state.config.time_slice is not None:
            for name in chosen:
                self._suspend_if_long(want, self._group.placements[name], self._state.config.time_slice)

    def _suspend_if_long(self, want: Want, placement: Placement, time_slice: float) -> None:
        """Only what has had its turn, and only if it is not about to end."""
        state = self._state
        if placement.activity is not Activity.RUNNING or placement.phase is not Phase.RESIDENT:
            return
        began = max(placement.turn_began, placement.whole_at)
        model = state.models[placement.model]
        if not can_hold(self._group, model, placement.kv.granted):
            return  # a pin has come since: it could never go on
        at = began + max(time_slice, load_seconds(state, self._group, model))
        if run_seconds(state, model) < LONG_RUN:
            at = max(at, want.due + LONG_RUN)
        if state.now < at:
            state.wake_group(self._group, at)
            return
        state.explain(
            model,
            "suspended",
            "{} requests stop on {} after {:.2f} s for {}, which has waited for {:.2f} s.",
            len(placement.running),
            placement.group,
            state.now - began,
            want.model,
            state.now - want.since,
        )
        state.suspend(placement)

    # ---- KV beyond need

    def _surplus(self, besides: str) -> list[tuple[Placement, int]]:
        """KV frames granted beyond what the longest running request may need, largest first."""
        if not self._group.ledger.kv:
            return []
        surplus = [
            (placement, placement.kv.granted - placement.least_kv)
            for placement in self._group.busy.values()
            if placement.model != besides
            and placement.activity is Activity.RUNNING
            and placement.kv.granted > placement.least_kv
        ]
        return sorted(surplus, key=lambda pair: (-pair[1], pair[0].number))

    def _take_back(self, surplus: Sequence[tuple[Placement, int]], frames: int) -> None:
        for placement, most in surplus:
            taken = min(most, frames)
            if taken > 0:
                self._state.grant(placement, placement.kv.granted - taken)
                frames -= taken

    def _lend_kv(self) -> None:
        """Give batches the KV they could use, out of frames that nobody is about to get.

        A demand that waits for busy models cannot use what is free. When it can, what was lent is taken back.
        """
        for placement in self._group.busy.values():
            kv = placement.kv
            if kv.wanted > kv.granted:
                most = kv.reserved + self._group.ledger.least_free
                if self._claims is not None:
                    most = min(most, kv.granted + min(self._unclaimed()))
                if most > kv.granted:
                    self._state.grant(placement, min(kv.wanted, most))
