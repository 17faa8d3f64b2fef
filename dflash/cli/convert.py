"""``dflash convert``: a draft from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli import options as o
from dflash.cli.output import emit_json, note

if TYPE_CHECKING:
    from dflash.convert.check import Trial


def convert(
    source: Annotated[
        str, typer.Argument(help="A draft: its folder, its .gguf file (a sidecar), or demo.")
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="hf, speculators, eagle, mlx or gguf.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder; for gguf, NEW.gguf.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target",
            "--model",
            help="Its target's folder or .gguf file: embedding and head are stored (speculators) "
            "or left out again (hf, mlx), its depth is written down; gguf needs the .gguf file. "
            "demo names the demo target.",
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
    """Write a draft in another format, and check it by running both on the same features.

    For example: dflash convert demo --to gguf --out demo-draft.gguf
    """
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
        note(f"{done.found} to {done.made}, {done.tensors} tensors; {_trial(done.trial)}")


def _trial(trial: Trial) -> str:
    """How far apart source and result are, and against what that is to be held."""
    share = trial.difference / trial.scale if trial.scale else 0.0
    found = (
        f"run both ways with {trial.backend}, largest difference {trial.difference:.3g} of "
        f"{trial.scale:.3g}"
    )
    if trial.rounded is None:
        return found
    return f"{found} ({share:.1%}): what rounding to {trial.rounded} does to the final states"
