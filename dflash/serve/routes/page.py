"""``GET /``: a page that shows how answers are made."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from dflash.serve import page
from dflash.serve.errors import ApiError

router = APIRouter(include_in_schema=False)


@router.get("/")
async def start() -> Response:
    """The page."""
    return await file(page.START)


@router.get("/page/{name}")
async def file(name: str) -> Response:
    """A part of the page. Raises ApiError for anything else."""
    if name not in page.files():
        raise ApiError(404, f"the page has no file {name!r}")
    content, kind = page.files()[name]
    return Response(content, media_type=kind, headers=page.HEADERS)
