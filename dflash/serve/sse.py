"""Frames of server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from dflash.serve.errors import ApiError

DONE = ServerSentEvent(data="[DONE]", sep="\n")
PING = 15  # seconds between signs of life
STALLED = 60  # seconds a client may leave what was sent to it unread


def frame(value: Mapping[str, Any], event: str | None = None) -> ServerSentEvent:
    """One event; ``event`` names its kind where the API does so."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return ServerSentEvent(data=text, event=event, sep="\n")


def answer(
    frames: AsyncIterator[ServerSentEvent], leave: Callable[[], None], anthropic: bool = False
) -> EventSourceResponse:
    """The response that streams ``frames``; an ApiError among them becomes the last event.

    ``leave`` is called at the end, whoever ended it.
    """
    return EventSourceResponse(
        _to_the_end(frames, leave, anthropic), ping=PING, send_timeout=STALLED, sep="\n"
    )


async def _to_the_end(
    frames: AsyncIterator[ServerSentEvent], leave: Callable[[], None], anthropic: bool
) -> AsyncIterator[ServerSentEvent]:
    try:
        async with aclosing(frames) as open_frames:  # type: ignore[type-var]  # a generator
            async for one in open_frames:
                yield one
    except ApiError as problem:
        yield frame(problem.body(anthropic), event="error" if anthropic else None)
        if not anthropic:
            yield DONE
    finally:
        leave()
