"""A simulated group's memory: which pages are in, and its one link, which brings page-ins in the order asked for.

A page comes from the cheapest source there is, as the real pager has it: another model's frame with the same content
(`alias`), the host tier (`host`, least recently used pages leave), or storage, whose rate the node's groups share.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler.core import actions, events
from scheduler.simulate.hardware import GroupSpec, SharedLink, SimulatedModel

if TYPE_CHECKING:
    from scheduler.simulate.simulator import Simulator


class SimulatedMemory:
    def __init__(
        self, spec: GroupSpec, models: Mapping[str, SimulatedModel], storage: SharedLink, simulator: Simulator
    ) -> None:
        self._spec = spec
        self._models = models
        self._storage = storage
        self._simulator = simulator
        self._asked: deque[actions.PageIn] = deque()  # the first of them is being read
        self._resident: dict[str, int] = {}
        self._held: dict[int, int] = {}  # of the first rank: page identity → how often it is mapped
        self._tier: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def share(self, model: str) -> float:
        """Of a model's pages, those that are in."""
        return self._resident.get(model, 0) / self._models[model].pages

    def copy_seconds(self, frames: int) -> float:
        """To move so many frames' bytes to host memory, or from there."""
        return frames * self._spec.page_bytes / self._spec.host_rate

    # ---- out

    def page_out(self, action: actions.PageOut) -> None:
        resident = self._resident.get(action.model, 0)
        for page in self._models[action.model].spec.shards[0][action.keep : resident]:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
        self._change(action.model, min(resident, action.keep))
        simulator = self._simulator
        simulator.at(simulator.now + self._spec.unmap_seconds, self._paged_out, action)

    def _paged_out(self, action: actions.PageOut) -> None:
        simulator = self._simulator
        simulator.tell(events.PagedOut(simulator.now, action.group, action.model, action.epoch, action.keep))

    # ---- in

    def page_in(self, action: actions.PageIn) -> None:
        if all(other.model != action.model for other in self._asked):
            self._simulator.outcome.models[action.model].page_ins += 1
        self._asked.append(action)
        if len(self._asked) == 1:
            self._read()

    def _read(self) -> None:
        """Begin the first page-in that was asked for: its pages of the host tier, then those of storage."""
        action, spec = self._asked[0], self._spec
        alias = host = storage = 0
        held = self._held
        for page in self._models[action.model].spec.shards[0][action.first : action.last]:
            mapped = held.get(page, 0)
            held[page] = mapped + 1
            if mapped:
                alias += 1
            elif self._is_in_host_tier(page):
                host += 1
            else:
                storage += 1
        moved, page_bytes = self._simulator.outcome.bytes_by_source, spec.page_bytes * spec.ranks
        moved["alias"] = moved.get("alias", 0) + alias * page_bytes
        moved["host"] = moved.get("host", 0) + host * page_bytes
        moved["storage"] = moved.get("storage", 0) + storage * page_bytes
        pages = action.last - action.first
        seconds = pages * spec.page_seconds + host * spec.page_bytes / spec.host_rate
        stored = storage * spec.page_bytes / spec.storage_rate if storage else 0.0
        self._simulator.at(self._simulator.now + seconds, self._read_stored, stored)

    def _is_in_host_tier(self, page: int) -> bool:
        """Where it is from now on, in any case."""
        if not self._spec.storage_rate:
            return True
        found = page in self._tier
        if self._spec.host_pages:
            self._tier[page] = None
            self._tier.move_to_end(page)
            if len(self._tier) > self._spec.host_pages:
                self._tier.popitem(last=False)
        return found

    def _read_stored(self, work: float) -> None:
        if work:
            self._foretell(self._storage.begin(self._simulator.now, work, self))
        else:
            self._paged_in()

    def _foretell(self, end: float) -> None:
        self._simulator.at(end, self._storage_end, self._storage.version)

    def _storage_end(self, version: int) -> None:
        """A transfer of the node ends: perhaps another group's."""
        if version != self._storage.version:
            return
        whose, following = self._storage.end(self._simulator.now)
        if following is not None:
            self._foretell(following)
        assert isinstance(whose, SimulatedMemory)
        whose._paged_in()

    def _paged_in(self) -> None:
        action, simulator = self._asked.popleft(), self._simulator
        if self._asked:
            self._read()
        self._change(action.model, action.last)
        simulator.pages_changed(self._spec.name, action.model)
        simulator.tell(events.PagedIn(simulator.now, action.group, action.model, action.epoch, action.last))

    def _change(self, model: str, resident: int) -> None:
        self._resident[model] = resident
        self._simulator.outcome.changed(self._simulator.now, self._spec.name, model, self.share(model))
