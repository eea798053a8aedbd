"""Are bytes those that were packed? Asked of a page that was just read, and of a whole image on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from swapper.errors import HashMismatch
from swapper.geometry import GRANULE_BYTES
from swapper.image import Image, Progress, Shard


def check_granules(shard: Shard, path: Path, start: int, memory: memoryview) -> None:
    """Raise HashMismatch unless `memory` holds the data bytes of a shard from `start` on.

    `start` is a granule's start. `path` is for the message.
    """
    for offset in range(0, len(memory), GRANULE_BYTES):
        granule = (start + offset) // GRANULE_BYTES
        if blake3(memory[offset : offset + GRANULE_BYTES]).hexdigest() != shard.granules[granule]:
            at = shard.data_start + start + offset
            raise HashMismatch(
                f"{path} was changed after it was packed: the 2 MiB at offset {at} do not match their hash. "
                "Add the model again."
            )


@dataclass(frozen=True, slots=True)
class BadGranule:
    """Data bytes `[start, end)` of a rank's shard that are not what was packed, and how."""

    rank: int
    file: Path
    start: int
    end: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: data bytes {self.start:,} to {self.end:,}: {self.reason}"


def verify(image: Image, progress: Progress | None = None) -> tuple[BadGranule, ...]:
    """Hash all granules of all shards; returns those that differ or cannot be read. None means that all is well.

    Reads through the page cache, as the daemon does: what it finds is what would be served.
    """
    total = sum(shard.nbytes for shard in image.manifest.shards)
    done = 0
    bad: list[BadGranule] = []
    for shard in image.manifest.shards:
        path = image.shard_path(shard.rank)
        for index, digest in enumerate(shard.granules):
            start = index * GRANULE_BYTES
            end = min(start + GRANULE_BYTES, shard.nbytes)
            if reason := _fault(path, shard, start, end, digest):
                bad.append(BadGranule(shard.rank, path, start, end, reason))
            done += end - start
            if progress is not None:
                progress(done, total)
    return tuple(bad)


def _fault(path: Path, shard: Shard, start: int, end: int, digest: str) -> str | None:
    """What is wrong with one granule. An unreadable one does not keep the rest from being looked at."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(shard.data_start + start)
            data = file.read(end - start)
    except OSError as error:
        return error.strerror or str(error)
    if data is None or len(data) < end - start:
        return "the file is too short"
    return None if blake3(data).hexdigest() == digest else "the bytes have another hash"
