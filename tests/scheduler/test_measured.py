"""From a journal alone, the machine is known well enough for the simulator to repeat what happened on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scheduler.core import actions, events
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.journal import Journal, files
from scheduler.replay import JournalError
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.measured import measure
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import gamma

PAGE = 1_000_000
PAGE_SECONDS, PASS, TOKEN, WAY = 0.02, 0.05, 0.001, 0.004
GROUP = GroupSpec("g0", 25, PAGE, host_rate=PAGE / PAGE_SECONDS, way_seconds=WAY)


class Machine:
    """What is to be found out: a simulated machine that keeps the journal a daemon would keep."""

    def __init__(self, path: Path, most_bytes: int = 1 << 30) -> None:
        self._core = SchedulerCore(CoreConfig(page_bytes=PAGE, extent_pages=1, max_queue=1000, max_queue_total=1000))
        self._journal = Journal(path, most_bytes)
        models = [
            SimulatedModel(ModelSpec(name, (tuple(range(20 * n, 20 * n + 10)),)), PASS, TOKEN)
            for n, name in enumerate("abc")
        ]
        self.simulator = Simulator(self, [GROUP], models)

    def step(self, event: events.Event) -> Sequence[actions.Action]:
        match event:
            case events.Arrived():
                self._journal.asked(event.at, event.request, 5, 1)
            case events.PagedIn():
                self._journal.moved(event.at, event.group, event.model, event.epoch, {"disk": 1})
            case events.Finished():
                self._journal.answered(event.at, event.request, 1, PASS + 5 * TOKEN)
        return self._journal.step(self._core, event)

    def run(self) -> Machine:
        self.simulator.run(gamma(dict.fromkeys("abc", 1.0), 1.0, 60.0, seed=4, prompt=5))
        self._journal.close()
        return self


def test_what_a_journal_tells_repeats_what_happened(tmp_path: Path) -> None:
    was = Machine(tmp_path / "journal").run().simulator.outcome
    found = measure(tmp_path / "journal")
    group = found.groups[0]
    assert group.page_seconds + PAGE / group.host_rate == pytest.approx(PAGE_SECONDS, rel=0.05)
    assert group.way_seconds == pytest.approx(WAY, abs=0.002)
    assert found.models[0].pass_seconds + 5 * found.models[0].token_seconds == pytest.approx(PASS + 5 * TOKEN, rel=0.02)
    again = Simulator(SchedulerCore(found.config), found.groups, found.models).run(found.workload)
    assert np.mean(found.outcome.latencies) == pytest.approx(np.mean(was.latencies))
    assert np.mean(again.latencies) == pytest.approx(np.mean(was.latencies), rel=0.05)
    assert np.percentile(again.latencies, 99) == pytest.approx(np.percentile(was.latencies, 99), rel=0.1)


def test_a_file_that_goes_on_from_another_is_too_little(tmp_path: Path) -> None:
    Machine(tmp_path / "journal", most_bytes=30_000).run()
    with pytest.raises(JournalError, match="too little"):
        measure(files(tmp_path / "journal")[-1])


def test_nothing_is_measured_by_decisions_that_were_others(tmp_path: Path) -> None:
    Machine(tmp_path / "journal").run()
    path = tmp_path / "journal"
    path.write_text(path.read_text().replace('"extent_pages":1', '"extent_pages":2'))
    with pytest.raises(JournalError, match="decided otherwise"):
        measure(path)
