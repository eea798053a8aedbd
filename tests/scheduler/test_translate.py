"""Core and workers speak of the same things in their own words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import request as engine
from scheduler.core import actions, events
from scheduler.translate import command_of, event_of, model_spec
from tests.scheduler.house import served
from worker import protocol


@pytest.mark.parametrize(
    ("report", "event"),
    [
        (engine.Started("r"), events.Started(5.0, "r")),
        (engine.KvWanted("m", 3), events.KvWanted(5.0, "g", "m", 3)),
        (engine.KvReleased("m", 3, 7), events.KvReleased(5.0, "g", "m", 7, 3)),
        (engine.Suspended("m", 3, 7, 100, 20, 0.1), events.Suspended(5.0, "g", "m", 7, 3)),
        (engine.Resumed("m", 7), events.Resumed(5.0, "g", "m", 7)),
        (protocol.PagedIn("m", 1, 4, 7, 0.1, {}, {}), events.PagedIn(5.0, "g", "m", 7, 4)),
        (protocol.PageInFailed("m", 7, "short"), events.PageInFailed(5.0, "g", "m", 7, "short")),
        (protocol.PagedOut("m", 2, 7, 9, 0.1), events.PagedOut(5.0, "g", "m", 7, 2)),
        (protocol.PageOutFailed("m", 7, "busy"), events.PageOutFailed(5.0, "g", "m", 7, "busy")),
        (protocol.GroupUp(64, tp=2, pp=3), events.WorkerUp(5.0, "g", 64, ranks=6, pp=3)),
        (protocol.GroupLost("killed"), events.WorkerLost(5.0, "g", "killed")),
    ],
)
def test_a_report_becomes_an_event(report: object, event: events.Event) -> None:
    assert event_of(report, "g", 5.0) == event  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("action", "command"),
    [
        (actions.PageOut("g", "m", 2, 7), protocol.PageOut("m", 2, 7)),
        (actions.GrantKv("g", "m", 4, 7), protocol.GrantKv("m", 4, 7)),
        (actions.Suspend("g", "m", 7), protocol.Suspend("m", 7)),
        (actions.Resume("g", "m", 4, 7), protocol.Resume("m", 4, 7)),
        (actions.Cancel("r", "g"), protocol.Cancel("r")),
    ],
)
def test_an_action_becomes_a_command(action: object, command: object) -> None:
    assert command_of(action) == command  # type: ignore[arg-type]


def test_equal_pages_of_one_rank_have_one_identity_whatever_model_they_are_of() -> None:
    a, b = model_spec(served("a", 4, shared=2)), model_spec(served("b", 4, shared=2))
    assert a.shards[0][:2] == b.shards[0][:2]
    assert not set(a.shards[0][2:]) & set(b.shards[0][2:])


def test_ranks_share_nothing() -> None:
    one = served("a", 2)
    spec = model_spec(replace(one, page_hashes=one.page_hashes * 2))
    assert not set(spec.shards[0]) & set(spec.shards[1])
