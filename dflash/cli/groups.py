"""Flags that go together: a command takes a whole group of them in one parameter.

    @with_groups
    def doctor(pair: Given = o.PAIR_FLAGS, json: o.Json = False) -> None:
        given = flat(locals())      # model, draft, ..., json

The default of such a parameter is the `Group`; its flags stand in its place on the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, get_type_hints

Given = Mapping[str, Any]
"""Type of a parameter that takes a group: the values by name."""
Settle = Callable[[dict[str, Any]], Given]


class Flag(NamedTuple):
    """One parameter: what typer is told of it, and its value where nobody gives one."""

    annotation: Any
    default: Any = None


class Group(dict[str, Flag]):
    """Flags by the name of their parameter."""

    def __init__(self, flags: Mapping[str, Flag], settle: Settle | None = None) -> None:
        """``settle`` makes the value of the one parameter of what was given; None = all of it."""
        super().__init__(flags)
        self.settle: Settle = settle or Whole


class Whole(dict[str, Any]):
    """The values of a group, which `flat` puts beside those of the command's own parameters."""


def flat(values: Given) -> dict[str, Any]:
    """A command's ``locals()`` with the flags of its groups among them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= value if isinstance(value, Whole) else {name: value}
    return found


def was_given(ctx: Any, name: str) -> bool:
    """Whether the command line of ``ctx`` (typer's) says the parameter, be it its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with the flags of its groups as flags of its own."""
    taken = inspect.signature(command).parameters
    groups = {n: p.default for n, p in taken.items() if isinstance(p.default, Group)}

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.settle({flag: given.pop(flag) for flag in group})
        command(**given)

    shown = list(_shown(command, taken, groups))
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in shown}
    return run


def _shown(
    command: Callable[..., None],
    taken: Mapping[str, inspect.Parameter],
    groups: Mapping[str, Group],
) -> Iterator[inspect.Parameter]:
    """The parameters that typer sees, in order."""
    hints = get_type_hints(command, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    for name, parameter in taken.items():
        if name not in groups:
            yield parameter.replace(annotation=hints[name], kind=keyword)
            continue
        for flag, (annotation, default) in groups[name].items():
            yield inspect.Parameter(flag, keyword, default=default, annotation=annotation)
