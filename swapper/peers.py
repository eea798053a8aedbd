"""The neighbours of a worker: the other workers of its node, each with a GPU and a link of its own.

They are good for two things. **Peer source**: a page that a neighbour holds comes over NVLink, seven times as fast as
over the bus. **Fan-in**: a neighbour that pages nothing in itself copies pages of our host tier over its own link into
its staging ring, and NVLink carries them on; so a model that lives on one GPU is paged in over the links of several.

Workers find one another by their sockets in one directory. Each lends to all others (`swapper/peer_lender.py`) and
asks all others (`swapper/peer_link.py`). None of this is ever needed: whatever a neighbour does not do, or not in
time, is done without it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from swapper.contents import ContentKey
from swapper.copier import Copier
from swapper.errors import ConfigError
from swapper.frames import FramePool
from swapper.peer_frames import OpenWindow
from swapper.peer_lender import Lender, PeerServer
from swapper.peer_link import PeerLink, PeerStatus
from swapper.peer_protocol import KEYS_AT_ONCE, VERSION, Hello, Offer

PEERS_DEPTH, PEERS_RUN = 32, 8
"""What suits a pager with neighbours on GPUs: pages in flight, and how many are mapped together and read at once. Over
two H200's links, pages came at 87 GB/s with these and at 73 with 16 and 4; from a neighbour at 328 GB/s, and at 254."""

RING_FRAMES = 8
"""Frames of the staging ring: enough that a link never waits for one to come back."""

STAGES_A_LINK = 8
"""Pages that one neighbour is asked to stage at a time."""

LOOK_INTERVAL = 1.0
"""Seconds between looks for neighbours that came, or came back."""

logger = logging.getLogger(__name__)


class Holders:
    """Which neighbours hold which pages of one page-in, as far as they have answered."""

    def __init__(self, answers: int, tell: Callable[[], None]) -> None:
        """`tell` is called when that many answers have come."""
        self._lock = threading.Lock()
        self._missing = answers
        self._tell = tell
        self._links: dict[ContentKey, PeerLink] = {}

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def find(self, key: ContentKey) -> PeerLink | None:
        return self._links.get(key)

    def add(self, link: PeerLink | None, keys: Iterable[ContentKey]) -> None:
        with self._lock:
            if link is not None:
                for key in keys:
                    self._links.setdefault(key, link)
            self._missing -= 1
            complete = not self._missing
        if complete:
            self._tell()


class Peers:
    """Every method may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        name: str,
        device: str,
        pool: FramePool,
        ring: FramePool,
        copier: Copier,
        open_window: OpenWindow,
    ) -> None:
        """`name` is this worker's in `directory`; `ring` has the frames to stage in.

        The pools and the copier, which is for nothing else, are closed by who made them, after this.
        """
        self._directory = directory
        self._pool = pool
        self._ring = ring
        self._copier = copier
        self._open_window = open_window
        self._me = Hello(VERSION, name, device, pool.page_bytes)
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._offer: Offer | None = None
        self._server: PeerServer | None = None
        self._stopping = threading.Event()
        self._looking = threading.Thread(target=self._look, name="peers", daemon=True)

    @property
    def links(self) -> tuple[PeerLink, ...]:
        return tuple(self._links.values())

    @property
    def status(self) -> tuple[PeerStatus, ...]:
        return tuple(link.status for link in self.links)

    def open(self, lender: Lender) -> None:
        """Lend what `lender` has, and look for neighbours from now on. Raises ConfigError if that cannot be."""
        try:
            _private_directory(self._directory)
            path = self._directory / f"{self._me.name}.sock"
            self._server = PeerServer(path, self._me, lender, self._pool, self._ring, self._copier)
        except OSError as error:
            raise ConfigError(f"Workers cannot meet in {self._directory}: {error}.") from error
        self._looking.start()

    def close(self) -> None:
        """Take back what is lent, and return when nothing is read from neighbours any more."""
        self._stopping.set()
        if self._server is None:
            return
        self._looking.join()
        for link in self.links:
            link.close()
        self._server.close()

    def offer(self, path: Path, start: int, nbytes: int) -> None:
        """Have neighbours stage from our host tier, which is ready: `nbytes` of a file, from `start` on."""
        with self._lock:
            self._offer = Offer(str(path), start, nbytes)
            links = self.links
        for link in links:
            link.offer(self._offer)

    def locate(self, keys: Sequence[ContentKey], tell: Callable[[], None]) -> Holders:
        """Ask who holds these pages. `tell` is called when all have answered, or had time to."""
        links = [link for link in self.links if link.is_usable]
        parts = [keys[first : first + KEYS_AT_ONCE] for first in range(0, len(keys), KEYS_AT_ONCE)]
        holders = Holders(len(links) * len(parts), tell)
        for link in links:
            for part in parts:
                if not link.who(part, _adding(holders, link)):
                    holders.add(None, ())
        return holders

    def stage(self, offset: int, nbytes: int, target: int, own: int) -> Future[float] | None:
        """Have a page of our host tier come over the link with the least to do. None: our own, which has `own` pages.

        The future raises NotLent or DeviceError where the page must be copied over our own after all.
        """
        links = [link for link in self.links if link.can_stage and link.stages < min(own, STAGES_A_LINK)]
        if not links:
            return None
        return min(links, key=lambda link: link.stages).stage(offset, nbytes, target)

    # ---- finding neighbours

    def _look(self) -> None:
        while not self._stopping.is_set():
            for path in self._directory.glob("*.sock"):
                if path.stem != self._me.name:
                    self._connect(path)
            self._stopping.wait(LOOK_INTERVAL)

    def _connect(self, path: Path) -> None:
        with self._lock:
            if path.stem in self._links:
                return
            link = self._links[path.stem] = PeerLink(path, self._me, self._open_window, self._copier, self._ended)
            if self._offer is not None:
                link.offer(self._offer)

    def _ended(self, link: PeerLink) -> None:
        with self._lock:
            if self._links.get(link.name) is link:
                del self._links[link.name]


def _adding(holders: Holders, link: PeerLink) -> Callable[[Sequence[ContentKey]], None]:
    return lambda keys: holders.add(link, keys)


def _private_directory(directory: Path) -> None:
    """Make a directory that nobody else can put anything into. Raises OSError if it is somebody else's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
