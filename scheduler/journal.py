"""The journal: every event that the scheduler core was given, so that its decisions can be repeated elsewhere.

A journal is a file of JSON lines. The first says what the core was told at its start and, in a file that goes on
from another, what it knew (`snapshot`). Then comes a line an event: a checksum of the actions that it led to, its kind,
and its fields. Between them lie notes, which the core never sees: how long prompts and answers were (never what they
said), and where pages came from. A file that is full becomes `FILE.1`, `FILE.1` becomes `FILE.2`, and so on; the oldest
goes. Each file can be replayed by itself (`scheduler/replay.py`).

Lines go to the page cache, a few at a time. If that fails, the journal ends, with a word in the log, and the daemon
goes on.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from scheduler import snapshot
from scheduler.core import events
from scheduler.core.actions import Action
from scheduler.core.core import SchedulerCore
from swapper.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = 1
NOTE = "note"
KEPT = 4
"""Full files that are kept beside the one that is being written."""


class Journal:
    """Written by the live driver, which alone calls it."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Raises ConfigError if the file cannot be written. One that is there already is kept, as `FILE.1`."""
        self._path = path
        self._most_bytes = most_bytes
        self._written = 0
        self._has_begun = False  # the header of the first file is written
        self._ended = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                shift(path)
            self._file: TextIO = path.open("w")
        except OSError as error:
            raise ConfigError(f"The journal {path} cannot be written: {error.strerror}.") from error

    def step(self, core: SchedulerCore, event: events.Event) -> list[Action]:
        """Have the core take in an event, and write it down, also if the core cannot bear it."""
        if not self._has_begun:
            self._has_begun = True
            self._write(_header(core, None))
        elif self._written > self._most_bytes and not self._ended:
            self._go_on(core)
        digest = None
        try:
            actions = core.step(event)
            digest = checksum(actions)
        finally:
            self._write([digest, type(event).__name__, *_plain(event)])
            if digest is None:
                self.flush()
        return actions

    # ---- notes

    def asked(self, at: float, request: str, prompt_tokens: int, max_tokens: int) -> None:
        self._write([NOTE, "asked", at, request, prompt_tokens, max_tokens])

    def answered(self, at: float, request: str, tokens: int, computing: float) -> None:
        """`computing` is the time of the forward passes that it took part in."""
        self._write([NOTE, "answered", at, request, tokens, computing])

    def moved(self, at: float, group: str, model: str, epoch: int, pages: Mapping[str, int]) -> None:
        """A page-in's pages by source."""
        self._write([NOTE, "moved", at, group, model, epoch, dict(pages)])

    # ----

    def flush(self) -> None:
        if not self._ended:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        self.flush()
        self._ended = True
        self._file.close()

    def _go_on(self, core: SchedulerCore) -> None:
        """In the next file."""
        try:
            self._file.close()
            shift(self._path)
            self._file = self._path.open("w")
        except OSError as error:
            self._end(error)
        self._written = 0
        self._write(_header(core, base64.b64encode(snapshot.save(core)).decode()))

    def _write(self, record: object) -> None:
        if self._ended:
            return
        line = json.dumps(record, separators=(",", ":")) + "\n"
        self._written += len(line)
        try:
            self._file.write(line)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.error("The journal %s ends here: %s", self._path, error)
        self._ended = True
        with suppress(OSError):
            self._file.close()


def checksum(actions: Sequence[Action]) -> int:
    return zlib.crc32(repr(actions).encode())


def files(path: Path) -> list[Path]:
    """A journal's files, oldest first."""
    return [file for number in range(KEPT, -1, -1) if (file := _numbered(path, number)).exists()]


def shift(path: Path) -> None:
    for number in range(KEPT, 0, -1):
        newer = _numbered(path, number - 1)
        if newer.exists():
            newer.replace(_numbered(path, number))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _plain(event: events.Event) -> list[object]:
    """Its fields, in order."""
    values = [getattr(event, name) for name in _FIELDS[type(event)]]
    return [asdict(value) if isinstance(value, events.ModelSpec) else value for value in values]


_FIELDS = {kind: [field.name for field in fields(kind)] for kind in events.Event.__subclasses__()}


def _header(core: SchedulerCore, known: str | None) -> dict[str, object]:
    return {"format": FORMAT, "gswapd": version("gswapd"), "config": asdict(core.config), "snapshot": known}
