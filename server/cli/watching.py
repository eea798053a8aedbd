"""Commands that watch a daemon live, by its events: top, and ps --watch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from server.cli.remote import (
    DEFAULT_URL,
    AdminKey,
    RequestRefused,
    Unreachable,
    Url,
    checked_url,
    headers_of,
    human_bytes,
    models_table,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

SILENCE = 60.0  # seconds after which a stream, in which the daemon says something every few, is taken for dead
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
TOLD = 10  # things that happened


@dataclass
class Board:
    """The daemon's state, and what happened lately, newest first."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    happened: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=TOLD))

    def hear(self, event: str, data: dict[str, Any]) -> None:
        match event:
            case "state":
                self.state = data
            case "change":
                for section, entries in data.items():
                    kept = self.state.get(section, {}) | entries
                    self.state[section] = {name: value for name, value in kept.items() if value is not None}
            case "swap" if data.get("error"):
                self._tell(data, f"could not be loaded: {data['error']}")
            case "swap" if data["way"] == "in":
                self._tell(data, f"paged in {data['pages']} pages in {data['seconds']:.3g} s")
            case "swap":
                self._tell(data, f"gave up {data['pages']} pages ({data['reason']}), unused for {data['idle']:.0f} s")
            case "suspension":
                self._tell(data, "was suspended for another")
            case "worker":
                self.happened.appendleft((data["at"], f"workers of group {data['group']} were {data['what']}"))

    def _tell(self, data: dict[str, Any], text: str) -> None:
        self.happened.appendleft((data["at"] + data.get("seconds", 0.0), f"{data['model']} {text}"))

    @property
    def models(self) -> list[dict[str, Any]]:
        return [self.state["models"][name] for name in sorted(self.state.get("models", {}))]


def follow(url: str, admin_key: str) -> Iterator[Board]:
    """The board after each event. Raises Unreachable or RequestRefused; the daemon's end is an Unreachable."""
    import httpx
    import orjson

    board = Board()
    timeout = httpx.Timeout(SILENCE, connect=5)
    try:
        with httpx.stream(
            "GET", f"{checked_url(url)}/admin/events", headers=headers_of(admin_key), timeout=timeout
        ) as got:
            if got.is_error:
                detail = orjson.loads(got.read()).get("error", {})
                raise RequestRefused(detail.get("message") or f"{url} answered {got.status_code}")
            event = ""
            for line in got.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    board.hear(event, orjson.loads(value))
                    yield board
    except httpx.RequestError as error:
        raise Unreachable(f"no daemon answers at {url} ({error}). Start one with: gswapd serve") from error
    except ValueError as error:
        raise RequestRefused(f"{url} answered with something else than was asked for: is it a gswapd?") from error
    raise Unreachable(f"the daemon at {url} has ended")


def screen(board: Board) -> RenderableType:
    """What `gswapd top` shows."""
    from rich.console import Group
    from rich.text import Text

    models = board.models
    colours = {model["name"]: COLOURS[place % len(COLOURS)] for place, model in enumerate(models)}
    running, waiting = (sum(model[count] for model in models) for count in ("running", "waiting"))
    state = board.state.get("daemon", {})
    health = "draining" if state.get("draining") else "live" if state.get("live") else "not ready"
    inside = sum(bool(model["resident_pages"]) for model in models)
    head = f"{health}   {inside} of {len(models)} models in memory   {running} running   {waiting} waiting\n"
    bars = [_memory_bar(group, colours) for group in board.state.get("memory", {}).values()]
    lines = [Text(f"{datetime.fromtimestamp(at):%H:%M:%S}  {text}") for at, text in board.happened]
    return Group(Text(head, style="bold"), *bars, Text(), models_table(models), Text(), *lines)


def _memory_bar(group: dict[str, Any], colours: dict[str, str], width: int = 60) -> RenderableType:
    from rich.text import Text

    frames = max(1, group["frames"])
    held = sum(holding["frames"] for holding in group["holdings"])
    bar = Text(f"{group['group']:<12} ")
    drawn = 0
    done = 0
    for holding in group["holdings"]:
        done += holding["frames"]
        cells = round(done / frames * width) - drawn
        drawn += cells
        bar.append(
            {"weights": "█", "kv": "▒", "loading": "░"}[holding["use"]] * cells, colours.get(holding["models"][0])
        )
    bar.append("·" * (width - drawn), "dim")
    size = group["page_bytes"]
    return bar.append(f" {human_bytes(held * size)} of {human_bytes(group['frames'] * size)}")


def show(url: str, admin_key: str, draw: Any, full_screen: bool) -> None:
    """Draw the board anew with each event, until Ctrl-C."""
    from rich.live import Live

    with Live(screen=full_screen, refresh_per_second=4) as live:
        for board in follow(url, admin_key):
            live.update(draw(board))


def top(url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Watch a daemon: memory, models and what happens, live, until Ctrl-C."""
    show(url, admin_key, screen, full_screen=True)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="A running daemon")(top)
