"""What a core knows, as bytes: of each object its class and its attributes by name.

That is less than Python's own pickles tell, which depend on how a class keeps its attributes: what a core that is plain
Python has saved, one that is compiled (`setup.py`) can load, and the other way round. Anything but the scheduler's own
classes is refused, so that a snapshot from elsewhere can do no harm.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import zlib
from enum import Enum
from typing import Any

from scheduler.core.core import SchedulerCore

_OURS = ("scheduler.core.", "scheduler.policy.")
_PLAIN = {
    "collections": ("deque", "OrderedDict", "defaultdict", "Counter"),
    "builtins": ("set", "frozenset", "list"),
    __name__: ("restore",),
}


def save(core: SchedulerCore) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(core)
    return zlib.compress(file.getvalue(), 1)


def load(snapshot: bytes) -> SchedulerCore:
    """Raises pickle.UnpicklingError, or what the classes of another version raise."""
    core = _Unpickler(io.BytesIO(zlib.decompress(snapshot))).load()
    if not isinstance(core, SchedulerCore):
        raise pickle.UnpicklingError(f"a snapshot is of a core, not of a {type(core).__name__}")
    return core


def restore(instance: object, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        object.__setattr__(instance, name, value)  # classes that are frozen have another


class _Pickler(pickle.Pickler):
    def reducer_override(self, instance: object) -> Any:
        kind = type(instance)
        if not kind.__module__.startswith(_OURS) or isinstance(instance, (tuple, Enum)):
            return NotImplemented
        present = {name: getattr(instance, name) for name in _names(instance) if hasattr(instance, name)}
        return copyreg.__newobj__, (kind,), present, None, None, restore  # type: ignore[attr-defined]


def _names(instance: object) -> list[str]:
    """Of its attributes. Classes that mypyc compiled tell them themselves."""
    kind = type(instance)
    slots = [name for base in kind.__mro__ for name in getattr(base, "__mypyc_attrs__", getattr(base, "__slots__", ()))]
    return slots or list(vars(instance))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _bound_method
        is_ours = module.startswith(_OURS)
        if "." in name or not (is_ours or name in _PLAIN.get(module, ())):  # past a dot, attributes lead anywhere
            raise pickle.UnpicklingError(f"a snapshot holds no {module}.{name}")
        found = super().find_class(module, name)
        if is_ours and not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"a snapshot holds classes, and {module}.{name} is none")
        return found


def _bound_method(owner: object, name: str) -> Any:
    """As which methods are saved that the scheduler's own objects keep of one another."""
    if not type(owner).__module__.startswith(_OURS) or name.startswith("__"):
        raise pickle.UnpicklingError(f"a snapshot holds no {type(owner).__name__}.{name}")
    return getattr(owner, name)
