"""What a group says, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from worker.group import WorkerGroup
from worker.protocol import GroupLost, GroupUp, Report

PATIENCE = 60.0  # seconds after which a wait is a failed test


class Ear:
    def __init__(self, group: WorkerGroup) -> None:
        self._heard: asyncio.Queue[Report | GroupUp | GroupLost] = asyncio.Queue()
        group.subscribe(self._hear)

    def _hear(self, reports: Sequence[Report | GroupUp | GroupLost]) -> None:
        for report in reports:
            self._heard.put_nowait(report)

    async def next(self) -> Report | GroupUp | GroupLost:
        return await asyncio.wait_for(self._heard.get(), PATIENCE)
