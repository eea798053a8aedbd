"""Commands that talk to a serving daemon through its admin endpoints: ps, load, evict, pin, unpin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from swapper.errors import GswapdError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_URL = "http://127.0.0.1:8321"

Url = Annotated[str, typer.Option(envvar="GSWAPD_URL", help="Address of the daemon.")]
AdminKey = Annotated[str, typer.Option(envvar="GSWAPD_ADMIN_KEY", help="Admin key of the daemon, if it has one.")]
Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name or alias of the model.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Answer when it is done, or at once.")]


class Unreachable(GswapdError):
    """The daemon does not answer."""


class RequestRefused(GswapdError):
    """The daemon answered with an error."""


def call(method: str, url: str, path: str, admin_key: str, **query: Any) -> Any:
    """One admin request; the answer's JSON. Raises Unreachable or RequestRefused with the daemon's own sentence."""
    import httpx

    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:
        # Loading may take minutes on a slow disk, and the daemon bounds it: only connecting is bounded here.
        answer = httpx.request(
            method, url.rstrip("/") + path, headers=headers, params=query, timeout=httpx.Timeout(None, connect=5)
        )
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise Unreachable(f"no daemon answers at {url} ({error}). Start one with: gswapd serve") from error
    try:
        body = answer.json()
    except ValueError as error:
        raise RequestRefused(f"{url} answered {answer.status_code} and no JSON: is it a gswapd?") from error
    if answer.is_error:
        detail = body.get("error", {}) if isinstance(body, dict) else {}
        raise RequestRefused(detail.get("message") or f"{url} answered {answer.status_code}")
    return body


def human_bytes(count: float) -> str:
    """`269.1 MB`: decimal units, as disks and links are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def models_table(models: list[dict[str, Any]]) -> Table:
    """The table `gswapd ps` prints, from the answer of `GET /admin/models`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("MODEL", "STATE", "RESIDENT", "PAGES", "PIN", "RUNNING", "WAITING", "LAST LOAD", "FROM"):
        table.add_column(column)
    for model in models:
        load = model["last_load"]
        sources = load["sources"] if load else {}
        table.add_row(
            model["name"],
            model["state"] + (f": {model['reason']}" if model["reason"] else ""),
            f"{human_bytes(model['resident_bytes'])} of {human_bytes(model['total_bytes'])}",
            f"{model['resident_pages']}/{model['total_pages']}",
            "yes" if model["pinned"] else "",
            str(model["running"]),
            str(model["waiting"]),
            f"{load['seconds']:.3f} s" if load and not load["error"] else "",
            ", ".join(f"{name} {human_bytes(part['bytes'])}" for name, part in sources.items()),
        )
    return table


def ps(url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Show the models of a daemon: what is in memory, how long loading took and from where."""
    from rich.console import Console

    Console().print(models_table(call("GET", url, "/admin/models", admin_key)["models"]))


def _act(action: str, model: str, url: str, admin_key: str, **query: Any) -> None:
    from urllib.parse import quote

    status = call("POST", url, f"/admin/models/{quote(model, safe='')}/{action}", admin_key, **query)
    pinned = ", pinned" if status["pinned"] else ""
    print(f"{status['name']}: {status['state']}, {status['resident_pages']} of {status['total_pages']} pages{pinned}")


def load(model: Name, wait: Wait = True, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Page a model in, before anyone asks for it."""
    _act("load", model, url, admin_key, wait=str(wait).lower())


def evict(model: Name, wait: Wait = True, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Page a model out, once its running requests are done."""
    _act("evict", model, url, admin_key, wait=str(wait).lower())


def pin(model: Name, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Keep a model in memory whatever happens; refused if the pinned models would not fit together."""
    _act("pin", model, url, admin_key)


def unpin(model: Name, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Let a pinned model be paged out again."""
    _act("unpin", model, url, admin_key)


def register(app: typer.Typer) -> None:
    for command in (ps, load, evict, pin, unpin):
        app.command(rich_help_panel="A running daemon")(command)
