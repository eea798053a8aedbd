"""A changed configuration taken over while the daemon serves: on SIGHUP, and by `POST /admin/reload`.

What is not in `LIVE` shapes what was built at start. If any of that has changed, nothing is taken over, and the error
names it: a daemon must not run with half of a configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from server.config import Config
from server.errors import ApiError
from server.service import Service
from swapper.errors import GswapdError

logger = logging.getLogger(__name__)

LIVE: Mapping[str, tuple[str, ...]] = {
    "server": ("api_key", "admin_key", "max_body", "silence"),
    "timeouts": ("request", "drain"),
}
"""Fields that are read whenever they are needed; and all of `models`."""

Load = Callable[[], Config]


async def reload(service: Service) -> list[str]:
    """Take over what has changed; the names of it. Raises ConfigError, or ApiError naming what needs a restart."""
    if service.load is None:
        raise ApiError(409, "This daemon was not started from a configuration that could be read again.", "no_config")
    old, new = service.config, service.load()
    changed = list(_changes(old, new, ""))
    fixed = [name for name in changed if not _is_live(name)]
    if fixed:
        verb = "needs" if len(fixed) == 1 else "need"
        message = f"{', '.join(fixed)} {verb} a restart of the daemon; nothing was changed."
        raise ApiError(409, message, "restart_needed", fixed[0])
    sections = {
        section: getattr(old, section).model_copy(update={name: getattr(getattr(new, section), name) for name in names})
        for section, names in LIVE.items()
    }
    service.config = old.model_copy(update=sections | {"models": new.models})
    await service.catalog.reconfigure(new.models)
    logger.info("The configuration was read again; changed: %s", ", ".join(changed) or "nothing")
    return changed


async def reload_on_signal(service: Service) -> None:
    try:
        await reload(service)
    except GswapdError as error:
        logger.error("The configuration was read again and not taken over: %s", error)


def _is_live(name: str) -> bool:
    section, _, field = name.partition(".")
    return section == "models" or field in LIVE.get(section, ())


def _changes(old: Any, new: Any, path: str) -> Iterator[str]:
    """Names of the fields in which two configurations differ."""
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        for name in type(old).model_fields:
            yield from _changes(getattr(old, name), getattr(new, name), f"{path}.{name}" if path else name)
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(name), new.get(name), f"{path}.{name}")
    elif old != new:
        yield path
