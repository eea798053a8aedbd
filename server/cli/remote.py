"""Commands that talk to a serving daemon through its admin endpoints: ps, why, load, evict, pin, unpin."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swapper.errors import GswapdError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_URL = "http://127.0.0.1:8321"
PIPE_WIDTH = 1000  # columns: more than any table has

Url = Annotated[str, typer.Option(envvar="GSWAPD_URL", help="Address of the daemon.")]
AdminKey = Annotated[str, typer.Option(envvar="GSWAPD_ADMIN_KEY", help="Admin key of the daemon, if it has one.")]
Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name or alias of the model.",
        autocompletion=lambda ctx, incomplete: known_models(ctx, incomplete),
    ),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Answer when it is done, or at once.")]


class Unreachable(GswapdError):
    """The daemon does not answer."""


class RequestRefused(GswapdError):
    """The daemon answered with an error."""


def call(method: str, url: str, path: str, admin_key: str, **query: Any) -> Any:
    """One admin request; the answer's JSON. Raises Unreachable or RequestRefused with the daemon's own sentence."""
    import httpx

    address, headers = checked_url(url), headers_of(admin_key)
    try:
        # Loading may take minutes on a slow disk, and the daemon bounds it: only connecting is bounded here.
        answer = httpx.request(
            method, address + path, headers=headers, params=query, timeout=httpx.Timeout(None, connect=5)
        )
    except httpx.RequestError as error:
        raise Unreachable(f"no daemon answers at {url} ({error}). Start one with: gswapd serve") from error
    try:
        body = answer.json()
    except ValueError as error:
        raise RequestRefused(f"{url} answered {answer.status_code} and no JSON: is it a gswapd?") from error
    if not isinstance(body, dict):
        raise RequestRefused(f"{url} answered with something else than was asked for: is it a gswapd?")
    if answer.is_error:
        detail = body.get("error")
        message = detail.get("message") if isinstance(detail, dict) else None
        raise RequestRefused(message or f"{url} answered {answer.status_code}")
    return body


def headers_of(admin_key: str) -> dict[bytes, bytes]:
    """As bytes: httpx takes text to be ASCII. Raises RequestRefused."""
    if not admin_key.isprintable():
        raise RequestRefused("--admin-key has a character in it that no key has.")
    return {b"Authorization": f"Bearer {admin_key}".encode(errors="surrogateescape")} if admin_key else {}


def checked_url(url: str) -> str:
    """Without a slash at its end. Raises RequestRefused unless `url` is just where a daemon listens."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise RequestRefused(f"--url {url} is no URL ({error}). It looks like {DEFAULT_URL}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise RequestRefused(f"--url {url} is no HTTP URL. It looks like {DEFAULT_URL}")
    if parsed.path not in ("", "/") or parsed.query or parsed.fragment:
        raise RequestRefused(f"--url {url} has a path. It is the daemon's address alone, like {DEFAULT_URL}")
    return url.rstrip("/")


def known_models(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: names that the daemon knows; none where it does not answer at once."""
    import httpx

    url, admin_key = context.params.get("url") or DEFAULT_URL, context.params.get("admin_key") or ""
    try:
        answer = httpx.get(f"{checked_url(url)}/admin/models", headers=headers_of(admin_key), timeout=1)
        names = [model["name"] for model in answer.json()["models"]]
    except (httpx.HTTPError, GswapdError, ValueError, KeyError):
        return []
    return [name for name in names if name.startswith(incomplete)]


def human_bytes(count: float) -> str:
    """`269.1 MB`: decimal units, as disks and links are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def models_table(models: list[dict[str, Any]]) -> Table:
    """The table `gswapd ps` prints, from the answer of `GET /admin/models`: 80 columns, unless a name is long."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    # Nothing is cut off: where the terminal is too narrow, names go on in the next line.
    table.add_column("MODEL", overflow="fold")
    for column in ("STATE", "SIZE", "HELD", "PIN", "RUN", "WAIT", "LOAD"):
        table.add_column(column, no_wrap=True)
    several = len({place["group"] for model in models for place in model["places"]}) > 1
    table.add_column("FROM", min_width=9)
    if several:
        table.add_column("ON")
    for model in models:
        load = model["last_load"]
        sources = load["sources"] if load else {}
        table.add_row(
            model["name"],
            model["state"],
            human_bytes(model["total_bytes"]),
            _percent(model["resident_pages"], model["total_pages"]),
            "yes" if model["pinned"] else "",
            str(model["running"]),
            str(model["waiting"]),
            f"{load['seconds']:.3g} s" if load and not load["error"] else "",
            ", ".join(f"{name} {_percent(part['pages'], load['pages'])}" for name, part in sources.items()),
            *([", ".join(place["group"] for place in model["places"])] if several else []),
        )
    return table


def _percent(part: int, whole: int) -> str:
    """Never 0% or 100% of what is neither nothing nor all."""
    if not whole:
        return "0%"
    return f"{min(max(round(100 * part / whole), 1 if part else 0), 100 if part >= whole else 99)}%"


def ps(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep showing them, as they change, until Ctrl-C.")
    ] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Show the models of a daemon: what is in memory, how long loading took and from where."""
    from rich.console import Console

    if watch:
        from server.cli.watching import show

        show(url, admin_key, lambda board: models_table(board.models), full_screen=False)
    answer = call("GET", url, "/admin/models", admin_key)
    if "models" not in answer:
        raise RequestRefused(f"{url} answered with something else than was asked for: is it a gswapd?")
    models, problems = answer["models"], answer.get("problems", ())
    if models:
        # For a program or a file, a model is one line, however long.
        Console(width=None if Console().is_terminal else PIPE_WIDTH).print(models_table(models))
    elif not problems:
        print("There are no models. Add one with: gswapd add CHECKPOINT --name NAME")
    if profiled := [model["name"] for model in models if model["profiled"] is not None]:
        print(f"in use, the profiles of {', '.join(profiled)}")
    for model in models:
        if model["reason"]:
            print(f"{model['name']} {model['state']}: {model['reason']}")
    for problem in problems:
        print(f"{problem['name']} cannot be served: {problem['reason']}")
    workers = call("GET", url, "/admin/workers", admin_key).get("workers", ())
    for group, reason in {worker["group"]: worker["reason"] for worker in workers if worker["reason"]}.items():
        print(f"group {group} is not up: {reason}")


def _act(action: str, model: str, url: str, admin_key: str, **query: Any) -> None:
    from urllib.parse import quote

    path = f"/admin/models/{quote(model, safe='', errors='surrogateescape')}/{action}"
    status = call("POST", url, path, admin_key, **query)
    pinned = ", pinned" if status["pinned"] else ""
    asked = f"{action} was asked for; now " if query.get("wait") == "false" else ""
    pages = f"{status['resident_pages']} of {status['total_pages']} pages"
    print(f"{status['name']}: {asked}{status['state']}, {pages}{pinned}")


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


def why(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Name or alias. Default: all models.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Tell why a model waits, was evicted or was refused: the scheduler's last decisions, newest last."""
    asked = {} if model is None else {"model": model}
    decisions = call("GET", url, "/admin/decisions", admin_key, **asked)["decisions"]
    for one in reversed(decisions):
        at = datetime.fromtimestamp(one["at"]).strftime("%H:%M:%S.%f")[:-3]
        print(f"{at}  {one['model']}: {one['message']}")
    if not decisions:
        print("Nothing was decided yet.")


def register(app: typer.Typer) -> None:
    for command in (ps, why, load, evict, pin, unpin):
        app.command(rich_help_panel="A running daemon")(command)
