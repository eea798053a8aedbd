"""What passes took: spans and peaks, kept while somebody has asked for them.

A recorder is always there and off until `begin`. Off, it costs a pass one look at `on`; on, a few tuples. The number
of spans is bounded; what is beyond it is counted, not kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

MOST_SPANS = 1 << 17
"""About 20 MB, and some minutes of a small model's decoding, layer by layer."""


TorchProfiler = Literal["off", "kernels", "trace"]
"""Whether torch's own profiler runs beside a recording, and for what: the kernels of collectives alone, or all it can
tell, which takes much longer."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: a `pass`, a `layer` of one (up to the next layer's page gate), a collective's kind."""

    name: str
    model: str
    at: float  # seconds since the recording began
    seconds: float
    prefilled: int = 0  # of a pass: prompt tokens
    decoded: int = 0  # of a pass: sequences that got one more token of their answer
    sampled: int = 0  # of a pass: rows of logits
    context: int = 0  # of a pass: tokens whose keys and values were attended to
    paging: float = 0.0  # of a pass: seconds in which it waited for pages, not among `seconds`
    nbytes: int = 0  # of a collective


@dataclass(frozen=True, slots=True)
class Recording:
    """One rank's spans, in the order they ended, and `peaks` in bytes (or what their name says). `moved` are calls and
    bytes of each kind of collective, those replayed from CUDA graphs among them, which have no spans.
    """

    seconds: float
    spans: tuple[Span, ...]
    dropped: int
    peaks: Mapping[str, int]
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)  # of the gauge, at the end
    torch_trace: bytes = b""  # torch.profiler's, compressed, if it was asked for


class Gauge(Protocol):
    """What may peak, and what adds up, and who counts it: `worker.memory.MemoryGauge`."""

    def reset(self) -> None: ...

    def now(self) -> Mapping[str, int]: ...

    def readings(self) -> Mapping[str, float]: ...


@dataclass(slots=True)
class Recorder:
    """Any thread may call any method. The gauge is read after every pass that is recorded."""

    gauge: Gauge | None = None
    on: bool = False
    _began: float = 0.0
    _dropped: int = 0
    _spans: list[Span] = field(default_factory=list)
    _peaks: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Record from now on; what was recorded and not taken yet is dropped."""
        if self.gauge is not None:
            self.gauge.reset()
        with self._lock:
            self._spans, self._peaks, self._dropped = [], {}, 0
            self._began, self.on = time.perf_counter(), True

    def end(self) -> Recording:
        """Record no more, and hand over what there is; nothing if it was off."""
        with self._lock:
            if not self.on:
                return Recording(0.0, (), 0, {})
            self.on = False
            spans, self._spans = self._spans, []
            recording = Recording(time.perf_counter() - self._began, tuple(spans), self._dropped, self._peaks)
        return recording if self.gauge is None else replace(recording, readings=self.gauge.readings())

    def add(
        self,
        name: str,
        model: str,
        began: float,
        seconds: float,
        *,
        prefilled: int = 0,
        decoded: int = 0,
        sampled: int = 0,
        context: int = 0,
        paging: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        """`began` is `time.perf_counter`'s."""
        with self._lock:
            if not self.on:
                return
            if len(self._spans) >= MOST_SPANS:
                self._dropped += 1
                return
            at = began - self._began
            self._spans.append(Span(name, model, at, seconds, prefilled, decoded, sampled, context, paging, nbytes))

    def peak(self, **values: int) -> None:
        """Keep the largest of each, and of what the gauge says."""
        if self.gauge is not None:
            values |= self.gauge.now()
        with self._lock:
            for name, value in values.items():
                if self.on and value > self._peaks.get(name, -1):
                    self._peaks[name] = value
