"""What is true of the core between steps, whatever happens. Tests call `check` after every step."""

from __future__ import annotations

from scheduler.core.core import SchedulerCore
from scheduler.core.fitting import MINIMAL_KV, can_hold, matching_groups
from scheduler.core.group import Group
from scheduler.core.ledger import Ledger
from scheduler.core.placement import EXTENTS_AHEAD, Placement
from scheduler.core.state import State
from scheduler.core.transitions import Phase
from scheduler.core.wants import want_of
from scheduler.policy.view import Want


def check(core: SchedulerCore) -> None:
    """Raises AssertionError, naming what does not hold."""
    state = core._state
    for group in state.groups.values():
        _check_frames(state, group)
        for placement in group.placements.values():
            _check_pages(placement)
            _check_work(state, placement)
    _check_requests(state)
    _check_wants(state)
    _check_pins(state)
    _check_places(state)


def _check_frames(state: State, group: Group) -> None:
    assert min(group.ledger.free()) >= 0, f"group {group.name} has more reserved than its capacity"
    recount = Ledger(group.ranks, group.ledger.capacity)
    for placement in group.placements.values():
        recount.hold(state.models[placement.model].spec.shards, 0, placement.reserved)
        recount.set_kv(placement.model, placement.kv.reserved)
    assert recount.holders == group.ledger.holders, f"the ledger of {group.name} miscounts pages"
    assert recount.kv == group.ledger.kv, f"the ledger of {group.name} miscounts KV frames"
    assert recount.free() == group.ledger.free(), f"the ledger of {group.name} miscounts free frames"
    assert group.up or not group.placements, f"group {group.name} is down and holds something"


def _check_pages(placement: Placement) -> None:
    """Pages are in, asked for and reserved in order; one page-in or one page-out at a time."""
    name, phase = f"{placement.model} on {placement.group}", placement.phase
    assert 0 <= placement.resident <= placement.issued <= placement.reserved <= placement.pages, name
    assert len(placement.extents) <= EXTENTS_AHEAD, f"{name} has too many extents outstanding"
    ends = [placement.resident, *(extent.last for extent in placement.extents)]
    assert ends == sorted(set(ends)), f"{name}: extents {ends} are out of order"
    assert ends[-1] == placement.issued, f"{name}: extents end at {ends[-1]}, pages up to {placement.issued} are issued"
    assert (phase is Phase.LOADING) == bool(placement.extents), f"{name} is {phase} with extents {placement.extents}"
    assert (phase is Phase.EVICTING) == (placement.leaving is not None), f"{name} is {phase}, {placement.leaving}"
    if phase is not Phase.LOADING:
        assert placement.resident == placement.reserved, f"{name} is {phase} and keeps frames for nothing"
    held = {Phase.ABSENT: 0, Phase.FAILED: 0, Phase.RESIDENT: placement.pages}.get(phase)
    assert held is None or placement.resident == held, f"{name} is {phase} with {placement.resident} pages"
    if phase is Phase.PARTIAL:
        assert 0 < placement.resident < placement.pages, f"{name} is partial with {placement.resident} pages"


def _check_work(state: State, placement: Placement) -> None:
    name = f"{placement.model} on {placement.group}"
    if placement.gives_way:
        assert placement.running, f"{name} is suspended, and nothing runs there"
        assert placement.kv.granted == 0, f"{name} is suspended and keeps KV"
    elif placement.running:
        assert placement.phase in (Phase.LOADING, Phase.RESIDENT), f"requests run on {name}, which is {placement.phase}"
        assert placement.reserved == placement.pages, f"requests run on {name}, whose pages are not all reserved"
        assert placement.kv.granted >= placement.least_kv, f"a request on {name} may never get the KV it needs"
        assert len(placement.running) <= state.config.max_running, f"too many requests run on {name}"
    else:
        assert placement.kv.granted == 0, f"{name} is idle and keeps KV"


def _check_requests(state: State) -> None:
    waiting = [request.id for model in state.models.values() for request in model.waiting]
    running = [
        request
        for group in state.groups.values()
        for placement in group.placements.values()
        for request in placement.running
    ]
    assert sorted(waiting + running) == sorted(state.requests), "a request is in no queue, or in two"
    for model in state.models.values():
        numbers = [request.number for request in model.waiting]
        assert numbers == sorted(numbers), f"the queue of {model.spec.name} is out of order"
        assert all(request.group is None for request in model.waiting)
    limit = state.config.max_queue_total
    assert sum(len(model.jobs) for model in state.models.values()) <= limit, "there are too many jobs"


def _check_wants(state: State) -> None:
    """What is remembered of a demand is what looking anew would find, unless it is known to be out of date."""
    for group in state.groups.values():
        wanted = group.wanted
        assert set(wanted) == {name for name, model in state.models.items() if group.name in model.targets}, group.name
        for name, demand in wanted.settled():
            seen, model = want_of(state, group, name), state.models[name]
            if model.page_seconds is None or model.run_seconds is None:
                continue  # what others take is its first guess, and it keeps to that
            assert seen is not None, f"{name} on {group.name} is not wanted any more"
            assert demand.again_at <= demand.rank.until, f"time changes the rank of {name} on {group.name} unnoticed"
            before, now = _fields(demand.want), _fields(seen)
            assert before == now, f"{name} on {group.name} has changed unnoticed: {before}, {now}"
        known = [demand for _, demand in wanted.settled() if not demand.want.is_in]
        if len(known) == len(wanted) - len(wanted.inside):
            keys = [demand.key(state.now) for demand in wanted.coming.ordered(state.now)]
            order = [(tier, round(value, 6)) for tier, value, _ in keys]
            assert len(order) == len(known), f"{group.name} has lost a demand"
            assert order == sorted(order), f"what is wanted on {group.name} is out of order"
            assert wanted.ahead == sum(demand.load for demand in known)


def _fields(want: Want) -> dict[str, object]:
    """All but what is filled in when room is made for it."""
    return {name: getattr(want, name) for name in Want.__slots__ if name != "rivals"}


def _check_pins(state: State) -> None:
    for model in state.models.values():
        if model.home is not None:
            assert model.pinned is not None, f"{model.spec.name} has a home and is not pinned"
            home = state.groups[model.home]
            assert can_hold(home, model, MINIMAL_KV), f"the pins on {model.home} do not fit together"


def _check_places(state: State) -> None:
    """Who waits, waits where it could run, if there is a group that could ever have it."""
    for model in state.models.values():
        if model.waiting and not model.is_leaving and state.now >= model.retry_at:
            kv = model.waiting[0].kv_frames
            possible = [g.name for g in matching_groups(state, model) if g.up and can_hold(g, model, kv)]
            name, there = model.spec.name, list(model.targets)
            assert not possible or set(possible).intersection(there), (
                f"{name} waits on {there}, {possible} could have it"
            )
