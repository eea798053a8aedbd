"""The table of states, and what happens when something happens that cannot happen."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from scheduler.core import events as ev
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.placement import Placement
from scheduler.core.transitions import TRANSITIONS, InvalidTransition, Phase, Signal, diagram

DOCUMENT = Path(__file__).parents[2] / "docs" / "scheduler.md"


@pytest.fixture
def loading() -> SchedulerCore:
    """A core with model A half way in: extents of epochs 1 and 2 are outstanding."""
    core = SchedulerCore(CoreConfig(page_bytes=1, extent_pages=2))
    core.step(ev.WorkerUp(0.0, "g", 8))
    core.step(ev.ModelAdded(0.0, ev.ModelSpec("A", ((1, 2, 3, 4, 5),))))
    core.step(ev.Arrived(0.0, "r", "A", 1, 100.0))
    return core


def test_every_state_can_be_reached_and_left() -> None:
    assert {after for (_, signal), after in TRANSITIONS.items() if signal is not Signal.LOST} == set(Phase)
    assert {before for (before, signal), _ in TRANSITIONS.items() if signal is not Signal.LOST} == set(Phase)


def test_an_unlisted_transition_names_itself() -> None:
    with pytest.raises(InvalidTransition, match="model A on group g is absent: PageOut cannot happen to it"):
        Placement("A", "g", pages=1, number=1).follow(Signal.PAGE_OUT)


IMPOSSIBLE = [
    ev.PagedIn(1.0, "g", "A", epoch=2, last=4),  # before the extent of epoch 1
    ev.PagedIn(1.0, "g", "A", epoch=1, last=3),  # not where the extent ends
    ev.KvReleased(1.0, "g", "A", epoch=3, frames=7),  # more than was granted
    ev.Arrived(1.0, "r", "A", 1, 100.0),  # not ended yet
    ev.ModelAdded(1.0, ev.ModelSpec("A", ((1,),))),  # known
]


@pytest.mark.parametrize("event", IMPOSSIBLE, ids=repr)
def test_what_cannot_happen_raises_with_the_story_and_changes_nothing(loading: SchedulerCore, event: ev.Event) -> None:
    before = pickle.dumps(loading._state)
    with pytest.raises(InvalidTransition) as raised:
        loading.step(event)
    assert pickle.dumps(loading._state) == before
    assert raised.value.story[-1] == event
    assert isinstance(raised.value.story[0], ev.WorkerUp)
    assert str(event) in str(raised.value)


STALE = [
    ev.PagedIn(1.0, "g", "A", epoch=99, last=2),
    ev.PageInFailed(1.0, "g", "A", epoch=99, message="late"),
    ev.PagedOut(1.0, "g", "A", epoch=99, keep=0),
    ev.PageOutFailed(1.0, "g", "A", epoch=99, message="late"),
    ev.KvReleased(1.0, "g", "A", epoch=99, frames=7),
    ev.PagedIn(1.0, "gone", "A", epoch=1, last=2),
    ev.KvWanted(1.0, "g", "gone", frames=2),
    ev.Finished(1.0, "unknown"),
    ev.Cancelled(1.0, "unknown"),
    ev.WorkerLost(1.0, "gone", "killed"),
]


@pytest.mark.parametrize("event", STALE, ids=repr)
def test_what_speaks_of_a_world_that_is_gone_is_ignored(loading: SchedulerCore, event: ev.Event) -> None:
    before = loading.model("A"), loading.groups()
    assert loading.step(event) == []
    assert (loading.model("A"), loading.groups()) == before


def test_a_model_has_as_many_pages_on_each_rank() -> None:
    for shards in ((), ((),), ((1, 2), (3,))):
        with pytest.raises(ValueError, match="same number of pages"):
            ev.ModelSpec("A", shards)


def test_the_document_shows_the_table_as_it_is() -> None:
    assert diagram() in DOCUMENT.read_text(), f"put the output of transitions.diagram() into {DOCUMENT.name}"
