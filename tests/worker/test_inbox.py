"""The inbox: in order, bounded for the daemon's commands, never in the way of a completion."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from worker.inbox import Inbox

PATIENCE = 20.0


def test_items_come_out_in_the_order_they_came_in() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.post([1, 2])
    inbox.complete(3)
    inbox.post([4])
    assert [inbox.take() for _ in range(4)] == [1, 2, 3, 4]


def test_taking_waits_for_an_item() -> None:
    inbox: Inbox[int] = Inbox()
    with ThreadPoolExecutor(1) as taker:
        taking = taker.submit(inbox.take)
        inbox.post([1])
        assert taking.result(PATIENCE) == 1


def test_a_full_inbox_holds_posters_and_lets_completions_in() -> None:
    inbox: Inbox[int] = Inbox(limit=2)
    inbox.post([1, 2])
    with ThreadPoolExecutor(1) as poster:
        posting = poster.submit(inbox.post, [4])
        inbox.complete(3)
        assert not posting.done()
        assert [inbox.take() for _ in range(2)] == [1, 2]
        posting.result(PATIENCE)
    assert [inbox.take() for _ in range(2)] == [3, 4]


def test_it_is_busy_until_the_last_item_is_done_with() -> None:
    inbox: Inbox[int] = Inbox()
    assert not inbox.busy
    inbox.post([1])
    assert inbox.busy
    inbox.take()
    assert inbox.busy  # being worked on
    with ThreadPoolExecutor(1) as taker:
        taking = taker.submit(inbox.take)
        inbox.close()
        assert taking.result(PATIENCE) is None
    assert not inbox.busy


def test_a_closed_inbox_takes_nothing_more_and_holds_nobody() -> None:
    inbox: Inbox[int] = Inbox(limit=1)
    inbox.post([1])
    with ThreadPoolExecutor(1) as poster:
        posting = poster.submit(inbox.post, [2])
        inbox.close()
        posting.result(PATIENCE)
    inbox.complete(3)
    assert inbox.take() is None
