"""``dflash inspect``: what a checkpoint is."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash.cli import options as o
from dflash.cli.output import emit_json, note
from dflash.config import DEMO
from dflash.inspection import Inspection
from dflash.inspection import inspect as look


def inspect(
    path: Annotated[
        str, typer.Argument(help="A folder, a .gguf file, a hub id, ngram, toy, or the demo pair.")
    ] = DEMO,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Say what a checkpoint is and what it fits, without loading its weights."""
    del debug  # the door reads it
    parts = _demo() if path == DEMO else {"": look(path)}
    if json:
        plain = {part: found.to_json() for part, found in parts.items()}
        emit_json(plain.get("", plain))
        return
    for part, found in parts.items():
        if part:
            typer.echo(f"{part}: {found.name}")
        _show(found)
    if path == DEMO and "target" not in parts:
        note("the demo target is not here yet: dflash pull fetches it")


def _demo() -> dict[str, Inspection]:
    """The demo pair, as far as it is here; nothing is fetched."""
    from dflash import demo

    found = {"draft": look(str(demo.demo_draft()))}
    target = demo.cached()
    return found if target is None else {"target": look(str(target)), **found}


def _show(found: Inspection) -> None:
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
