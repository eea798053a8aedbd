"""Models that are being added while the daemon serves: one process each, of `server/adding.py`.

The store lets one change it at a time, so there is one add at a time; another is refused. What became of an add is
remembered until its name is used again; of the last few.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from server.errors import ApiError
from swapper.store import Store, check_name

logger = logging.getLogger(__name__)

REMEMBERED = 16
LINE_LIMIT = 1 << 20
KILL_AFTER = 5.0  # seconds

STATUSES = {"ModelExists": 409, "StoreBusy": 409, "StoreError": 503}
"""Of what an add may fail with; what is wrong with its source is the request's fault."""


@dataclass(slots=True)
class Add:
    """One add as a person may ask about it."""

    name: str
    source: str
    state: Literal["adding", "added", "failed"]
    began: float  # wall clock
    done_bytes: int = 0
    total_bytes: int = 0  # 0 while the checkpoint is being checked
    error: str | None = None
    kind: str = ""  # class of the error


class Adds:
    """Belongs to the event loop."""

    def __init__(self, store: Path, added: Callable[[], Awaitable[None]]) -> None:
        """`added` is called when a model was added, before whoever asked for it is told."""
        self.known: dict[str, Add] = {}
        self._store = store
        self._added = added
        self._current: Add | None = None
        self._running: asyncio.Task[None] | None = None

    def start(self, name: str, source: str, dtype: str | None, tp: int, pp: int) -> Add:
        """Raises ApiError for what shows at once: another is being added, the name is taken, there is no checkpoint."""
        if self._current is not None:
            message = f"Model {self._current.name!r} is being added; wait for its end."
            raise ApiError(409, message, "store_busy", "name")
        check_name(name)
        if name in Store(self._store).list():
            raise ApiError(409, f"A model named {name!r} is in the store; remove it first.", "model_exists", "name")
        if not os.path.isdir(source):  # false for what cannot be looked at, too
            raise ApiError(400, f"{source} is no directory of this machine.", "invalid_model", "source")
        self._current = add = Add(name, source, "adding", time.time())
        self.known.pop(name, None)
        self.known[name] = add
        while len(self.known) > REMEMBERED:
            del self.known[next(iter(self.known))]
        request = {"store": str(self._store), "source": source, "name": name, "dtype": dtype, "tp": tp, "pp": pp}
        self._running = asyncio.create_task(self._run(add, json.dumps(request)), name=f"add {name}")
        return add

    async def wait(self, add: Add) -> None:
        """Return when it is over. Raises ApiError if it failed."""
        if self._running is not None:
            await asyncio.shield(self._running)
        if add.state == "failed":
            raise ApiError(
                STATUSES.get(add.kind, 400),
                add.error or "",
                "store_busy" if add.kind == "StoreBusy" else "invalid_model",
                "name" if add.kind in STATUSES else "source",
            )

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    async def _run(self, add: Add, request: str) -> None:
        try:
            await self._watch(add, request)
        except asyncio.CancelledError:
            add.state, add.error = "failed", "The daemon was stopped."
            raise
        except Exception as error:  # noqa: BLE001 – it is told below, and to whoever asks
            add.state, add.error, add.kind = "failed", f"Its process could not be followed: {error!r}.", "StoreError"
        finally:
            self._current = self._running = None
        if add.state == "added":
            await self._added()
            logger.info("Model %s was added", add.name)
        else:
            logger.error("Model %s could not be added: %s", add.name, add.error)

    async def _watch(self, add: Add, request: str) -> None:
        """Run the process, and take its last word when it has ended."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "server.adding",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_LIMIT,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request.encode())
            process.stdin.close()
            said: dict[str, Any] = {}
            async for line in process.stdout:
                said = json.loads(line)
                if "total" in said:
                    add.done_bytes, add.total_bytes = said["done"], said["total"]
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()  # the store's next change sweeps what it leaves
                try:
                    await asyncio.wait_for(process.wait(), KILL_AFTER)
                except TimeoutError:
                    process.kill()
        match said:
            case {"added": _}:
                add.state = "added"
            case {"error": str(error), "kind": str(kind)}:
                add.state, add.error, add.kind = "failed", error, kind
            case _:
                add.state, add.error, add.kind = "failed", f"Its process ended with status {status}.", "StoreError"
