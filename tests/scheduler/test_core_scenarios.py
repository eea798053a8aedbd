"""Golden scenarios: what the core answers, event by event, as text that a person can follow.

Each file of `scenarios/` opens with why it exists (`#`). `>` lines are events, the lines below each one the actions
that they must cause, in order. `at SECONDS` moves the clock; `config NAME=VALUE` comes first; `! TEXT` is a part of the
message of the action above it. The words of events and actions are the fields of their classes, in order.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from scheduler.core import actions, events, invariants
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Player:
    """Reads a scenario line by line and compares."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = [line.strip() for line in lines]
        self._now = 0.0
        self._expected: list[str] = []
        self._actions: list[actions.Action] = []
        self._core: SchedulerCore | None = None
        self._config: dict[str, Any] = {"page_bytes": 100, "extent_pages": 2}

    def play(self) -> None:
        assert self._lines[0].startswith("# "), "a scenario opens with why it exists"
        for number, line in enumerate(self._lines, 1):
            word, _, rest = line.partition(" ")
            if not line or word == "#":
                continue
            if word == "config":
                self._config |= {name: _number(value) for name, value in (pair.split("=") for pair in rest.split())}
            elif word == "at":
                self._now = float(rest)
            elif word == ">":
                self._compare(number)
                self._actions = self._step(rest)
            elif word == "!":
                self._compare_message(rest, number)
            else:
                self._expected.append(line)
        self._compare(len(self._lines))

    def _step(self, text: str) -> list[actions.Action]:
        if self._core is None:
            self._core = SchedulerCore(CoreConfig(**self._config))
        done = self._core.step(event(self._now, text))
        invariants.check(self._core)
        return done

    def _compare(self, number: int) -> None:
        """The wait for the next deadline or wait bound is compared only where a scenario names it."""
        said = [spell(action) for action in self._actions]
        if not any(line.startswith("WakeAt") for line in self._expected):
            said = [line for line in said if not line.startswith("WakeAt")]
        assert said == self._expected, f"before line {number}: {said} is not {self._expected}"
        self._expected, self._actions = [], []

    def _compare_message(self, text: str, number: int) -> None:
        about = [a for a in self._actions if isinstance(a, actions.Reject | actions.Fail)]
        spelled = self._expected[-1]
        message = next(action.message for action in about if spell(action) == spelled)
        assert text in message, f"line {number}: {message!r} does not say {text!r}"


def event(at: float, text: str) -> events.Event:
    """`Arrived r1 A 2 60` → Arrived(at, "r1", "A", 2, 60.0); `ModelAdded A 1,2,3/4,5,6` has a list of pages a rank."""
    name, *words = text.split()
    if name == "ModelAdded":
        shards = tuple(tuple(int(page) for page in shard.split(",")) for shard in words[1].split("/"))
        return events.ModelAdded(at, events.ModelSpec(words[0], shards))
    made: events.Event = getattr(events, name)(at, *(_number(word) for word in words))
    return made


def spell(action: actions.Action) -> str:
    """The action's class and fields, its message left out."""
    fields = {f.name: getattr(action, f.name) for f in dataclasses.fields(action) if f.name != "message"}
    return " ".join([type(action).__name__, *(_word(value) for value in fields.values() if value is not None)])


def _number(word: str) -> str | int | float:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return word


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    Player(path.read_text().splitlines()).play()
