"""``dflash convert``: a draft from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash.cli import options as o
from dflash.cli.output import emit_json, note


def convert(
    source: Annotated[str, typer.Argument(help="A draft: its folder.")],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="hf, speculators, eagle or mlx.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the result.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target",
            "--model",
            help="Its target's folder, whose embedding and head are stored too (speculators) or "
            "left out again (hf, mlx).",
        ),
    ] = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Write a draft in another format, and check it by running both on the same features."""
    del debug  # the door reads it
    from dflash.convert import convert as run

    done = run(source, to, out, target=target)
    if json:
        emit_json(done.to_json())
        return
    typer.echo(done.out)
    for text in done.notes:
        note(text)
    if done.trial.backend is not None:
        note(
            f"{done.found} to {done.made}, {done.tensors} tensors; run both ways with "
            f"{done.trial.backend}, largest difference {done.trial.difference:.3g} "
            f"of {done.trial.scale:.3g}"
        )
