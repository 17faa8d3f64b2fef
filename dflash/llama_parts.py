"""Chunks as objects of OpenAI's API, which is what llama-cpp-python's users read."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from dflash.results import Chunk
from dflash.spelling import Notes, Spelling, chat_logprobs


class Parts:
    """Chunks in OpenAI's form."""

    def __init__(self, kind: str, model: str, spelling: Spelling) -> None:
        """Of one text; ``kind`` is text_completion or chat.completion."""
        self._spelling, self._notes = spelling, Notes(spelling)
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
        choice = {
            "index": 0,
            **content,
            "logprobs": self._noted(found),
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
            yield self._part(kind, content, chunk.finish_reason, self._noted([chunk]))

    def _part(
        self,
        kind: str,
        content: dict[str, Any],
        reason: str | None,
        notes: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": notes, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice]}

    def _noted(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        """Log-probabilities of the tokens of ``chunks``; None where there are none."""
        for chunk in chunks:
            if "prompt" in chunk.sources:
                self._notes = Notes(self._spelling, echoed=len(chunk.text))
        found = [note for chunk in chunks for note in chunk.logprobs or ()]
        if not found:
            return None
        return chat_logprobs(found, self._spelling) if self._chat else self._notes.of(found)
