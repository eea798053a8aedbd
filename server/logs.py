"""What the daemon's log looks like: lines for people, or JSON objects for a collector. Both carry the request's id."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

import orjson

from server import request_id

LogFormat = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s:%(request)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        identity = request_id.current.get()
        record.request = f" [{identity}]" if identity else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """On one line, whatever a client had in its path, and with nothing that moves a terminal's cursor."""
        return "".join([c if c.isprintable() else ascii(c)[1:-1] for c in super().formatMessage(record)])


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identity := request_id.current.get():
            entry["request_id"] = identity
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode(errors="backslashreplace")


def set_up(form: LogFormat) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for library in ("httpx", "opentelemetry.sdk"):  # theirs tell of every single call
        logging.getLogger(library).setLevel(logging.WARNING)
