"""KV accounts: frames stay reserved until the worker's answer has come, whatever crosses on the way."""

from __future__ import annotations

from scheduler.core import events
from scheduler.core.core import CoreConfig, SchedulerCore
from scheduler.core.kv import KvAccount


def test_a_raised_grant_is_reserved_at_once() -> None:
    account = KvAccount()
    account.grant(3, epoch=1)
    assert (account.granted, account.reserved) == (3, 3)


def test_a_lowered_grant_keeps_its_frames_until_the_answer() -> None:
    account = KvAccount()
    account.grant(3, epoch=1)
    account.released(1, 3)
    account.grant(1, epoch=2)
    assert (account.granted, account.reserved) == (1, 3)
    account.released(2, 1)
    assert account.reserved == 1


def test_a_grant_raised_before_the_answer_to_its_lowering_stays_reserved() -> None:
    account = KvAccount()
    account.grant(3, epoch=1)
    account.grant(0, epoch=2)
    account.grant(2, epoch=3)
    account.released(2, 0)
    assert account.reserved == 2


def test_an_answer_settles_the_grants_before_its_own_only() -> None:
    """The worker may still reach the three frames of the second grant when it has answered the first."""
    account = KvAccount()
    account.grant(1, epoch=1)
    account.grant(3, epoch=2)
    account.grant(1, epoch=3)
    account.released(1, 1)
    assert account.reserved == 3
    account.released(3, 1)
    assert account.reserved == 1


def test_an_answer_that_another_has_overtaken_says_nothing() -> None:
    account = KvAccount()
    account.grant(3, epoch=1)
    account.grant(0, epoch=2)
    account.released(2, 0)
    account.released(1, 3)
    assert not account.awaits(1)
    assert account.reserved == 0


def test_a_batch_that_gave_back_too_little_answers_again() -> None:
    account = KvAccount()
    account.grant(3, epoch=1)
    account.grant(1, epoch=2)
    account.released(2, 2)
    assert account.reserved == 2
    account.released(2, 1)
    assert account.reserved == 1


def test_the_room_for_kv_is_what_the_model_and_the_pins_leave() -> None:
    core = SchedulerCore(CoreConfig(page_bytes=2 << 20))
    core.step(events.ModelAdded(0.0, events.ModelSpec("a", ((1, 2, 3),))))
    core.step(events.ModelAdded(0.0, events.ModelSpec("b", ((3, 4),))))
    assert core.kv_room("a") is None, "no group has come up yet"
    core.step(events.WorkerUp(1.0, "g", 10))
    assert core.kv_room("a") == (7, 7)
    core.step(events.Pinned(2.0, "pin", "b"))
    assert core.kv_room("a") == (6, 7), "page 3 is shared"
    assert core.kv_room("nobody") is None
