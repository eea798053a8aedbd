"""The command that looks at the machine: doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file. Default: gswapd.yaml here, if any.")
    ] = None,
) -> None:
    """Look at the machine: driver, read path, memory, limits, disk. Each problem with what to do about it."""
    from rich.console import Console

    from server.config import load_config
    from server.doctor import examine

    console = Console(highlight=False)
    problems = 0
    for finding in examine(load_config(config)):
        problems += finding.verdict == "problem"
        mark = f"[{COLOURS[finding.verdict]}]{finding.verdict:<7}[/]"
        console.print(f"{mark}  {finding.name}: {finding.found}", soft_wrap=True)
        if finding.advice:
            console.print(f"{'':<9}→ {finding.advice}", soft_wrap=True, markup=False)
    if problems:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="The daemon")(doctor)
