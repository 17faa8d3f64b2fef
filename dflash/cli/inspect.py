"""``dflash inspect``: what a checkpoint is."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash.cli import options as o
from dflash.cli.output import emit_json, note
from dflash.inspection import Inspection
from dflash.inspection import inspect as look


def inspect(
    path: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub id or ngram.")],
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Say what a checkpoint is and what it fits, without loading its weights."""
    del debug  # the door reads it
    found = look(path)
    if json:
        emit_json(found.to_json())
        return
    rows = list(_rows(found).items())
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")
    if found.problem:
        note(found.problem)


def _rows(found: Inspection) -> dict[str, str]:
    dtypes = ", ".join(f"{_short(count)} {name}" for name, count in found.dtypes.items())
    rows = {"kind": found.kind, "format": found.format, "architecture": found.architecture}
    if found.parameters:
        rows["parameters"] = f"{_short(found.parameters)} ({dtypes})"
    for name, value in found.facts.items():
        if value is not None:
            is_list = isinstance(value, list)
            rows[name] = ", ".join(map(str, value)) if is_list else str(value)
    if found.fits:
        rows["fits"] = found.fits
    if found.beside:
        rows["beside"] = found.beside
    return rows


def _short(count: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.4g} {letter}"
    return str(count)
