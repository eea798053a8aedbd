"""How long a model stays in memory once nothing is asked of it, as Ollama writes it: seconds, `5m`, `1h30m`, `-1`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

FOREVER = -1.0
LONGEST = 100 * 365 * 86400.0  # seconds: what is longer is for ever, and no date

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_duration(value: object) -> object:
    """Seconds; -1 for ever, which is what a negative duration means."""
    if isinstance(value, str):
        value = _seconds(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise PydanticCustomError("duration", "must be seconds, or a duration like 5m")
    return float(value) if 0 <= value <= LONGEST else FOREVER


def _seconds(text: str) -> float | None:
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.lstrip("+-")
    try:
        return sign * float(text)
    except ValueError:
        pass
    if not text or _PART.sub("", text):
        return None
    return sign * sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


KeepAlive = Annotated[float, BeforeValidator(parse_duration)]
