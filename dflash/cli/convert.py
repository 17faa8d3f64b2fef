"""``dflash convert``: a draft from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash.cli import options as o
from dflash.cli.output import emit_json, note


def convert(
    source: Annotated[
        str, typer.Argument(help="A draft: its folder, or its .gguf file (a sidecar).")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="hf, speculators, eagle, mlx or gguf.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder (gguf: file).")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target",
            "--model",
            help="Its target's folder, whose embedding and head are stored too (speculators) or "
            "left out again (hf, mlx); its .gguf file for a sidecar (gguf).",
        ),
    ] = None,
    stored: Annotated[
        str | None,
        typer.Option(
            "--stored",
            metavar="TYPE",
            help="Matrices of a sidecar: F32, F16, BF16, Q8_0 or Q4_0. Left out: as they are.",
        ),
    ] = None,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Write a draft in another format, and check it by running both on the same features."""
    del debug  # the door reads it
    from dflash.convert import convert as run

    done = run(source, to, out, target=target, stored=stored)
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
