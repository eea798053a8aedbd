"""The `gswapd` command. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from server.cli import doctor, profiling, remote, serving, simulation, store, watching
from swapper.errors import GswapdError

app = typer.Typer(
    name="gswapd",
    help="Serve more models than fit in memory: models are paged in when asked for and paged out when idle.",
    epilog="Start with: gswapd add CHECKPOINT --name NAME, then gswapd serve. "
    "A setting is a line of gswapd.yaml or an environment variable GSWAPD_…",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"gswapd {version('gswapd')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Read by their callbacks."""


for room in (store, serving, remote, watching, doctor, simulation, profiling):
    room.register(app)


def main() -> None:
    """Entry point: an error raised on purpose is one sentence and exit status 1, never a traceback."""
    try:
        app()
    except GswapdError as error:
        print(f"gswapd: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
