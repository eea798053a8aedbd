"""A recording as a trace that chrome://tracing and Perfetto open: a process a rank, a thread a kind of span."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

THREADS = ("pass", "layer", "all_reduce", "all_gather", "broadcast", "send", "receive")
DETAILS = ("prefilled", "decoded", "context", "paging", "nbytes")


def trace(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Chrome's JSON: times in microseconds."""
    events = [event for rank, recording in enumerate(ranks) for event in _events(rank, recording)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(rank: int, recording: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, name in enumerate(THREADS):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
    for span in recording["spans"]:
        yield {
            "ph": "X",
            "name": f"{span['name']} of {span['model']}" if span["model"] else span["name"],
            "pid": rank,
            "tid": THREADS.index(span["name"]),  # Perfetto wants numbers
            "ts": span["at"] * 1e6,
            "dur": span["seconds"] * 1e6,
            "args": {name: span[name] for name in DETAILS if span[name]},
        }
