"""Which pages of the victims go: exactly as many as free the frames that lack, tails first.

A page that another model holds too frees nothing, nor does one that the incoming model is made of: it would have to be
read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.policy.view import Holder, Memory, Room, Tail


def make_room(memory: Memory, victims: Sequence[Holder], whole: bool = False) -> Room:
    """The tails of `victims` to page out, the first victim's first. `whole`: models go whole or not at all."""
    if all(victim.is_alone for victim in victims) and all(holder.is_alone for holder, _ in memory.leaving):
        return _count_room(memory, victims, whole)
    frames = _Frames(memory)
    keeps: list[tuple[Holder, int]] = []
    for victim in victims:
        if frames.short <= 0:
            break
        keep = victim.pages
        while keep and (frames.short > 0 or (whole and keep < victim.pages)):
            keep -= 1
            frames.take(victim, keep)
        keeps.append((victim, keep))
    if not whole:
        keeps = [(victim, frames.spare(victim, keep)) for victim, keep in reversed(keeps)][::-1]
    return [(victim.model, keep) for victim, keep in keeps if keep < victim.pages], max(0, frames.short)


def _count_room(memory: Memory, victims: Sequence[Holder], whole: bool) -> Room:
    """The same, where each page that goes is a frame on every rank."""
    short = max(memory.short) - sum(holder.pages - keep for holder, keep in memory.leaving)
    tails: list[Tail] = []
    for victim in victims:
        if short <= 0:
            break
        taken = victim.pages if whole else min(short, victim.pages)
        short -= taken
        if taken:
            tails.append((victim.model, victim.pages - taken))
    return tails, max(0, short)


def who_must_drain(memory: Memory, idle: Iterable[Holder], busy: Iterable[Holder]) -> list[str]:
    """The busy models that must take no more work so that the incoming model gets its memory, beside all idle ones.

    They are chosen in the order in which they came, which does not change while they drain: by least recent use,
    two busy models could take turns in being spared, and neither would ever be done.
    """
    frames = _Frames(memory)
    for victim in idle:
        frames.take_all(victim)
    chosen = []
    for holder in sorted(busy, key=lambda holder: (holder.pinned, holder.priority, holder.number)):
        if frames.short <= 0:
            break
        if not holder.pinned:
            frames.take_all(holder)
        frames.take_kv(holder)
        chosen.append(holder.model)
    return chosen


class _Frames:
    """Counts what becomes free on each rank as pages are taken, page by page."""

    def __init__(self, memory: Memory) -> None:
        self._short = list(memory.short)
        self._taken: list[dict[int, int]] = [{} for _ in memory.short]
        # Of a rank: what was taken of its pages, how often each is held, and what the incoming model is made of.
        self._ranks = list(zip(self._taken, memory.counts, memory.incoming, strict=True))
        for holder, keep in memory.leaving:
            for page in range(keep, holder.pages):
                self.take(holder, page)

    @property
    def short(self) -> int:
        """Frames lacking on the worst rank; negative when there are more than enough."""
        return max(self._short) if len(self._short) > 1 else self._short[0]

    def take(self, holder: Holder, index: int) -> None:
        for rank, (taken, counts, incoming) in enumerate(self._ranks):
            page = holder.shards[rank][index]
            count = taken[page] = taken.get(page, 0) + 1
            if count == counts.get(page, 0) and page not in incoming:
                self._short[rank] -= 1

    def spare(self, holder: Holder, keep: int) -> int:
        """Give back what was taken in vain: a page that two victims share is free only when both have lost it."""
        while keep < holder.pages and self._can_spare(holder, keep):
            for rank, shard in enumerate(holder.shards):
                self._short[rank] += self._is_freed(rank, shard[keep])
                self._taken[rank][shard[keep]] -= 1
            keep += 1
        return keep

    def _can_spare(self, holder: Holder, index: int) -> bool:
        for rank, shard in enumerate(holder.shards):
            if self._short[rank] >= 0 and self._is_freed(rank, shard[index]):
                return False
        return True

    def take_all(self, holder: Holder) -> None:
        for index in reversed(range(holder.pages)):
            self.take(holder, index)

    def take_kv(self, holder: Holder) -> None:
        self._short = [short - holder.kv for short in self._short]

    def _is_freed(self, rank: int, page: int) -> bool:
        taken, counts, incoming = self._ranks[rank]
        return taken.get(page, 0) == counts.get(page, 0) and page not in incoming
