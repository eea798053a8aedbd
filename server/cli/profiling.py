"""gswapd profile: measure what models cost, and write it beside their images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from server.cli.remote import AdminKey, checked_url
from server.cli.store import StorePath

LEAST_BREAK_AT = 32
"""Shorter sequences end before enough of them run at once."""


def profile(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Models of the store, told of in one report.")],
    batch: Annotated[str, typer.Option(help="Batch sizes, like 1,2,4; auto: doubled until memory is full.")] = "auto",
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "128,512",
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each point.")] = 3,
    switch: Annotated[
        list[str] | None,
        typer.Option(
            help="Sweep again with: chunk-128, chunk-2048, no-graphs, plain-attention, float32, float16, bfloat16. "
            "Without --url."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A serving daemon with an idle group. Default: a private one.")
    ] = None,
    group: Annotated[str | None, typer.Option(help="The group to run on, with --url.")] = None,
    memory: Annotated[str | None, typer.Option(help="Size of a worker's frame pool, without --url.")] = None,
    break_at: Annotated[int, typer.Option(min=0, help="Tokens a sequence at the breaking point; 0: the longest.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with pictures to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace of one batch to this file.")] = None,
    torch_profiler: Annotated[
        Path | None, typer.Option(help="Write torch.profiler's trace, compressed JSON for Perfetto, to this file.")
    ] = None,
    store: StorePath = None,
    api_key: Annotated[str, typer.Option(envvar="GSWAPD_API_KEY", help="API key of the daemon, with --url.")] = "",
    admin_key: AdminKey = "",
) -> None:
    """Measure latency, throughput, communication, memory and accuracy against batch size, and where memory ends."""
    from server.profile.run import Options, run

    if 0 < break_at < LEAST_BREAK_AT:
        raise typer.BadParameter(f"Sequences are of {LEAST_BREAK_AT} tokens at least.", param_hint="--break-at")
    options = Options(
        batches=None if batch == "auto" else _numbers(batch, "--batch"),
        prompt_tokens=_numbers(prompt_tokens, "--prompt-tokens"),
        output_tokens=output_tokens,
        repeat=repeat,
        switches=tuple(switch or ()),
        url=checked_url(url) if url is not None else None,
        group=group,
        memory=memory,
        break_at=break_at,
        report=report,
        trace=trace,
        torch_profiler=torch_profiler,
        store=store,
        api_key=api_key or None,
        admin_key=admin_key or None,
    )
    run(models, options)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,2,4.", param_hint=option)
    return numbers


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Measuring and foreseeing")(profile)
