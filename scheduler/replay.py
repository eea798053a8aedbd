"""Replaying a journal: the same events into the same core, and are the decisions the same?

A journal from elsewhere can do no harm: a snapshot (`scheduler/snapshot.py`) holds only the scheduler's own classes.
"""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler import snapshot
from scheduler.core import events
from scheduler.core.actions import Action
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.journal import FORMAT, NOTE, checksum
from swapper.errors import GswapdError

_UNREADABLE = (
    ValueError, TypeError, KeyError, AttributeError, ImportError, EOFError, zlib.error, pickle.UnpicklingError
)  # fmt: skip
"""What a file raises that is no journal, or one of another version."""

_KINDS = {kind.__name__: kind for kind in events.Event.__subclasses__()}


class JournalError(GswapdError):
    """A journal that cannot be read."""


@dataclass(frozen=True, slots=True)
class Decided:
    """An event, and what the core decided on it now and then."""

    event: events.Event
    actions: tuple[Action, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the core was not told: see `scheduler/journal.py`."""

    word: str
    at: float
    fields: tuple[Any, ...]


def replay(path: Path) -> Iterator[Decided | Note]:
    """One file of a journal, line by line, up to a decision that differs: what comes after it answers another one.

    Raises JournalError. A last line that was cut off is left out.
    """
    with path.open() as file:
        core = _core(path, file.readline())
        for number, line in enumerate(file, 2):
            if not line.endswith("\n"):
                return  # the daemon did not live to write it
            try:
                digest, kind, *values = json.loads(line)
                if digest == NOTE:
                    yield Note(kind, values[0], tuple(values[1:]))
                    continue
                event = _event(kind, values)
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise JournalError(f"{path}, line {number}, is no line of a journal: {error!r}.") from error
            actions = core.step(event)  # raises where it did then: a defect
            same = checksum(actions) == digest
            yield Decided(event, tuple(actions), same)
            if not same:
                return


def configuration(path: Path) -> CoreConfig:
    """What the core was told. Raises JournalError."""
    with path.open() as file:
        return _core(path, file.readline()).config


def _core(path: Path, line: str) -> SchedulerCore:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise JournalError(
                f"{path} is a journal of another format ({header['format']}); this gswapd reads {FORMAT}."
            )
        if header["snapshot"] is None:
            return SchedulerCore(CoreConfig(**header["config"]))
        return snapshot.load(base64.b64decode(header["snapshot"]))
    except _UNREADABLE as error:
        raise JournalError(f"{path} is no journal of this version of gswapd: {error}.") from error


def _event(kind: str, values: list[Any]) -> events.Event:
    fields: list[Any] = [_model_spec(value) if isinstance(value, dict) else value for value in values]
    return _KINDS[kind](*fields)


def _model_spec(fields: dict[str, Any]) -> events.ModelSpec:
    return events.ModelSpec(**{**fields, "shards": tuple(tuple(shard) for shard in fields["shards"])})
