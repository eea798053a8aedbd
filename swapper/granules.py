"""Hashes of granules, computed from a stream of data or from memory, and the identity of a page, made of them."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from swapper.geometry import GRANULE_BYTES


class GranuleHasher:
    """Feed it a shard's data in pieces of any size; it cuts them at granule boundaries."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._current = blake3()
        self._filled = 0  # bytes of the current granule, less than GRANULE_BYTES

    def update(self, data: memoryview) -> None:
        while data:
            piece = data[: GRANULE_BYTES - self._filled]
            self._current.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == GRANULE_BYTES:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The digests of all granules; the last one may be shorter than the others."""
        if self._filled:
            self._close()
        return tuple(self._digests)

    def _close(self) -> None:
        self._digests.append(self._current.hexdigest())
        self._current = blake3()
        self._filled = 0


def page_identity(granules: Iterable[str]) -> str:
    """What a page is known by: the hash of its granules' hex digests."""
    return blake3("".join(granules).encode()).hexdigest()


def identity_of(page: memoryview) -> str:
    """The identity of the page that holds these bytes."""
    return page_identity(
        blake3(page[start : start + GRANULE_BYTES]).hexdigest() for start in range(0, len(page), GRANULE_BYTES)
    )
