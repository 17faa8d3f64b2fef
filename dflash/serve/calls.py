"""Tool calls as the common families write them, and the marks around reasoning.

Which family a target belongs to is read from its chat template. A template that knows no tools is
given them in a system message of ours, in the commonest form. A call that cannot be read, or names
a function that was not offered, is text and stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A function to be called; ``arguments`` is JSON text, an object."""

    name: str
    arguments: str


Reader = Callable[[str, Mapping[str, Any]], list[Call] | None]
"""(text between the marks, name -> parameters' schema) -> calls; None = it is none."""


@dataclass(frozen=True)
class Family:
    """How calls are written. ``opening`` == "": the whole answer is a call, or none is."""

    opening: str
    closing: str
    read: Reader


def _object(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def _read_json(text: str, offered: Mapping[str, Any]) -> list[Call] | None:
    """An object with name and arguments (or parameters), or a list of them."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or one.get("name") not in offered:
            return None
        arguments = _object(one.get("arguments", one.get("parameters", {})))
        if arguments is None:
            return None
        calls.append(Call(one["name"], arguments))
    return calls or None


_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.S)


def _read_xml(text: str, offered: Mapping[str, Any]) -> list[Call] | None:
    """``<function=NAME>`` around ``<parameter=NAME>value</parameter>``, typed by the schema."""
    found = _FUNCTION.search(text)
    if found is None or found[1] not in offered:
        return None
    types = (offered[found[1]] or {}).get("properties", {})
    values = {name: _typed(value, types.get(name)) for name, value in _PARAMETER.findall(found[2])}
    return [Call(found[1], json.dumps(values, ensure_ascii=False))]


def _typed(value: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value


_NAMED = re.compile(
    r"(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?(\{.*\})", re.S
)


def _read_named(text: str, offered: Mapping[str, Any]) -> list[Call] | None:
    """A name and an object after it, one call or several in DeepSeek's inner marks."""
    parts = re.split(r"<｜tool▁call▁(?:begin|end)｜>", text)
    calls = []
    for part in filter(str.strip, parts):
        found = _NAMED.search(part)
        arguments = None if found is None else _object(found[2])
        if found is None or arguments is None or found[1] not in offered:
            return None
        calls.append(Call(found[1], arguments))
    return calls or None


def _read_bare(text: str, offered: Mapping[str, Any]) -> list[Call] | None:
    """Mistral's and Llama's: JSON, or a name and an object; their marks are not printed."""
    text = text.strip().removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
    return _read_json(text, offered) or _read_named(text.replace("[ARGS]", ""), offered)


HERMES = Family("<tool_call>", "</tool_call>", _read_json)
XML = Family("<tool_call>", "</tool_call>", _read_xml)
DEEPSEEK = Family("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _read_named)
BARE = Family("", "", _read_bare)
FORCED = Family("", "", _read_json)

_FAMILIES = (  # what a template contains, and the family it belongs to; the first that fits
    (("<tool_call>", "<function="), XML),
    (("<tool_call>",), HERMES),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("[TOOL_CALLS]",), BARE),
    (("<|python_tag|>",), BARE),
    (("tools", '"parameters"'), BARE),
)


def family_of(template: str) -> Family | None:
    """The family whose tools ``template`` can show; None = it knows none."""
    if "tools" not in template:
        return None
    fitting = (family for marks, family in _FAMILIES if all(mark in template for mark in marks))
    return next(fitting, HERMES)


def thinks(template: str) -> bool:
    """Whether answers under ``template`` may begin with reasoning between <think> marks."""
    return "</think>" in template or "<think>" in template


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message that offers ``tools`` to a model whose template has no place for them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to answer. Here they are, one JSON object a line:\n"
        f"{lines}\n"
        "To call one, write nothing but this, with its name and an object of arguments:\n"
        '<tool_call>\n{"name": "...", "arguments": {}}\n</tool_call>'
    )


def forced_schema(offered: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The JSON schema of exactly one call of one of ``names``.

    Definitions move to the top, where their references look for them.
    """
    shared: dict[str, Any] = {}
    forms = []
    for name in names:
        schema = dict(offered[name] or {"type": "object"})
        for key in ("$defs", "definitions"):
            if key in schema:
                shared.setdefault(key, {}).update(schema.pop(key))
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {**(forms[0] if len(forms) == 1 else {"anyOf": forms}), **shared}
