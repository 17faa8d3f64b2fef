"""Routes about the server itself: its health and its model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from dflash.serve.naming import routes
from dflash.serve.routes.shared import Served, check_model
from dflash.serve.server import Server, short_name

router = APIRouter()


@router.get("/health")
async def health(server: Served) -> dict[str, Any]:
    """Whether requests are taken, and what is running."""
    pair, worker = server.engine.pair, server.worker
    draft = None if pair.draft_name is None else short_name(pair.draft_name)
    return {
        "status": "ok" if worker.accepting else "draining",
        "model": server.name,
        "backend": pair.backend,
        "draft": draft or "off",
        "draft_off_because": server.no_draft,
        "block_size": server.config.block_size or pair.default_block_size or "auto",
        "native_block_size": pair.draft_block_size,
        "context_length": pair.context_length,
        "running": worker.running,
        "waiting": worker.waiting,
        "most_running": server.config.most_running,
        "most_waiting": server.config.most_waiting,
    }


@router.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
async def metrics(server: Served) -> PlainTextResponse:
    """What was done since the start, for Prometheus."""
    return PlainTextResponse(server.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1")
async def start(request: Request) -> dict[str, Any]:
    """The routes there are; this address is the base of OpenAI's clients."""
    return {"object": "list", "data": routes(request), "docs": "/docs"}


@router.get("/v1/models")
async def models(server: Served) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(server)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, server: Served) -> dict[str, Any]:
    """The model, by name; without one the list."""
    if not name:
        return await models(server)
    check_model(server, name)
    return _model(server)


def _model(server: Server) -> dict[str, Any]:
    pair = server.engine.pair
    return {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "dflash",
        "max_model_len": pair.context_length,
    }
