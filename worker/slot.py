"""What a shard's thread knows of one model: its image, its pages on their way, its module, and what waits for that."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.model import ModelRunnerProtocol
from swapper.image import Image
from swapper.pager import PagedShard, PageInResult
from worker.protocol import FailPageIn, GrantKv, PageIn, Resume, Serve, Suspend


@dataclass(frozen=True, slots=True)
class Bound:
    """A finished bind."""

    module: ModelRunnerProtocol
    seconds: float


@dataclass(eq=False, slots=True)
class ModelSlot:
    """One model of a worker. Touched by the shard's thread alone.

    A model is *known* (nothing but a path), then *open* (image read, region reserved) from its first page-in, then
    *bound* (the engine has its module), and stays bound until it is removed, whatever its pages do.
    """

    name: str
    path: str
    identity: str
    image: Image | None = None
    paged: PagedShard | None = None  # open
    binding: Future[Bound] | None = None  # under way; None before and after
    bound: Bound | None = None
    bind_failure: str | None = None  # why there is no module; told by the last page-in under way, or else by the next
    bind_told: bool = False  # whether a PagedIn has told the bind's seconds
    page_ins: list[PageIn] = field(default_factory=list)  # begun, not ended; oldest first
    whole: list[tuple[PageInEnded, PageInResult]] = field(default_factory=list)  # of the last page; the bind goes on
    failed: bool = False  # the last page-in failed, and no new one was begun at page 0
    told_in: set[int] = field(default_factory=set)  # epochs of page-ins that PagedIn has told of, since the first page
    undone: list[FailPageIn] = field(default_factory=list)  # page-ins that failed on other ranks; to be told
    deferred: deque[Serve | GrantKv | Suspend | Resume] = field(
        default_factory=deque
    )  # what the engine gets once the model is bound

    @property
    def doom(self) -> str | None:
        """Why page-ins under way are to fail, however well they end."""
        return self.undone[0].message if self.undone else self.bind_failure

    @property
    def is_loading(self) -> bool:
        return bool(self.page_ins or self.whole)

    @property
    def is_busy(self) -> bool:
        return self.is_loading or self.binding is not None

    def find_deferred(self, request: str) -> Serve | None:
        return next((item for item in self.deferred if isinstance(item, Serve) and item.request.id == request), None)


@dataclass(frozen=True, slots=True)
class PageInEnded:
    """What a page-in came to. Goes through the shard's inbox."""

    slot: ModelSlot
    command: PageIn
    began: float
    result: PageInResult | Exception


@dataclass(frozen=True, slots=True)
class BindEnded:
    """What a bind came to. Goes through the shard's inbox."""

    slot: ModelSlot
    binding: Future[Bound]
