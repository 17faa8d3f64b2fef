"""An OpenAI-compatible server as an arm: ours, vLLM, SGLang, llama-server, or any other.

Answers are streamed, so that the first token can be told from the rest. Which server it is shows in
``/v1/models``; fields that only one of them knows are sent to that one alone.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.bench import counters
from dflash.bench.trial import Ask, Outcome
from dflash.errors import ConfigError, DownloadError

NETWORK = (urllib.error.URLError, http.client.HTTPException, OSError)


@dataclass(frozen=True, slots=True)
class Server:
    """A server and how to ask it."""

    url: str  # without /v1
    model: str
    kind: str  # owner in /v1/models: vllm, sglang, llamacpp, ...
    key: str | None = None
    timeout: float = 3600.0
    body: Mapping[str, Any] = field(default_factory=dict)  # sampling fields of each request

    def answer(self, ask: Ask, tokens: int) -> Outcome:
        """One chat completion. Raises DownloadError when the server cannot be asked."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(ask.messages),
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        if self.kind == "sglang":
            body["return_spec_tokens_details"] = True
        start = time.perf_counter()
        begun, text = start, ""
        merged: dict[str, Any] = {}
        for event in self._events(body):
            said = _said(event)
            if said and not text:
                begun = time.perf_counter()
            text += said
            merged |= {name: value for name, value in event.items() if value}
        end = time.perf_counter()
        usage = merged.get("usage") or {}
        made = int(usage.get("completion_tokens") or 0)
        if not made:
            raise DownloadError(
                f"{self.url} does not say how many tokens an answer has (usage.completion_tokens): "
                "its speed cannot be measured"
            )
        return Outcome(
            tokens=made,
            first=1,
            prefill=begun - start,
            decode=end - begun,
            text=text,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            **counters.of_answer(merged, made),
        )

    def counters(self) -> counters.Counters | None:
        """What ``/metrics`` has now; None where there is none."""
        try:
            return counters.parse(_get(f"{self.url}/metrics", self.key, self.timeout))
        except NETWORK:
            return None

    def _events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Objects of an event stream, or the one object of a server that does not stream."""
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **_key(self.key)},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                if "event-stream" not in (reply.headers.get("Content-Type") or ""):
                    yield json.loads(reply.read())
                    return
                for raw in reply:
                    line = raw.decode("utf-8").strip()
                    if line.startswith("data:") and line != "data: [DONE]":
                        yield json.loads(line.removeprefix("data:"))
        except NETWORK as problem:
            raise DownloadError(_why(self.url, problem)) from problem
        except ValueError as problem:
            raise DownloadError(f"{self.url} does not answer in JSON: {problem}") from problem


def connect(
    url: str,
    model: str | None,
    *,
    key: str | None = None,
    timeout: float = 3600.0,
    body: Mapping[str, Any] | None = None,
) -> Server:
    """The server at ``url``; ``model`` None = the one it serves.

    Raises ConfigError (several models and none named, or another one), DownloadError (no answer).
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        listed = json.loads(_get(f"{url}/v1/models", key, timeout))["data"]
        names = [str(one["id"]) for one in listed]
    except NETWORK as problem:
        raise DownloadError(_why(url, problem)) from problem
    except (ValueError, LookupError, TypeError) as problem:
        raise DownloadError(f"{url}/v1/models is not as OpenAI has it: {problem!r}") from problem
    if model is None and len(names) != 1:
        raise ConfigError(f"{url} serves {', '.join(names) or 'no model'}: name one (--model)")
    chosen = model or names[0]
    owner = next((str(one.get("owned_by", "")) for one in listed if one["id"] == chosen), "")
    return Server(url, chosen, owner.lower(), key, timeout, dict(body or {}))


def _said(event: Mapping[str, Any]) -> str:
    """The text in one event, thoughts included: they are tokens, too."""
    choices: Sequence[Mapping[str, Any]] = event.get("choices") or []
    if not choices:
        return ""
    part = choices[0].get("delta") or choices[0].get("message") or {}
    names = ("reasoning_content", "reasoning", "content")
    return "".join(dict.fromkeys(str(part[name]) for name in names if part.get(name)))


def _get(url: str, key: str | None, timeout: float) -> str:
    request = urllib.request.Request(url, headers=_key(key))
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        text: str = reply.read().decode("utf-8")
        return text


def _key(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _why(url: str, problem: Exception) -> str:
    if isinstance(problem, urllib.error.HTTPError):
        detail = problem.read().decode("utf-8", "replace").strip()[:300]
        return f"{url} refuses the request: {problem.code} {problem.reason}. {detail}"
    reason = getattr(problem, "reason", problem)
    return f"no answer from {url}: {reason}. Is the server running? (--base-url)"
