"""What a client may have meant by a name that this server does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from fastapi import Request

from dflash.serve.schema.common import Wire


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The sentence that asks, with a space before it; "" where nothing known is like ``name``."""
    folded = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), folded, n=1)
    return f" Did you mean {folded[close[0]]}?" if close else ""


def fields_beside(request: Request, place: Sequence[str]) -> set[str]:
    """Names of the fields that the object at ``place[:-1]`` of a request's body may have."""
    body = getattr(request.scope.get("route"), "body_field", None)
    kinds = set() if body is None else set(_objects(body.field_info.annotation))
    for part in place[:-1]:
        if not part.isdecimal():  # lists have no names
            kinds = {inner for kind in kinds for inner in _objects(_annotation(kind, part))}
    return {name for kind in kinds for name in _names(kind)}


def routes(request: Request) -> list[str]:
    """The paths that this server has, as a client would write them."""
    found: list[str] = request.app.state.paths
    return found


def _names(kind: type[Wire]) -> dict[str, Any]:
    """Wire name of each field -> what it may be."""
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _annotation(kind: type[Wire], name: str) -> Any:
    return _names(kind).get(name)


def _objects(annotation: Any) -> Iterator[type[Wire]]:
    """The objects in ``annotation``: alone, in a list, or one of several forms."""
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        yield annotation
    for inner in get_args(annotation):
        yield from _objects(inner)
