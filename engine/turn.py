"""Whose forward pass runs: one turn at the processor, handed from model to model in the order they asked.

A plain lock lets whoever runs take it again before a waiter has woken, so that one busy model could keep the others
out. Here the holder hands the turn to the longest waiter: of two busy models each gets every other pass.

On a GPU the turn is for launching: who waits for what it has launched lets the others launch behind that.

Who waits for a first token waits urgently. A pass that nobody waits for that much may `give_way` between two layers:
the urgent waiter's pass runs, then the interrupted one goes on, before anybody else. A pass gives way to urgent ones
once at most, so it is held up by no more passes than it would be held up by in the queue. A long one on a GPU, where
launching takes longer than computing, also gives way to others now and then, so that their decodes go on beside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Waiter:
    urgent: bool
    turn: threading.Lock = field(default_factory=threading.Lock)  # locked until it is this waiter's turn

    def __post_init__(self) -> None:
        self.turn.acquire()


class Turn:
    """A first-come, first-served lock. How long it is held is for the holder to bound: one forward pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[_Waiter] = deque()

    @property
    def held(self) -> bool:
        return self._held

    def acquire(self, *, urgent: bool = False) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            waiter = _Waiter(urgent)
            self._waiting.append(waiter)
        waiter.turn.acquire()

    def give_way(self, *, urgent: bool = False) -> bool:
        """Let the first waiter's pass run now, or the first urgent one's, and return when it has.

        False if nobody waits like that.
        """
        if not self._waiting:
            return False
        with self._lock:
            first = next((waiter for waiter in self._waiting if waiter.urgent or not urgent), None)
            if first is None:
                return False
            self._waiting.remove(first)
            interrupted = _Waiter(urgent=False)
            self._waiting.appendleft(interrupted)
            first.turn.release()
        interrupted.turn.acquire()
        return True

    def release(self) -> None:
        """Hand the turn to the longest waiter. Raises RuntimeError if nobody holds it."""
        with self._lock:
            if not self._held:
                raise RuntimeError("The turn was released, but nobody holds it.")
            if self._waiting:
                self._waiting.popleft().turn.release()
            else:
                self._held = False

    @contextmanager
    def taken(self, *, urgent: bool = False) -> Iterator[None]:
        self.acquire(urgent=urgent)
        try:
            yield
        finally:
            self.release()
