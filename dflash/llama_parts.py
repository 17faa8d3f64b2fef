"""Chunks as objects of OpenAI's API, which is what llama-cpp-python's users read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from dflash.results import Chunk


class Parts:
    """Chunks in OpenAI's form."""

    def __init__(self, kind: str, model: str) -> None:
        """``kind`` is text_completion or chat.completion."""
        self._chat = kind == "chat.completion"
        self._kind = kind
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4()}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, chunks: Iterator[Chunk]) -> dict[str, Any]:
        """One object when all is there."""
        found = list(chunks)
        text, last = "".join(chunk.text for chunk in found), found[-1]
        assert last.stats is not None, "a stream ends with its stats"
        prompt, made = last.stats.prompt_tokens, last.stats.completion_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text}}
        notes = [entry for chunk in found for entry in _logprobs(chunk) or ()]
        choice = {
            "index": 0,
            **content,
            "logprobs": notes or None,
            "finish_reason": last.finish_reason,
        }
        return {**self._head, "object": self._kind, "choices": [choice], "usage": usage}

    def stream(self, chunks: Iterator[Chunk]) -> Iterator[dict[str, Any]]:
        """An object a chunk; a chat begins with the role."""
        kind = "chat.completion.chunk" if self._chat else self._kind
        if self._chat:
            yield self._part(kind, {"delta": {"role": "assistant"}}, None)
        for chunk in chunks:
            content: dict[str, Any] = {"text": chunk.text}
            if self._chat:
                content = {"delta": {"content": chunk.text} if chunk.text else {}}
            yield self._part(kind, content, chunk.finish_reason, _logprobs(chunk))

    def _part(
        self,
        kind: str,
        content: dict[str, Any],
        reason: str | None,
        notes: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": notes, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice]}


def _logprobs(chunk: Chunk) -> list[dict[str, Any]] | None:
    """Those of the tokens of ``chunk``; None where none were asked for, or there is no token."""
    return [entry._asdict() for entry in chunk.logprobs or ()] or None
