"""``GET /docs``: the API as a page without scripts, so that it can be read offline.

Made from the OpenAPI document, which is at ``/openapi.json`` for programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter()

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>dflash API</title>
<meta name="viewport" content="width=device-width"><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui;max-width:60em;margin:2em auto;
padding:0 1em}table{border-collapse:collapse}td,th{padding:.1em .8em .1em 0;text-align:left;
vertical-align:top}code{font-family:ui-monospace,monospace}</style>"""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    document = request.app.openapi()
    title = escape(f"{document['info']['title']} API")
    parts = [_HEAD, f"<h1>{title}</h1>", '<p>For programs: <a href="openapi.json">OpenAPI</a></p>']
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _route(method, path, operation, document)
    return HTMLResponse("\n".join(parts) + "</html>")


def _route(
    method: str, path: str, operation: Mapping[str, Any], document: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is None:
        return
    schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    needed = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    for name, field in schema["properties"].items():
        words = escape(field.get("description", ""))
        note = "required. " if name in needed else ""
        kind = escape(_kind(field))
        yield f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{note}{words}</td></tr>"
    yield "</table>"


def _kind(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        kinds = (_kind(one) for one in field["anyOf"] if one.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "const" in field or "enum" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))
