"""How events and actions are declared: `@message` makes a dataclass with slots, frozen for the type checker.

Nothing writes to a message, and mypy sees to it. At run time it is a plain dataclass, because a frozen one takes three
times as long to make (each field through `object.__setattr__`), and a step makes more messages than anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    return dataclass(slots=True, unsafe_hash=True)(cls)
