"""The metrics there are: names, labels and buckets, as data.

`server/metrics.py` feeds those that count, `server/gauges.py` answers for what is true at a scrape, and
`docs/metrics.md` is written from here. Prefix `gswapd_`, base units, vLLM's words where it has one. A label's values
are listed where they are known beforehand: their series exist from the start, at 0, so that a first increase is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, get_args

from scheduler.core.actions import Reason
from scheduler.interface import ModelState

SWAP = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 10)
AGE = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)

FINISHES = ("stop", "length", "cancelled")
REASONS: tuple[str, ...] = (*get_args(Reason), "server_full")
STAGES = ("queue", "drain", "map", "read", "verify", "bind")
READ_PATHS = ("pread", "posix", "gds")

Labels = Mapping[str, tuple[str, ...]]
MODEL: Labels = {"model": ()}
WORKER: Labels = {"group": (), "rank": ()}


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric. `labels` are its labels' known values; none where they are known at run time only."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    labels: Labels = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name that a query uses; of a histogram, without its `_bucket`, `_sum` or `_count`."""
        return f"gswapd_{self.name}_total" if self.kind == "counter" else f"gswapd_{self.name}"

    def series(self, **given: str) -> Iterator[tuple[str, ...]]:
        """The label values that are known beforehand, once those `given` are."""
        yield from product(*(((given[label],) if label in given else values) for label, values in self.labels.items()))


def counter(name: str, text: str, **labels: tuple[str, ...]) -> Family:
    return Family("counter", name, text, labels)


def histogram(name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> Family:
    return Family("histogram", f"{name}_seconds", text, labels, buckets)


def gauge(name: str, text: str, labels: Labels) -> Family:
    return Family("gauge", name, text, labels)


# ---- swaps
SWAP_IN = histogram("swap_in", "Loads, from the first page asked for to the last one in", SWAP, model=())
SWAP_IN_STAGE = histogram(
    "swap_in_stage",
    "Loads, by stage: `queue` for a turn and for busy models and `drain` for page-outs before the first page, then "
    "work summed over threads",
    SWAP,
    model=(),
    stage=STAGES,
)
SWAP_IN_FAILURES = counter("swap_in_failures", "Loads that failed", model=())
SWAP_IN_RELOADS = counter(
    "swap_in_reloads", "Loads begun within a minute after pages of the model were taken for another: thrash", model=()
)
SWAP_IN_BYTES = counter(
    "swap_in_bytes",
    "Bytes paged in, by source; `alias` moves none: another model has the same page in memory",
    source=("alias", "peer", "host", "fan_in", "page_cache", "disk", "posix", "gds"),
)
SWAP_OUTS = counter("swap_outs", "Page-outs, by reason", reason=("memory", "idle", "evicted", "removed"))
SWAP_OUT_PAGES = counter("swap_out_pages", "Pages paged out", model=())
SWAP_OUT = histogram("swap_out", "Page-outs", SWAP, model=())
SWAP_OUT_IDLE = histogram(
    "swap_out_idle", "Age at eviction: how long a model paged out had not been used", AGE, model=()
)
SUSPENSION = histogram("suspension", "Suspensions of a model's running requests for another's sake", SWAP, model=())
SUSPENSION_KEPT_BYTES = counter("suspension_kept_bytes", "Their keys and values moved to host memory", model=())
SUSPENSION_LOST_TOKENS = counter("suspension_lost_tokens", "Their tokens that have to be computed again", model=())

# ---- requests
REQUESTS = counter("requests", "Requests that ended, by how", model=(), outcome=(*FINISHES, *get_args(Reason)))
REQUESTS_REJECTED = counter(
    "requests_rejected",
    "Requests that ended in an error, by reason; `server_full` never reached a queue",
    reason=REASONS,
)
PROMPT_TOKENS = counter("prompt_tokens", "Tokens of prompts", model=())
GENERATION_TOKENS = counter("generation_tokens", "Tokens of answers", model=())
QUEUE_TIME = histogram("request_queue_time", "From arrival to the end of the first forward pass", REQUEST, model=())
LOAD_WAIT = histogram(
    "request_load_wait", "The same of requests that found their model not wholly in memory", REQUEST, model=()
)
FIRST_TOKEN = histogram("time_to_first_token", "From a prompt that is ready to the first token", REQUEST, model=())
INTER_TOKEN = histogram("inter_token_latency", "Between one token and the next, as they leave", TOKEN, model=())
LATENCY = histogram("e2e_request_latency", "From arrival to the end", REQUEST, model=())

# ---- what is true at a scrape
RUNNING = gauge("requests_running", "Requests that take part in forward passes", MODEL)
WAITING = gauge("requests_waiting", "Requests that wait for memory or their turn", MODEL)
OLDEST_WAIT = gauge("oldest_wait_seconds", "Wait so far of the oldest request without a first forward pass", MODEL)
WAIT_BOUND = gauge("wait_bound_seconds", "`scheduler.wait_bound`: after it, a request goes before younger ones", {})
MODEL_STATE = gauge("model_state", "1 for the state a model is in", {"model": (), "state": get_args(ModelState)})
MODEL_PINNED = gauge("model_pinned", "Whether the model is pinned", MODEL)
MODEL_PAGES = gauge("model_pages", "Pages in all, a rank", MODEL)
MODEL_RESIDENT_PAGES = gauge("model_resident_pages", "Pages that are in memory, a rank", MODEL)
MODEL_RESIDENT_BYTES = gauge("model_resident_bytes", "Bytes that are in memory, all ranks", MODEL)
MODEL_PROFILED = gauge(
    "model_profile_timestamp_seconds", "When the profile in use was made (unix time); 0: there is none", MODEL
)
MODEL_KV_FRAMES = gauge("model_kv_frames", "Frames reserved for the model's keys and values, a rank", MODEL)
FRAMES = gauge("frames", "Frames of memory, by use", {**WORKER, "use": ("weights", "kv", "free")})
HOST_TIER_PAGES = gauge(
    "host_tier_pages", "Slots of the host tier, by state", {**WORKER, "state": ("used", "free", "preparing")}
)
HOST_TIER_READS = Family(
    "counter",
    "host_tier_reads",
    "Pages asked of the host tier; the share of `yes` is its hit ratio",
    {**WORKER, "found": ("yes", "no")},
)
WORKER_UP = gauge("worker_up", "Whether the worker is ready", WORKER)
WORKER_READ_PATH = gauge(
    "worker_read_path", "1 for the way in which a worker reads from storage", {**WORKER, "path": READ_PATHS}
)
WORKER_MEMORY = gauge("worker_resident_memory_bytes", "Resident memory of its process", WORKER)
WORKER_STEPS = Family("counter", "worker_steps", "Forward passes since its start", WORKER)
WORKER_RESTARTS = Family("counter", "worker_restarts", "Restarts of a group's worker", WORKER)

FED = tuple(
    family
    for family in list(globals().values())
    if isinstance(family, Family)
    and family.kind != "gauge"
    and family not in (HOST_TIER_READS, WORKER_STEPS, WORKER_RESTARTS)
)
"""Those that count what happens, as it happens."""

ASKED = tuple(family for family in list(globals().values()) if isinstance(family, Family) and family not in FED)
"""Those that are asked for at a scrape."""
