"""Which page contents the frames of a pool hold, by hash: what lets equal pages share a frame.

A content is entered before it is read, so that a second page with the same bytes waits for the first one's
read instead of reading again: there are never two frames with the same content. The table has no lock of its own;
the pager's lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swapper.frames import Frame, FramePool

ContentKey = tuple[str, int]
"""A page's hash and its length."""

Waiter = TypeVar("Waiter")


@dataclass(slots=True, eq=False)
class Content(Generic[Waiter]):
    """The bytes of one page, in a frame, or on their way to it.

    Invariant: `holders` page mappings hold the frame, one of them the reader's while the content is not ready; `loans`
    neighbours read it, which only a ready one has.
    """

    key: ContentKey
    frame: Frame
    holders: int = 1
    ready: bool = False
    loans: int = 0
    leaving: int = 0  # page-outs that wait for its loans, so that it is not lent any more
    waiters: list[Waiter] = field(default_factory=list)  # pages that would alias it once it is ready


@dataclass(frozen=True, slots=True)
class Loan(Generic[Waiter]):
    """Contents that a neighbour reads; their frames are held until it has."""

    contents: tuple[Content[Waiter], ...]

    @property
    def frames(self) -> list[int]:
        return [content.frame.index for content in self.contents]


class ContentTable(Generic[Waiter]):
    """All contents that some page holds."""

    def __init__(self, pool: FramePool) -> None:
        self._pool = pool
        self._contents: dict[ContentKey, Content[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def find(self, key: ContentKey) -> Content[Waiter] | None:
        return self._contents.get(key)

    def add(self, key: ContentKey) -> Content[Waiter]:
        """Enter a content that is about to be read, with a frame for it. Raises OutOfFrames."""
        content: Content[Waiter] = Content(key, self._pool.take())
        self._contents[key] = content
        return content

    def retain(self, content: Content[Waiter]) -> None:
        self._pool.retain(content.frame)
        content.holders += 1

    def lend(self, keys: Iterable[ContentKey]) -> Loan[Waiter] | None:
        """All of these, or None if one is not here."""
        contents = [self._contents.get(key) for key in keys]
        ready = tuple(content for content in contents if content is not None and content.ready and not content.leaving)
        if len(ready) < len(contents):
            return None
        for content in ready:
            self._pool.retain(content.frame)
            content.loans += 1
        return Loan(ready)

    def take_back(self, loan: Loan[Waiter]) -> None:
        for content in loan.contents:
            content.loans -= 1
            self._pool.release(content.frame)

    def release(self, content: Content[Waiter]) -> bool:
        """Give up one hold; returns whether the frame became free. Its page is unmapped already."""
        content.holders -= 1
        if content.holders == 0:
            del self._contents[content.key]
        self._pool.release(content.frame)
        return content.holders == 0
