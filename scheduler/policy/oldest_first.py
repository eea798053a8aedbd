"""Oldest first: the policy of the scheduler, as pure functions over frozen views.

- Whoever has waited longest is considered first; whatever fits into free memory goes at once, so nobody waits behind
  a demand that has to wait for memory. Requests for a model that runs join it, which gathers same-model work.
- A demand that has waited beyond the wait bound comes before everything younger: the models whose memory it needs
  take no more work until they are done.
- Memory is taken from idle models, the least recently used first, from their tails, no more pages than needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.policy.view import Demand, Holder, Memory, Room, Site, Tail


def in_order(demands: Iterable[Demand]) -> list[Demand]:
    return sorted(demands, key=lambda demand: demand.number)


def overdue_at(demand: Demand, wait_bound: float) -> float:
    """From when on nothing younger may take what this demand needs."""
    return demand.since + wait_bound


def choose_site(sites: Sequence[Site]) -> Site:
    """Where it is pinned, else where room is being made for it (elsewhere it would be made twice), else where most of
    it is already, else where most is free. `sites` is not empty.
    """
    return max(sites, key=lambda site: (site.home, site.target, site.held, site.free))


def make_room(memory: Memory) -> Room:
    """The tails of idle models to page out. Only frames that really become free are counted.

    A page that another model holds too frees nothing, nor does one that the incoming model is made of: it would
    have to be read again.
    """
    frames = _Frames(memory)
    keeps: dict[str, int] = {}
    victims = sorted(memory.idle, key=lambda holder: (holder.used, holder.number))
    for victim in victims:
        keep = victim.pages
        while keep and frames.short > 0:
            keep -= 1
            frames.take(victim, keep)
        keeps[victim.model] = keep
    # A page shared by two victims is free only when both have lost it. Whatever was taken in vain goes back.
    for victim in reversed(victims):
        while keeps[victim.model] < victim.pages and frames.can_spare(victim, keeps[victim.model]):
            frames.put_back(victim, keeps[victim.model])
            keeps[victim.model] += 1
    tails = tuple(Tail(v.model, keeps[v.model]) for v in victims if keeps[v.model] < v.pages)
    return Room(tails, max(0, frames.short))


def who_must_drain(memory: Memory) -> list[str]:
    """The busy models that must take no more work so that the incoming model gets its memory.

    They are chosen in the order in which they came, which does not change while they drain: by least recent use,
    two busy models could take turns in being spared, and neither would ever be done.
    """
    frames = _Frames(memory)
    for victim in memory.idle:
        frames.take_all(victim)
    chosen = []
    for holder in sorted(memory.busy, key=lambda holder: (holder.pinned, holder.number)):
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
        self._memory = memory
        self._short = list(memory.short)
        self._taken: list[dict[int, int]] = [{} for _ in memory.short]
        for holder, keep in memory.leaving:
            for page in range(keep, holder.pages):
                self.take(holder, page)

    @property
    def short(self) -> int:
        """Frames lacking on the worst rank; negative when there are more than enough."""
        return max(self._short)

    def take(self, holder: Holder, index: int) -> None:
        for rank, shard in enumerate(holder.shards):
            page, taken = shard[index], self._taken[rank]
            taken[page] = taken.get(page, 0) + 1
            self._short[rank] -= self._is_freed(rank, page)

    def put_back(self, holder: Holder, index: int) -> None:
        for rank, shard in enumerate(holder.shards):
            page = shard[index]
            self._short[rank] += self._is_freed(rank, page)
            self._taken[rank][page] -= 1

    def can_spare(self, holder: Holder, index: int) -> bool:
        """Whether nothing more would lack if this page stayed."""
        return all(
            self._short[rank] + self._is_freed(rank, shard[index]) <= max(0, self._short[rank])
            for rank, shard in enumerate(holder.shards)
        )

    def take_all(self, holder: Holder) -> None:
        for index in reversed(range(holder.pages)):
            self.take(holder, index)

    def take_kv(self, holder: Holder) -> None:
        self._short = [short - holder.kv for short in self._short]

    def _is_freed(self, rank: int, page: int) -> bool:
        memory = self._memory
        gone = self._taken[rank].get(page, 0) == memory.counts[rank].get(page, 0)
        return gone and page not in memory.incoming[rank]
