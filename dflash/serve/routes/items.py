"""The output of a response: items of reasoning, text and calls, whole and event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dflash.core.types import Logprob
from dflash.serve.calls import Call
from dflash.serve.reply import Choice, Part
from dflash.serve.routes.shared import new_id
from dflash.serve.server import Server
from dflash.serve.splitter import Delta
from dflash.spelling import chat_logprobs

Event = dict[str, Any]


class Items:
    """Items that are complete, and the one that is open."""

    def __init__(self, server: Server, logprobs: bool) -> None:
        """Nothing is open; ``logprobs``: with log-probabilities of the text."""
        self._server, self._logprobs = server, logprobs
        self._done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._notes: list[Logprob] = []

    def of(self, choice: Choice) -> list[dict[str, Any]]:
        """All items of a complete choice; those of the events, where it was streamed."""
        if self._done:
            return self._done
        items = [] if not choice.reasoning else [_reasoning(choice.reasoning)]
        if choice.content or not choice.calls:
            items.append(self._message(choice.content, choice.logprobs))
        return [*items, *(_call(call) for call in choice.calls)]

    def events(self, part: Part) -> Iterator[Event]:
        """What one pass adds."""
        notes = list(part.chunk.logprobs or ())
        self._notes += notes
        for delta in part.deltas:
            if delta.call is not None:
                yield from self._complete()
                yield from self._called(delta.call)
            else:
                yield from self._text(delta, notes)
                notes = []

    def end(self) -> Iterator[Event]:
        """Complete the last item; a response without any has an empty message."""
        if self._open is None and not self._done:
            yield from self._begin("content")
        yield from self._complete()

    def _complete(self) -> Iterator[Event]:
        if self._open is None:
            return
        item, self._open = self._open, None
        part = item["content"][0]
        if item["type"] == "message":
            part["logprobs"] = self._spelt(self._notes)
        item["status"] = "completed"
        place = {"output_index": len(self._done), "item_id": item["id"], "content_index": 0}
        kind = f"response.{part['type']}.done"
        more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        yield {"type": kind, **place, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield from self._close(item)

    def _text(self, delta: Delta, notes: Sequence[Logprob]) -> Iterator[Event]:
        wanted = "reasoning" if delta.kind == "reasoning" else "message"
        if self._open is not None and self._open["type"] != wanted:
            yield from self._complete()
        if self._open is None:
            yield from self._begin(delta.kind)
        assert self._open is not None, "just begun"
        part = self._open["content"][0]
        part["text"] += delta.text
        yield {
            "type": f"response.{part['type']}.delta",
            "output_index": len(self._done),
            "item_id": self._open["id"],
            "content_index": 0,
            "delta": delta.text,
            **({"logprobs": self._spelt(notes)} if wanted == "message" else {}),
        }

    def _begin(self, kind: str) -> Iterator[Event]:
        self._open = _reasoning("") if kind == "reasoning" else self._message("", ())
        self._open["status"] = "in_progress"
        place: dict[str, Any] = {"output_index": len(self._done)}
        part = self._open["content"][0]
        yield {
            "type": "response.output_item.added",
            **place,
            "item": {**self._open, "content": []},
        }
        place = {**place, "item_id": self._open["id"], "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": dict(part)}

    def _called(self, call: Call) -> Iterator[Event]:
        item = _call(call)
        place = {"output_index": len(self._done), "item_id": item["id"]}
        begun = {**item, "arguments": "", "status": "in_progress"}
        kind = "response.function_call_arguments"
        yield {"type": "response.output_item.added", "output_index": len(self._done), "item": begun}
        yield {"type": f"{kind}.delta", **place, "delta": call.arguments}
        yield {"type": f"{kind}.done", **place, "arguments": call.arguments, "name": call.name}
        yield from self._close(item)

    def _close(self, item: dict[str, Any]) -> Iterator[Event]:
        place = len(self._done)
        self._done.append(item)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}

    def _message(self, text: str, notes: Sequence[Logprob]) -> dict[str, Any]:
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._spelt(notes),
        }
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }

    def _spelt(self, notes: Sequence[Logprob]) -> list[dict[str, Any]]:
        if not self._logprobs:
            return []
        found: list[dict[str, Any]] = chat_logprobs(notes, self._server.spelling)["content"]
        return found


def _reasoning(text: str) -> dict[str, Any]:
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": "completed",
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "call_id": new_id("call_"),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
