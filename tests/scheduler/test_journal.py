"""A journal repeats the scheduler's decisions exactly, whatever happened, and holds nothing that was said."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core import events
from scheduler.core.config import CoreConfig
from scheduler.core.core import InvalidTransition, SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.journal import KEPT, Journal, files
from scheduler.replay import Decided, JournalError, Note, replay
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import gamma
from swapper.errors import ConfigError
from tests.scheduler.house import house, served
from tests.scheduler.test_simulate import PAGE, group, model
from tests.scheduler.virtual_time import virtual_time

PLENTY = 1 << 30


class Journaled:
    """A core whose every event is written down."""

    def __init__(self, path: Path, most_bytes: int = PLENTY) -> None:
        self.core = SchedulerCore(CoreConfig(page_bytes=PAGE, extent_pages=1, max_queue=1000, max_queue_total=1000))
        self.journal = Journal(path, most_bytes)

    def step(self, event: events.Event) -> list[object]:
        return self.journal.step(self.core, event)  # type: ignore[return-value]

    def run(self, seconds: float = 60.0) -> int:
        """A busy minute on two groups. Returns how many events it had."""
        workload = gamma({"a": 2.0, "b": 2.0, "c": 1.0}, 2.0, seconds, seed=3)
        models = [model(name, 100 * index, kv_frame_tokens=1) for index, name in enumerate("abc")]
        simulator = Simulator(self, [group("g0"), group("g1", 13)], models, timeout=4.0)  # type: ignore[arg-type]
        simulator.run(workload)
        self.journal.close()
        return simulator.outcome.events


def decisions(path: Path) -> list[Decided]:
    return [line for line in replay(path) if isinstance(line, Decided)]


def test_the_same_events_lead_to_the_same_actions(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    count = Journaled(path).run()
    again = decisions(path)
    assert len(again) == count
    assert all(decided.same for decided in again)
    assert {"PageIn", "PageOut", "GrantKv", "Serve"} <= {type(action).__name__ for d in again for action in d.actions}


def test_a_decision_that_differs_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journaled(path).run()
    path.write_text(path.read_text().replace('"extent_pages":1', '"extent_pages":2'))
    again = decisions(path)
    assert [decided.same for decided in again] == [True] * (len(again) - 1) + [False]
    assert isinstance(again[-1].event, events.Arrived), "the first request pages two pages in at once"


def test_full_files_follow_one_another_each_replays_by_itself_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journaled(path, most_bytes=10_000).run()
    assert len(files(path)) == KEPT + 1
    assert len(list(tmp_path.iterdir())) == KEPT + 1
    last = 0.0
    for file in files(path):
        again = decisions(file)
        assert again[0].event.at >= last
        assert all(decided.same for decided in again)
        last = again[-1].event.at


def test_an_earlier_journal_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journaled(path).run(5.0)
    before = path.read_text()
    Journaled(path).run(1.0)
    assert (tmp_path / "journal.1").read_text() == before


def test_the_event_that_the_core_could_not_bear_is_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journaled = Journaled(path)
    added = events.ModelAdded(1.0, ModelSpec("a", ((1, 2),)))
    journaled.step(added)
    with pytest.raises(InvalidTransition):
        journaled.step(added)
    journaled.journal.close()
    lines = replay(path)
    assert next(lines) == Decided(added, (), same=True)
    with pytest.raises(InvalidTransition, match="is known already"):
        next(lines)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    count = Journaled(path).run(5.0)
    path.write_text(path.read_text()[:-10])
    assert len(decisions(path)) == count - 1


@pytest.mark.parametrize("text", ["", "what?\n", '{"format":9}\n', '{"format":1,"config":{"no":1},"snapshot":null}\n'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(JournalError, match="journal"):
        decisions(path)


def test_a_snapshot_runs_no_code_but_the_schedulers_own(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('harm')",)

    snapshot = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    path = tmp_path / "journal"
    path.write_text(json.dumps({"format": 1, "config": {}, "snapshot": snapshot}) + "\n")
    with pytest.raises(JournalError, match=r"a snapshot holds no builtins\.exec"):
        decisions(path)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("SchedulerCore.step.__globals__.get", "holds no"),
        ("admission", "holds classes"),
        ("Gone", "this version"),
    ],
)
def test_a_snapshot_leads_to_nothing_by_way_of_the_schedulers_own(tmp_path: Path, name: str, match: str) -> None:
    parts = ("scheduler.core.core", name)
    words = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in parts)  # SHORT_BINUNICODE
    snapshot = base64.b64encode(zlib.compress(b"\x80\x04" + words + b"\x93.")).decode()  # STACK_GLOBAL
    path = tmp_path / "journal"
    path.write_text(json.dumps({"format": 1, "config": {}, "snapshot": snapshot}) + "\n")
    with pytest.raises(JournalError, match=match):
        decisions(path)


def test_a_journal_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "file" / "journal", PLENTY)


def test_a_journal_that_fails_later_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(Path("/dev/full"), PLENTY)
    core = SchedulerCore(CoreConfig(page_bytes=PAGE))
    for at in range(3000):
        journal.step(core, events.Tick(float(at)))
    journal.flush()
    assert "ends here: [Errno 28]" in caplog.text
    assert caplog.text.count("ends here") == 1


@virtual_time
async def test_a_live_journal_has_lengths_and_sources_and_no_word_of_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    async with house(served("a", 4), journal=Journal(path, PLENTY)) as here:
        client = here.ask("a", "r1")
        await here.work()
        await here.finish(client, 77_001)
    lines = list(replay(path))
    assert all(line.same for line in lines if isinstance(line, Decided))
    notes = {line.word: line.fields for line in lines if isinstance(line, Note)}
    assert notes["asked"] == ("r1", 3, 8)
    assert notes["moved"][0:2] == (here.group.name, "a")
    assert notes["moved"][3] == {"disk": 2}
    assert "77001" not in path.read_text()


def test_every_kind_of_event_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = ModelSpec("a", ((1, 2), (3, 4)), pp=2, slo=1.5)
    journal = Journal(tmp_path / "journal", PLENTY)
    core = SchedulerCore(CoreConfig(page_bytes=PAGE))
    for event in (events.ModelAdded(1.0, spec), events.ModelChanged(2.0, replace(spec, priority=3))):
        journal.step(core, event)
    journal.close()
    added, changed = (decided.event for decided in decisions(tmp_path / "journal"))
    assert added == events.ModelAdded(1.0, spec)
    assert changed == events.ModelChanged(2.0, replace(spec, priority=3))
