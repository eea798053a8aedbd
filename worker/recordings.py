"""Recordings of a worker: what its engine notes, what its collectives have moved, and torch's own profile beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.recorder import Recording, TorchProfiler
from worker.torch_profile import TorchProfile

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.follower import FollowerEngine
    from engine.mesh import Traffic


class Recordings:
    """One at a time: the next one ends the one before."""

    def __init__(self, engine: Engine | FollowerEngine) -> None:
        self._engine = engine
        self._moved_before: Traffic | None = None  # when the recording began
        self._profile: TorchProfile | None = None

    def begin(self, torch_profiler: TorchProfiler) -> None:
        self.end()
        traffic = self._engine.traffic
        self._moved_before = None if traffic is None else traffic.copy()
        self._engine.recorder.begin()
        self._profile = TorchProfile(torch_profiler) if torch_profiler != "off" else None

    def end(self) -> Recording:
        profile, self._profile = self._profile, None
        before, self._moved_before = self._moved_before, None
        trace, kernels = profile.end() if profile is not None else (b"", ())
        recording = self._engine.recorder.end()
        recording = replace(recording, spans=(*recording.spans, *kernels), torch_trace=trace)
        traffic = self._engine.traffic
        if traffic is None or before is None:
            return recording
        kinds = traffic.since(before).kinds
        return replace(recording, moved={kind: (its.calls, its.nbytes) for kind, its in kinds.items()})
