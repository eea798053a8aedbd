"""What a simulation found: latencies, page-ins, bytes by source, how busy the processors were, who was in when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]

MOST_CHANGES = 200_000
"""Changes of residency that are kept for the time line; later ones are only counted."""


@dataclass
class ModelOutcome:
    """Of one model. Latencies are from arrival, in seconds."""

    objective: float
    latencies: list[float] = field(default_factory=list)  # to the last token
    first_tokens: list[float] = field(default_factory=list)
    failed: int = 0
    page_ins: int = 0  # loads that were begun
    suspensions: int = 0

    def summary(self) -> dict[str, float]:
        return {**_latency(np.array(self.latencies), self.objective, self.failed), "page_ins": self.page_ins}


@dataclass
class Outcome:
    seconds: float = 0.0
    models: dict[str, ModelOutcome] = field(default_factory=dict)
    bytes_by_source: dict[str, int] = field(default_factory=dict)  # of all ranks
    busy_seconds: dict[str, float] = field(default_factory=dict)  # of each group's processor
    reasons: dict[str, int] = field(default_factory=dict)  # why requests failed
    changes: list[tuple[float, str, str, float]] = field(default_factory=list)  # (at, group, model, share that is in)
    changes_until: float | None = None  # later ones were not kept; None: all were
    events: int = 0

    @property
    def latencies(self) -> Seconds:
        return np.concatenate([np.zeros(0), *(np.array(model.latencies) for model in self.models.values())])

    @property
    def bytes_moved(self) -> int:
        """Into memory, from below: an alias moves none."""
        return sum(nbytes for source, nbytes in self.bytes_by_source.items() if source != "alias")

    def changed(self, at: float, group: str, model: str, share: float) -> None:
        if len(self.changes) < MOST_CHANGES:
            self.changes.append((at, group, model, share))
        elif self.changes_until is None:
            self.changes_until = at

    def summary(self) -> dict[str, object]:
        """As `gswapd simulate` prints it."""
        latencies, met = self.latencies, sum(_met(model) for model in self.models.values())
        failed = sum(model.failed for model in self.models.values())
        return {
            "seconds": round(self.seconds, 3),
            "requests": len(latencies) + failed,
            "failed": failed,
            "reasons": self.reasons,
            **_percentiles(latencies),
            "attainment": round(met / max(1, len(latencies) + failed), 4),
            "page_ins": sum(model.page_ins for model in self.models.values()),
            "suspensions": sum(model.suspensions for model in self.models.values()),
            "bytes": dict(self.bytes_by_source),
            "busy": {group: round(busy / max(self.seconds, 1e-9), 4) for group, busy in self.busy_seconds.items()},
            "models": {name: model.summary() for name, model in self.models.items()},
        }


def _met(model: ModelOutcome) -> int:
    return int(np.count_nonzero(np.array(model.latencies) <= model.objective))


def _latency(latencies: Seconds, objective: float, failed: int) -> dict[str, float]:
    requests = len(latencies) + failed
    met = int(np.count_nonzero(latencies <= objective))
    return {
        "requests": requests,
        "failed": failed,
        **_percentiles(latencies),
        "attainment": round(met / max(1, requests), 4),
    }


def _percentiles(latencies: Seconds) -> dict[str, float]:
    if not len(latencies):
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0, "longest": 0.0}
    p50, p99 = np.percentile(latencies, (50, 99))
    figures: Mapping[str, float] = {"mean": latencies.mean(), "p50": p50, "p99": p99, "longest": latencies.max()}
    return {name: round(float(value), 4) for name, value in figures.items()}
