"""Recordings: exact counts of passes, layers and tokens, and nothing at all while nobody has asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from engine import recorder as module
from engine.engine import Engine
from engine.recorder import Recorder, Recording
from swapper.host_frames import HostFramePool
from tests.engine.fakes import FakeModel, FakeShard, Reports, request

PAGE = 4096


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def engine(reports: Reports) -> Iterator[Engine]:
    pool = HostFramePool(8, PAGE)
    engine = Engine(pool, reports.emit, max_batch_tokens=4, max_batch_sequences=2)
    engine.add(FakeModel("fake", layers=3), FakeShard(3))  # type: ignore[arg-type]
    engine.grant_kv("fake", 8, 0)
    yield engine
    engine.close()
    pool.close()


def test_a_request_is_recorded_pass_by_pass_and_layer_by_layer(engine: Engine, reports: Reports) -> None:
    engine.recorder.begin()
    engine.submit(request("a", [1, 2, 3, 4, 5, 6], max_tokens=3))
    reports.wait_for("a")
    recording = engine.recorder.end()
    passes = [span for span in recording.spans if span.name == "pass"]
    assert [(its.prefilled, its.decoded, its.context) for its in passes] == [(4, 0, 4), (2, 0, 6), (0, 1, 7), (0, 1, 8)]
    layers = [span for span in recording.spans if span.name == "layer"]
    assert len(layers) == 3 * len(passes)
    assert sum(its.seconds for its in layers) <= sum(its.seconds for its in passes)
    assert {its.model for its in recording.spans} == {"fake"}
    assert recording.peaks == {"kv_frames": 1, "kv_bytes": 16 * 4, "sequences": 1}
    assert recording.dropped == 0


def test_nothing_is_kept_of_what_ran_before_or_after(engine: Engine, reports: Reports) -> None:
    engine.submit(request("before", [1], max_tokens=2))
    reports.wait_for("before")
    engine.recorder.begin()
    assert engine.recorder.end().spans == ()
    engine.submit(request("after", [1], max_tokens=2))
    reports.wait_for("after")
    assert engine.recorder.end().spans == ()


def test_a_recording_is_handed_over_once() -> None:
    recorder = Recorder()
    recorder.begin()
    recorder.add("pass", "m", 0.0, 1.0)
    recorder.peak(frames=3)
    assert recorder.end().peaks == {"frames": 3}
    assert recorder.end() == Recording(0.0, (), 0, {})


def test_spans_are_bounded_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SPANS", 2)
    recorder = Recorder()
    recorder.begin()
    for _ in range(5):
        recorder.add("pass", "m", 0.0, 1.0)
    recording = recorder.end()
    assert (len(recording.spans), recording.dropped) == (2, 3)


def test_peaks_are_the_largest_values_of_what_is_told_and_of_the_gauge() -> None:
    class Gauge:
        values = iter([3, 9, 4])
        resets = 0

        def reset(self) -> None:
            self.resets += 1

        def now(self) -> Mapping[str, int]:
            return {"device": next(self.values)}

        def readings(self) -> Mapping[str, float]:
            return {"joules": 2.5}

    gauge = Gauge()
    recorder = Recorder(gauge)
    recorder.begin()
    for frames in (1, 2, 1):
        recorder.peak(kv_frames=frames)
    recording = recorder.end()
    assert recording.peaks == {"kv_frames": 2, "device": 9}
    assert recording.readings == {"joules": 2.5}
    assert gauge.resets == 1
