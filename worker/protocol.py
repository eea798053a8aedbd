"""What the daemon tells a worker and what a worker tells back: plain data, no torch, no Ray.

Commands are obeyed in the order they were posted. Reports come back in one indexed stream a worker: `poll`
names the first index it has not seen, which acknowledges everything before it, so that a report is
delivered exactly once however often a poll is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.request import EngineReport, Request
from swapper.host_tier import TierStatus
from swapper.pager import SourceBytes
from swapper.peer_link import PeerStatus

# ---- commands


@dataclass(frozen=True, slots=True)
class AddModel:
    """Know a model by its image directory. Cheap: the module is built at the first page-in.

    A page-in fails if another image has taken that place since: `identity` is `swapper.image.Image.identity`.
    """

    model: str
    path: str
    identity: str


@dataclass(frozen=True, slots=True)
class RemoveModel:
    """Forget a model; the scheduler has paged it out before."""

    model: str


@dataclass(frozen=True, slots=True)
class PageIn:
    """Bring pages `[first, last)` of the model's shard in. Answered by PagedIn or PageInFailed with the same epoch."""

    model: str
    first: int
    last: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FailPageIn:
    """A page-in that this rank was asked for, too, failed on another rank: the model is to be absent here as well.

    Answered by PageInFailed with the same epoch, also after a PagedIn; by nothing where it failed by itself.
    """

    model: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class PageOut:
    """Keep pages `[0, keep)` only. Answered by PagedOut or PageOutFailed with the same epoch."""

    model: str
    keep: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantKv:
    """The model's KV cache may hold up to `frames` frames. Answered by KvReleased with the same epoch."""

    model: str
    frames: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """Stop the model's requests between two passes and give all its KV frames up. Answered by Suspended."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Let them go on, with a grant of KV frames; pages may still be on their way. Answered by Resumed."""

    model: str
    kv_frames: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Run a request. Its pages may still be on their way."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request. Answered by Tokens with finish "cancelled", unless it had ended already."""

    request: str


Command = AddModel | RemoveModel | PageIn | FailPageIn | PageOut | GrantKv | Suspend | Resume | Serve | Cancel

# ---- reports (and the engine's own: see engine/request.py)


@dataclass(frozen=True, slots=True)
class PagedIn:
    """Pages `[first, last)` are in. `stages` are seconds by stage: map, read, verify, bind."""

    model: str
    first: int
    last: int
    epoch: int
    seconds: float
    sources: Mapping[str, SourceBytes]
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PageInFailed:
    """The page-in failed; the model is absent, its frames are free, its running requests were dropped."""

    model: str
    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class PagedOut:
    """Pages `[keep, …)` are out and `frames` frames became free."""

    model: str
    keep: int
    epoch: int
    frames: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PageOutFailed:
    """Nothing was unmapped."""

    model: str
    epoch: int
    message: str


Report = EngineReport | PagedIn | PageInFailed | PagedOut | PageOutFailed


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's vital signs, sent with every batch of reports."""

    steps: int  # forward passes done
    pages_read: int  # pages that ever arrived
    computing: bool  # whether a forward pass or a command is under way
    paging: bool  # whether a page-in is under way
    frames: int
    frames_free: int
    resident_bytes: int  # of the process, as the kernel counts it
    tier: TierStatus | None = None  # None: there is no host tier
    peers: tuple[PeerStatus, ...] = ()  # the neighbours


@dataclass(frozen=True, slots=True)
class Batch:
    """Reports `[index, index + len(reports))` of the stream."""

    index: int
    reports: tuple[Report, ...]
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker is started with."""

    group: str
    rank: int
    frames: int
    page_bytes: int
    tp: int = 1  # the group's mesh: `tp * pp` ranks, rank = stage * tp + its place within the stage
    pp: int = 1
    rendezvous: str = ""  # "host:port" at which the leader of this life listens to the others
    node: str | None = None  # the address of the Ray node to run on; None: any
    device: str = "cpu"  # or "cuda"; "auto" becomes one of them when the worker is started
    pool_share: float | None = None  # of a GPU's free memory: how many frames it has, instead of `frames`
    tier_bytes: int = 0  # of the host tier; 0: there is none
    tier_name: str = ""  # by which a restarted worker finds its host tier
    peers: str = ""  # the directory in which the workers of a node meet, to lend to each other; "": they do not
    tiers: frozenset[str] = frozenset()  # the names of all of the daemon's, which are not to be removed as orphans
    store: str = ""  # the model store's directory
    images: Mapping[str, str] = field(default_factory=dict)  # what must be in it: models and their images' identities
    verify: bool = False
    reader: str = "auto"  # or "pread", "kvikio"
    read_rate: float | None = None  # bytes a second from storage, at most
    read_threads: int | None = None  # as many as suit the reader
    compute_threads: int = 1
    max_batch_tokens: int = 512  # prefill chunk plus decodes of one forward pass
    max_batch_sequences: int = 64
    graphs: bool = True  # decodes may run from CUDA graphs
    attention: str = "fused"  # or "plain"
    suspended_bytes: int = 0  # of host memory, for keys and values of suspended requests


# ---- what the daemon's side learns about a group


@dataclass(frozen=True, slots=True)
class GroupUp:
    """The group's workers are ready and empty. Models must be added again; those that were packed for its mesh run."""

    frames: int  # of its smallest rank
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The group is gone; the client is restarting it. Nothing posted before will be answered."""

    message: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as a person may ask about it."""

    group: str
    rank: int
    state: Literal["starting", "up", "down"]
    pid: int | None
    restarts: int
    device: str  # "cpu", "cuda:0"
    reader: str
    heartbeat: Heartbeat | None
    heartbeat_age: float | None  # seconds
    tp: int = 1
    pp: int = 1
    node: str = ""  # the address of the node it is on
    reason: str | None = None  # why it is not up


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """What a worker says of itself once it can take commands."""

    device: str
    reader: str  # "pread", "kvikio/gds", "kvikio/posix": the path that is really in use
    frames: int
