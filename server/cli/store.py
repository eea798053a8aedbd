"""Commands on the model store: add, rm, gc, verify. They need no daemon, and one may be serving meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from server.cli.remote import human_bytes
from swapper.errors import GswapdError

StorePath = Annotated[
    Path | None, typer.Option("--store", help="The model store. Default: the configured one.", show_default=False)
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of the model in the store.",
        autocompletion=lambda ctx, incomplete: stored_models(ctx, incomplete),
    ),
]


def _store(path: Path | None):  # type: ignore[no-untyped-def]
    from server.config import load_config
    from swapper.store import Store

    return Store(path or load_config().store)


def _existing_store(path: Path | None):  # type: ignore[no-untyped-def]
    """For commands that would find nothing in a new one. Raises StoreError."""
    from swapper.errors import StoreError

    store = _store(path)
    if not (store.root / "models").is_dir():
        raise StoreError(f"There is no model store at {store.root}. `gswapd add` makes one; --store names another.")
    return store


def stored_models(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion."""
    try:
        return [name for name in _store(context.params.get("store")).list() if name.startswith(incomplete)]
    except (GswapdError, OSError):
        return []


def _is_served(tp: int, pp: int) -> bool:
    from server.config import load_config

    return any((group.tp, group.pp) == (tp, pp) for group in load_config().cluster.groups)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal (nothing where there is none), fed with bytes done and bytes in all."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def add(
    source: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A Hugging Face checkpoint directory with *.safetensors files.")
    ],
    name: Annotated[str, typer.Option(help="The name that requests will use.")],
    dtype: Annotated[
        str | None, typer.Option(help="Convert to bfloat16, float16 or float32. Default: the checkpoint's.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks: GPUs that share each layer.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages: GPUs that have some of the layers each.")] = 1,
    store: StorePath = None,
) -> None:
    """Check a checkpoint, pack it for paging and put it into the store. A serving daemon sees it at once."""
    from swapper.errors import ModelExists
    from swapper.store import check_name

    # What costs nothing to see is told before the libraries that pack are imported, which takes seconds.
    check_name(name)
    where = _store(store)
    if name in where.list():
        raise ModelExists(
            f"A model named {name} is in the store {where.root}. Choose another name, or remove it first with "
            f"`gswapd rm {name}`."
        )
    from worker.add import add_model

    with progress_bar(f"packing {name}") as progress:
        image = add_model(where, source, name, dtype=dtype, tp=tp, pp=pp, progress=progress)
    manifest = image.manifest
    size = sum(shard.nbytes for shard in manifest.shards)
    mesh = "" if len(manifest.shards) == 1 else f" for a mesh of {tp} × {pp}"
    print(f"added {name}: {manifest.architecture}, {manifest.dtype}, {human_bytes(size)}{mesh}")
    if store is None and not _is_served(tp, pp):
        print(
            f"No group of this configuration has tp {tp}, pp {pp}: {name} is not served until cluster.groups has one."
        )


def rm(name: Name, store: StorePath = None) -> None:
    """Remove a model from the store. A serving daemon finishes its running requests first."""
    _existing_store(store).remove(name)
    print(f"removed {name}")


def gc(store: StorePath = None) -> None:
    """Remove what crashed or interrupted commands left in the store."""
    print(f"freed {human_bytes(_existing_store(store).gc())}")


def verify(name: Name, store: StorePath = None) -> None:
    """Read a model's files again and compare every hash."""
    from swapper.verify import verify as verify_image

    with progress_bar(f"verifying {name}") as progress:
        bad = verify_image(_existing_store(store).open(name), progress)
    for line in bad:
        print(line)
    if bad:
        print(f"{name} is damaged. Add it again.")
        raise typer.Exit(1)
    print(f"{name} is intact")


def register(app: typer.Typer) -> None:
    for command in (add, rm, gc, verify):
        app.command(rich_help_panel="The model store")(command)
