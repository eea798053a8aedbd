"""Commands that run the daemon: serve, demo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file. Default: gswapd.yaml here, if any.")
    ] = None,
    store: Annotated[Path | None, typer.Option(help="The model store.", show_default=False)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: loopback.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    memory: Annotated[str | None, typer.Option(help="Size of the frame pool, such as 8GiB.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster, not a private one.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Write every event to this file, for gswapd replay.")] = None,
) -> None:
    """Serve the models of the store until SIGTERM or Ctrl-C, which finish running requests first."""
    from server.config import load_config
    from server.daemon import run

    load = partial(
        load_config, config, store=store, host=host, port=port, memory=memory, ray_address=ray_address, journal=journal
    )
    raise typer.Exit(run(load(), load))


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the daemon serving until Ctrl-C.")] = False,
) -> None:
    """Watch three real chat models answer from memory that holds two, pages going in and out."""
    from server.demo.run import run_demo

    raise typer.Exit(run_demo(keep=keep))


def register(app: typer.Typer) -> None:
    for command in (serve, demo):
        app.command(rich_help_panel="The daemon")(command)
