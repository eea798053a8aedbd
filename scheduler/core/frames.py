"""A group's frames in one pass: what is free, what is claimed, and what can be made free.

Frames that lack are made free out of the tails of victims that policy names, and out of KV that batches hold beyond
need. The frames that a demand waits for are its claim in this pass: nothing after it may take them, nor the pages that
its model holds, or those who are overdue would take each other's without end. A demand that only busy models could make
room for waits without a claim until it is due, and with one from then on; those who must go take no more work, and are
suspended if they take long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from scheduler.core.fitting import can_hold
from scheduler.core.group import Group, Vain
from scheduler.core.measured import load_seconds, remaining_seconds, run_seconds
from scheduler.core.model import Model
from scheduler.core.placement import Activity, Placement
from scheduler.core.state import State
from scheduler.core.transitions import Phase
from scheduler.policy.tails import make_room, who_must_drain
from scheduler.policy.view import Holder, Memory, Want

SOON_IDLE: Final = 4.0
"""Runs. What has run for so many of its usual runs may run on for long: nobody counts on its end."""

LONG_RUN: Final = 0.5
"""Seconds. What is expected to be done sooner is waited for rather than suspended."""

MOST_KNOWN: Final = 16
"""Models that were paged out here and may be brought in again before they are asked for."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Frames:
    """What it remembers is of the present pass only."""

    __slots__ = ("_claimants", "_claims", "_group", "_state", "are_coming", "are_spoken_for", "held_back")

    def __init__(self, state: State) -> None:
        self._state = state

    def begin(self, group: Group) -> None:
        self._group = group
        self._claims: list[int] | None = None  # frames on each rank that those considered before wait for
        self._claimants: list[str] = []  # models that wait for these
        self.held_back: frozenset[str] = frozenset()  # models that take no more work
        self.are_coming = False  # somebody waits for frames that are on their way
        self.are_spoken_for = False  # none is left for whose pages are not here, whatever it takes

    def has(self, lacking: Sequence[int], placement: Placement | None, kv: int) -> bool:
        """Whether these frames are free on each rank, and nobody considered before waits for them.

        KV that the model itself is giving back is not free yet, but it can keep it, unless somebody waits for it.
        """
        if self._claims is None and max(lacking) <= self._group.ledger.least_free:
            return True
        kept = 0
        if placement is not None and kv:
            kept = max(0, min(placement.kv.reserved, kv) - placement.kv.granted)
        free = self._group.ledger.free()
        for rank, need in enumerate(lacking):
            if need - kept > free[rank]:
                return False
        if self._claims is None:
            return True
        unclaimed = self._unclaimed()
        return not any(need > max(0, unclaimed[rank]) for rank, need in enumerate(lacking))

    def _unclaimed(self) -> list[int]:
        """Frames on each rank that are free, or KV that is being given back, less what is claimed."""
        group, coming = self._group, 0
        for name in group.ledger.kv:
            kv = group.placements[name].kv
            coming += kv.reserved - kv.granted
        free = group.ledger.free()
        if self._claims is None:
            return [there + coming for there in free] if coming else free
        return [there + coming - self._claims[rank] for rank, there in enumerate(free)]

    def _claim(self, model: str, lacking: Sequence[int]) -> None:
        self._claimants.append(model)
        before = self._claims if self._claims is not None else [0] * self._group.ranks
        self._claims = [before[rank] + need for rank, need in enumerate(lacking)]

    # ---- making room

    def make_room(self, want: Want, lacking: Sequence[int]) -> None:
        """Take what lacks from victims, or wait for what is busy, or worth keeping."""
        state, now = self._state, self._state.now
        if self._is_in_vain(want):
            return
        memory = self._memory(want.model, lacking)
        holders = self.idle_holders(want.model)
        busy, busy_until = self._soon_idle(want.model)
        want.rivals = self._group.wanted.waiting_for_link - (not want.is_in)
        victims = state.policy.victims(want, holders, now, busy)
        tails, short = make_room(memory, victims, state.policy.whole)
        surplus = self._surplus(want.model)
        if short <= sum(frames for _, frames in surplus):
            for name, keep in tails:
                self._take(want, self._group.placements[name], keep)
            self._take_back(surplus, short)
            self._claim(want.model, lacking)
            if not want.is_in:
                self.are_coming = True
                self._group.turn_to(want.model)
            return
        if now >= want.due:
            self._clear(want, memory, holders)
            self._claim(want.model, lacking)
            # What it waits for is more than there is, and what it holds already is not taken by those behind it.
            self.are_spoken_for = self.are_spoken_for or not want.is_in
        else:
            worth = state.policy.worth_at(want, holders, now)
            ask_at = min(want.due, busy_until, worth if worth is not None and worth > now else want.due)
            is_nothing_left = self._is_nothing_left(want, holders, surplus)
            self.wait(want, lacking, ask_at, is_nothing_left)
            state.wake_group(self._group, ask_at)
            self.are_spoken_for = self.are_spoken_for or is_nothing_left

    def wait(self, want: Want, lacking: Sequence[int], ask_at: float, is_nothing_left: bool) -> None:
        """Nothing to try again before `ask_at`, unless something changes, or another group offers itself."""
        group, state = self._group, self._state
        if want.model not in group.in_vain:
            message = "It lacks {} frames on {}, where models are busy or worth keeping."
            state.explain(state.models[want.model], "waiting", message, max(lacking), group.name)
        group.in_vain[want.model] = Vain(group.version, want.queue, ask_at, is_nothing_left)
        state.shapes[group.mesh].stalled[want.model] = None

    def _is_in_vain(self, want: Want) -> bool:
        """Whether room was looked for before, and neither the group nor the queue has changed since."""
        vain = self._group.in_vain.get(want.model)
        if vain is None or vain.version != self._group.version or vain.queue != want.queue:
            return False
        if self._state.now >= vain.ask_at:
            return False
        self._state.wake_group(self._group, vain.ask_at)
        self.are_spoken_for = self.are_spoken_for or vain.is_nothing_left
        return True

    def _is_nothing_left(self, want: Want, holders: Sequence[Holder], surplus: Sequence[tuple[Placement, int]]) -> bool:
        """Whether not one frame could be had, whoever came, and whatever went for it."""
        group = self._group
        leaving = sum(p.reserved - p.leaving.keep for p in group.placements.values() if p.leaving is not None)
        own = group.placements.get(want.model)
        held = sum(holder.pages for holder in holders) + (own.reserved if own is not None else 0)
        return min(self._unclaimed()) + leaving + held + sum(frames for _, frames in surplus) <= 0

    def _take(self, want: Want, victim: Placement, keep: int) -> None:
        state, known = self._state, self._group.known
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
        known.pop(victim.model, None)
        known[victim.model] = None
        if len(known) > MOST_KNOWN:
            del known[next(iter(known))]

    def take_for(self, want: Want, lacking: Sequence[int], victims: Sequence[Holder]) -> None:
        """Take what lacks from these victims, if they have so much."""
        tails, short = make_room(self._memory(want.model, lacking), victims)
        if short <= 0:
            for name, keep in tails:
                self._take(want, self._group.placements[name], keep)

    # ---- who holds what

    def idle_holders(self, besides: str) -> list[Holder]:
        """Whose pages may be taken."""
        now, pinned = self._state.now, self._group.pinned
        return [
            self.holder(placement)
            for name, placement in self._group.placements.items()
            if name != besides and placement.can_page_out(now) and name not in pinned and name not in self._claimants
        ]

    def _soon_idle(self, besides: str) -> tuple[list[Holder], float]:
        """What runs and may be idle before long, and until when that can be expected of all of them."""
        state, group, found, until = self._state, self._group, [], math.inf
        for name, placement in group.busy.items():
            if name == besides or placement.gives_way or name in group.pinned or name in group.wanted:
                continue
            model, began = state.models[name], max(placement.turn_began, placement.whole_at)
            run = run_seconds(state, model)
            if placement.phase is Phase.LOADING:
                began, run = state.now, run + remaining_seconds(state, group, model)
            if state.now < began + SOON_IDLE * run:
                found.append(self.holder(placement, run))
                until = min(until, began + SOON_IDLE * run)
        return found, until

    def _memory(self, model: str, lacking: Sequence[int]) -> Memory:
        """The group's memory as this demand sees it."""
        placements, unclaimed = self._group.placements.values(), self._unclaimed()
        return Memory(
            short=[need - unclaimed[rank] for rank, need in enumerate(lacking)],
            incoming=self._state.models[model].identities,
            counts=self._group.ledger.holders,
            leaving=[(self.holder(p), p.leaving.keep) for p in placements if p.leaving is not None],
        )

    def holder(self, placement: Placement, run: float = 0.0) -> Holder:
        state = self._state
        model = state.models[placement.model]
        name, spec = placement.model, model.spec
        return Holder(
            name,
            spec.shards,
            placement.reserved,
            placement.kv.granted,
            placement.used,
            placement.number,
            model.home == placement.group,
            model.history,
            load_seconds(state, self._group, model),
            spec.priority,
            name in self._group.wanted,
            1.0 - placement.reserved / placement.pages,
            len(model.placements) > 1 and self._is_copy(model, placement),
            not model.shares,
            run,
        )

    def _is_copy(self, model: Model, placement: Placement) -> bool:
        return any(p.is_committed and p is not placement for p in model.placements.values())

    # ---- what is due and finds nothing to take

    def _clear(self, want: Want, memory: Memory, idle: Sequence[Holder]) -> None:
        """Busy models must make room: they take no more work, and what would run for long is suspended."""
        busy = [p for p in self._group.busy.values() if p.model != want.model and not p.is_suspended]
        if any(placement.model in self.held_back for placement in busy):
            return
        chosen = who_must_drain(memory, idle, [self.holder(placement) for placement in busy])
        self.held_back |= set(chosen)
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

    def lend_kv(self) -> None:
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
