"""Planted faults: small changes of the core's source, each of which `SchedulerMachine` must notice.

A fault is written as the text that it replaces. `core_with` loads the core anew with that text changed, beside
the real one, so that nothing else sees it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    old: str
    new: str


_SHARED = tuple(f"scheduler.core.{name}" for name in ("events", "actions", "config", "transitions"))
"""Modules that the mutated core has in common with the tests: the words that both speak."""

NO_CHANGE = Mutant("nothing is changed", "scheduler.core.kv", "self.granted = frames", "self.granted = frames")
"""The control: loaded like a mutant, it must pass."""


MUTANTS = [
    Mutant(
        "what time changes of the rank of what is in is not looked at",
        "scheduler.core.wanted",
        "        if rank.until < demand.again_at:\n            self._look_again(demand)\n        if want.is_in:",
        "        if rank.until < demand.again_at and not want.is_in:\n            self._look_again(demand)\n"
        "        if want.is_in:",
    ),
    Mutant(
        "frames are free as soon as a page-out is asked for",
        "scheduler.core.state",
        "        self.actions.append(PageOut(",
        "        self.release(self.groups[placement.group], placement, keep)\n        self.actions.append(PageOut(",
    ),
    Mutant(
        "KV frames are free as soon as a grant is lowered",
        "scheduler.core.kv",
        "self.reserved = max(self.reserved, frames)",
        "self.reserved = frames",
    ),
    Mutant(
        "a page-in's epoch is not looked at",
        "scheduler.core.placement",
        "            if extent.epoch == epoch:\n",
        "            if True:\n",
    ),
    Mutant(
        "a page-out's epoch is not looked at",
        "scheduler.core.completions",
        "leaving.epoch != event.epoch:\n        return\n    placement.follow(Signal.TAIL_OUT",
        "leaving.epoch < 0:\n        return\n    placement.follow(Signal.TAIL_OUT",
    ),
    Mutant(
        "pinned models are victims",
        "scheduler.core.frames",
        "placement.can_page_out(now) and name not in pinned",
        "placement.can_page_out(now)",
    ),
    Mutant(
        "a model is paged out under running requests",
        "scheduler.core.placement",
        " or (self.running and not self.is_suspended):",
        ":",
    ),
    Mutant(
        "a model is paged out during its page-in",
        "scheduler.core.placement",
        "(Phase.PARTIAL, Phase.RESIDENT)",
        "(Phase.LOADING, Phase.PARTIAL, Phase.RESIDENT)",
    ),
    Mutant(
        "a shared page is free when one of its holders gives it up",
        "scheduler.core.ledger",
        "held[page] -= 1\n                if not held[page]:\n                    del held[page]",
        "held.pop(page, None)",
    ),
    Mutant(
        "shared pages are counted once a model",
        "scheduler.core.ledger",
        "len(set(shard[first:last]).difference(held))",
        "len(set(shard[first:last]))",
    ),
    Mutant(
        "no frames are reserved for KV",
        "scheduler.core.state",
        "self.groups[placement.group].ledger.set_kv(placement.model, placement.kv.reserved)",
        "self.groups[placement.group].ledger.set_kv(placement.model, 0)",
    ),
    Mutant(
        "the grant does not cover the largest request",
        "scheduler.core.group_plan",
        "        if lacking > 0:\n            if not",
        "        if lacking > 0 and not placement.kv.granted:\n            if not",
    ),
    Mutant(
        "a failed request is not forgotten",
        "scheduler.core.state",
        "        self.forget(request)\n        self.actions.append(Fail(",
        "        self.actions.append(Fail(",
    ),
    Mutant(
        "a cancelled request stays in its queue",
        "scheduler.core.admission",
        "    if request.group is None:\n        state.forget(request)",
        "    if request.group is None:\n        pass",
    ),
    Mutant(
        "requests of a lost group are forgotten",
        "scheduler.core.completions",
        "                state.enqueue(request)",
        "                state.requests.pop(request.id)",
    ),
    Mutant(
        "a request that waits again goes to the end of its queue",
        "scheduler.core.state",
        "        request.group = None\n        self.waiting += 1",
        "        request.number = self.next_number() if request.group else request.number\n"
        "        request.group = None\n        self.waiting += 1",
    ),
    Mutant(
        "the pause after a failed load never ends",
        "scheduler.core.completions",
        "model.retry_at = state.now + pause",
        "model.retry_at = float('inf')",
    ),
    Mutant(
        "there is no pause after a failed load",
        "scheduler.core.completions",
        "model.retry_at = state.now + pause",
        "model.retry_at = 0.0",
    ),
    Mutant(
        "whoever waits for a failed load is told nothing",
        "scheduler.core.completions",
        "placement.running), *model.waiting]:",
        "placement.running)]:",
    ),
    Mutant(
        "queues have no bound",
        "scheduler.core.admission",
        "if len(model.waiting) >= state.config.max_queue or",
        "if",
    ),
    Mutant(
        "a third extent is asked for",
        "scheduler.core.placement",
        "EXTENTS_AHEAD: Final = 2",
        "EXTENTS_AHEAD: Final = 3",
    ),
    Mutant(
        "a page-in stops under a running request",
        "scheduler.core.planner",
        "            unwanted = placement.reserved > placement.issued and not placement.running\n",
        "            unwanted = placement.reserved > placement.issued\n",
    ),
    Mutant(
        "what an older demand waits for is given away",
        "scheduler.core.frames",
        "[before[rank] + need for rank, need in enumerate(lacking)]",
        "before",
    ),
    Mutant(
        "the wait bound is forgotten",
        "scheduler.core.wants",
        "since + (bound - load) if bound > load else since,",
        "float('inf'),",
    ),
    Mutant(
        "KV granted beyond need is never taken back",
        "scheduler.core.frames",
        "            self._take_back(surplus, short)\n",
        "",
    ),
    Mutant(
        "a load is never done",
        "scheduler.core.planner",
        'if is_all_in if job.kind == "load" else is_gone:',
        'if job.kind == "evict" and is_gone:',
    ),
    Mutant(
        "a removed model keeps its pages",
        "scheduler.core.planner",
        "            elif not placement.running:\n",
        "            elif not placement.running and model.jobs:\n",
    ),
    Mutant(
        "a pin is accepted whether it fits or not",
        "scheduler.core.fitting",
        "groups = [group for group in matching_groups(state, model) if can_hold(group, model, MINIMAL_KV)]",
        "groups = matching_groups(state, model)",
    ),
    Mutant(
        "what is suspended does not go on",
        "scheduler.core.group_plan",
        "        if placement.is_suspended:\n            self._resume(want, placement)\n            return\n",
        "        if placement.is_suspended:\n            return\n",
    ),
    Mutant(
        "what goes on gets less KV than it had",
        "scheduler.core.completions",
        "placement.kv_suspended = max(min(event.kv_frames, placement.kv_suspended), placement.least_kv)",
        "placement.kv_suspended = placement.least_kv",
    ),
    Mutant(
        "what is suspended is suspended again",
        "scheduler.core.frames",
        "if placement.activity is not Activity.RUNNING or placement.phase",
        "if placement.phase",
    ),
    Mutant(
        "requests join what is being suspended",
        "scheduler.core.group_plan",
        "        if placement.activity is Activity.SUSPENDING:\n            return\n",
        "",
    ),
    Mutant(
        "nobody is woken for a page-out that is to be tried again",
        "scheduler.core.completions",
        "    state.wake_model(state.models[event.model], placement.out_retry_at)\n",
        "",
    ),
]


class _Changed(SourceFileLoader):
    """Loads a module from its source with one piece of text changed. Never from or to a cache."""

    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        if fullname == self.mutant.module:
            count = source.count(self.mutant.old)
            assert count == 1, f"the text that {self.mutant.name!r} changes occurs {count} times in {self.path}"
            source = source.replace(self.mutant.old, self.mutant.new)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(PathFinder):
    mutant: Mutant

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)  # type: ignore[arg-type]
        if not _is_core(fullname) or spec is None or spec.origin is None:
            return None
        spec.loader = _Changed(fullname, spec.origin)
        spec.loader.mutant = cls.mutant
        return spec


def _is_core(name: str) -> bool:
    return name.startswith(("scheduler.core", "scheduler.policy")) and name not in _SHARED


def loads(mutant: Mutant) -> bool:
    """Whether what is to be changed is there, once."""
    source = inspect.getsource(importlib.import_module(mutant.module))
    return source.count(mutant.old) == 1


@contextmanager
def core_with(mutant: Mutant) -> Iterator[Callable[[CoreConfig], SchedulerCore]]:
    """The core's class, loaded with the mutant's change."""
    real = {name: module for name, module in sys.modules.items() if _is_core(name)}
    package = sys.modules["scheduler"]
    finder = type("Finder", (_Finder,), {"mutant": mutant})
    for name in real:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("scheduler.core.core").SchedulerCore
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_core(name)]:
            del sys.modules[name]
        sys.modules.update(real)
        for name in ("core", "policy"):
            setattr(package, name, real[f"scheduler.{name}"])
