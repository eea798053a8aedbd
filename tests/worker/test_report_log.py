"""The report log: indexed, exactly once, bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from engine.request import Started
from swapper.errors import WorkerError
from worker.report_log import ReportLog

PATIENCE = 20.0


def started(*numbers: int) -> list[Started]:
    return [Started(str(number)) for number in numbers]


def test_a_repeated_read_gives_the_same_reports_again() -> None:
    log = ReportLog()
    log.append(started(0, 1))
    assert log.read(0, 0) == log.read(0, 0) == tuple(started(0, 1))


def test_a_read_acknowledges_everything_before_its_cursor() -> None:
    log = ReportLog()
    log.append(started(0, 1, 2))
    assert log.read(2, 0) == tuple(started(2))
    with pytest.raises(ValueError, match="lost each other"):
        log.read(1, 0)


def test_a_cursor_beyond_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="lost each other"):
        ReportLog().read(1, 0)


def test_every_report_comes_exactly_once_to_a_reader_that_advances() -> None:
    log = ReportLog(limit=8, batch=3)
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(lambda: [log.append(started(number)) for number in range(100)])
        seen: list[str] = []
        while len(seen) < 100:
            reports = log.read(len(seen), PATIENCE)
            assert 0 < len(reports) <= 3
            seen += [report.request for report in reports if isinstance(report, Started)]
        writing.result(PATIENCE)
    assert seen == [str(number) for number in range(100)]


def test_a_read_waits_for_the_first_report() -> None:
    log = ReportLog()
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(log.read, 0, PATIENCE)
        log.append(started(0))
        assert reading.result(PATIENCE) == tuple(started(0))


def test_a_read_returns_empty_handed_after_its_time() -> None:
    assert ReportLog().read(0, 0.01) == ()


def test_a_full_log_holds_its_writer_until_the_reader_acknowledges() -> None:
    log = ReportLog(limit=2)
    log.append(started(0, 1))
    written = Event()
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(lambda: (log.append(started(2)), written.set()))
        assert log.read(0, 0) == tuple(started(0, 1))  # read, but not acknowledged
        assert not written.wait(0.05)
        assert log.read(1, 0) == tuple(started(1))
        writing.result(PATIENCE)
    assert log.read(1, 0) == tuple(started(1, 2))


def test_closing_lets_a_held_writer_and_a_waiting_reader_go() -> None:
    log = ReportLog(limit=1)
    with ThreadPoolExecutor(2) as threads:
        log.append(started(0))
        writing = threads.submit(log.append, started(1))
        reading = threads.submit(log.read, 0, PATIENCE)
        log.close()
        writing.result(PATIENCE)
        assert reading.result(PATIENCE) == tuple(started(0))


def test_a_failed_worker_is_told_to_every_reader_from_then_on() -> None:
    log = ReportLog()
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(log.read, 0, PATIENCE)
        log.fail("it broke")
        log.fail("and broke again")
        with pytest.raises(WorkerError, match="it broke"):
            reading.result(PATIENCE)
    with pytest.raises(WorkerError, match="it broke"):
        log.read(0, 0)
