"""The turn: one holder, and those who wait get it in the order they asked."""

from __future__ import annotations

import threading

import pytest

from engine.turn import Turn

TIMEOUT = 20.0


def test_one_thread_holds_the_turn() -> None:
    turn = Turn()
    assert not turn.held
    with turn.taken():
        assert turn.held
    assert not turn.held


def test_releasing_what_nobody_holds_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nobody holds it"):
        Turn().release()


def test_waiters_are_served_in_order_and_the_holder_cannot_jump_the_queue() -> None:
    turn = Turn()
    order: list[int] = []
    turn.acquire()

    def work(number: int) -> None:
        with turn.taken():
            order.append(number)

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while len(turn._waiting) < number + 1:  # until it queues; nothing else changes the queue meanwhile
            assert threads[-1].is_alive()
    turn.release()
    with turn.taken():  # behind all four
        order.append(4)
    for thread in threads:
        thread.join(TIMEOUT)
    assert order == [0, 1, 2, 3, 4]


def test_a_pass_gives_way_to_an_urgent_one_and_goes_on_before_anybody_else() -> None:
    turn = Turn()
    order: list[str] = []
    turn.acquire()

    def work(name: str, urgent: bool) -> None:
        with turn.taken(urgent=urgent):
            order.append(name)

    threads = []
    for name, urgent in (("patient", False), ("urgent", True), ("urgent too", True)):
        assert not (threads == [] and turn.give_way(urgent=True)), "nobody waits"
        threads.append(threading.Thread(target=work, args=(name, urgent)))
        threads[-1].start()
        while len(turn._waiting) < len(threads):
            assert threads[-1].is_alive()
    assert turn.give_way(urgent=True)
    order.append("interrupted")
    turn.release()
    for thread in threads:
        thread.join(TIMEOUT)
    assert order == ["urgent", "interrupted", "patient", "urgent too"]


def test_a_pass_gives_way_to_a_patient_one_only_if_it_says_so() -> None:
    turn = Turn()
    order: list[str] = []
    turn.acquire()

    def work() -> None:
        with turn.taken():
            order.append("patient")

    waiter = threading.Thread(target=work)
    waiter.start()
    while not turn._waiting:
        assert waiter.is_alive()
    assert not turn.give_way(urgent=True)
    assert order == []
    assert turn.give_way()
    order.append("interrupted")
    turn.release()
    waiter.join(TIMEOUT)
    assert order == ["patient", "interrupted"]
