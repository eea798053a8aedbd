"""Traces as Perfetto wants them: processes and threads are numbers, and have names."""

from __future__ import annotations

import json
from dataclasses import asdict

from engine.recorder import Span
from server.profile.trace import trace


def test_spans_are_told_by_rank_and_kind() -> None:
    spans = [
        asdict(Span("layer", "m", 0.5, 0.25)),
        asdict(Span("all_reduce", "", 0.5, 0.125, nbytes=64)),
        asdict(Span("pass", "m", 0.5, 1.0, decoded=2)),
    ]
    events = json.loads(trace([{"spans": []}, {"spans": spans}]))["traceEvents"]
    assert all(type(event.get("tid", 0)) is int and type(event["pid"]) is int for event in events)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    told = [(names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert told == [
        ("layer", "layer of m", 5e5, 2.5e5, {}),
        ("all_reduce", "all_reduce", 5e5, 1.25e5, {"nbytes": 64}),
        ("pass", "pass of m", 5e5, 1e6, {"decoded": 2}),
    ]
