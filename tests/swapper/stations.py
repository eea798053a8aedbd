"""A worker's memory without its engine: a pager with a host tier and neighbours, here or in a process of its own.

    python -m tests.swapper.stations NAME DIRECTORY FRAMES

obeys lines of standard input, and answers each with one line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swapper.copier import HostCopier
from swapper.host_frames import HostFramePool
from swapper.host_tier import HostTier
from swapper.pager import PagedShard, Pager
from swapper.peer_frames import HostWindow
from swapper.peer_link import PeerLink
from swapper.peers import RING_FRAMES, Peers
from swapper.pread import PreadReader
from swapper.tier_arena import Arena
from tests.swapper.paging import PAGE, PATIENCE, page_in, resident_bytes, write_shard

ROOT = Path(__file__).parents[2]
SHARDS = "shards"


class Station:
    """Everything of one worker but its engine."""

    def __init__(self, name: str, directory: Path, frames: int, tier_slots: int = 0) -> None:
        self.directory = directory
        self.pool = HostFramePool(frames, PAGE)
        self.ring = HostFramePool(RING_FRAMES, PAGE)
        self.copier = HostCopier(2)
        self.peers = Peers(directory / "peers", name, "cpu", self.pool, self.ring, self.copier, HostWindow)
        self.tier = None
        if tier_slots:
            self.tier = HostTier(Arena(name, tier_slots, PAGE, directory), HostCopier(2), self.peers)
            assert self.tier.wait_settled(PATIENCE)
        self.reader = PreadReader(2)
        self.pager = Pager(self.pool, self.reader, tier=self.tier, peers=self.peers)

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *_: object) -> None:
        self.pager.shutdown()
        self.reader.close()
        if self.tier is not None:
            self.tier.close()
        self.copier.close()
        assert self.pool.free == self.pool.frames, "every frame came back"
        assert self.ring.free == self.ring.frames
        self.pool.close()
        self.ring.close()

    def know(self, model: str, tags: Sequence[int], tail: int = PAGE) -> PagedShard:
        """Open a shard of these pages."""
        path = self.directory / f"{model}.safetensors"
        return self.pager.open(model, write_shard(path, tags, tail), path)

    def bring_in(self, shard: PagedShard) -> dict[str, int]:
        """Page all of it in; returns how many pages came from where."""
        result = page_in(self.pager, shard.model, 0, shard.page_count)
        return {source: its.pages for source, its in sorted(result.sources.items())}

    def link(self, name: str) -> PeerLink | None:
        return next((link for link in self.peers.links if link.name == name), None)

    def meet(self, name: str, staging: bool = False) -> PeerLink:
        """Wait until a neighbour is there; with `staging`, until it can stage from the host tier."""

        def met() -> bool:
            link = self.link(name)
            return link is not None and link.is_usable and (link.can_stage or not staging)

        until(met)
        link = self.link(name)
        assert link is not None
        return link


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Neighbour:
    """A station in another process."""

    def __init__(self, name: str, directory: Path, frames: int) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.swapper.stations", name, str(directory), str(frames)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, *words: object) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().strip()
        assert answer, "the neighbour is dead"
        return answer

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)


def main(name: str, directory: Path, frames: int) -> None:
    """Obey `in MODEL TAG…`, `out MODEL`, `meet NAME`."""
    with Station(name, directory, frames) as station:
        shards: dict[str, PagedShard] = {}
        for line in sys.stdin:
            match line.split():
                case ["in", model, *tags]:
                    shards[model] = station.know(f"{name}-{model}", [int(tag) for tag in tags])
                    print(station.bring_in(shards[model]), flush=True)
                case ["out", model]:
                    print(station.pager.page_out(shards[model].model, 0), flush=True)
                case ["meet", other]:
                    print(station.meet(other).name, flush=True)
                case ["hash", model]:
                    print(hash(resident_bytes(shards[model])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
