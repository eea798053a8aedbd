"""What a model wants on a group, as policy sees it: made anew when something that it is made of has changed."""

from __future__ import annotations

from scheduler.core.group import Group
from scheduler.core.measured import remaining_seconds, run_seconds
from scheduler.core.state import State
from scheduler.policy.view import Want


def refresh(state: State, group: Group) -> None:
    """Bring the group's demands up to date."""
    wanted, now = group.wanted, state.now
    for name in wanted.stale(now):
        want = want_of(state, group, name)
        if want is None:
            wanted.pop(name, now)
            state.models[name].targets.pop(group.name, None)
        else:
            wanted.put(name, want, state.policy.rank(want, now), state.models[name].shares, now)


def want_of(state: State, group: Group, name: str) -> Want | None:
    """None if nothing is wanted any more."""
    model, placement = state.models[name], group.placements.get(name)
    spec, config = model.spec, state.config
    is_in = placement is not None and placement.is_committed
    if placement is not None and placement.is_suspended:
        since, number, queue = placement.suspended_at, placement.number_suspended, len(placement.running)
        arrived = queue * since
    elif model.waiting and not model.is_leaving:
        oldest = model.waiting[0]
        since, number, queue, arrived = oldest.arrived, oldest.number, len(model.waiting), model.arrived_sum
    elif not is_in and model.jobs and model.loads():
        job = model.loads()[0]
        since, number, queue, arrived = job.at, job.number, 1, job.at
    elif not is_in and model.home == group.name and model.pinned is not None:
        since, number, queue, arrived = model.pinned_at, model.pinned, 1, model.pinned_at
    else:
        return None
    bound = spec.max_wait if spec.max_wait is not None else config.wait_bound
    load = 0.0 if is_in else remaining_seconds(state, group, model)
    run = run_seconds(state, model)
    return Want(
        name,
        number,
        since,
        since + (bound - load) if bound > load else since,
        queue if queue < config.max_running else config.max_running,
        queue,
        arrived,
        load,
        run,
        spec.priority,
        None if spec.slo is None else since + spec.slo - run - load,
        group.next_in == name,
        is_in,
    )
