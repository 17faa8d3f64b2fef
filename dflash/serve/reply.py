"""One accepted request on its way to the client: parts as they come, sums when it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dflash.core.stats import Stats
from dflash.core.types import Logprob
from dflash.results import Chunk
from dflash.serve.calls import Call
from dflash.serve.splitter import Delta, Splitter
from dflash.serve.tally import Asked, Tally
from dflash.serve.worker import Event, Job, Worker


class Part(NamedTuple):
    """One chunk, told apart."""

    chunk: Chunk
    deltas: list[Delta]
    choice: Choice


@dataclass
class Choice:
    """One of a request's texts, as far as it has come."""

    splitter: Splitter
    content: str = ""
    echoed: int = 0  # characters of the content that are the prompt's
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reasoning_tokens: int = 0  # the pass in which it ends counts whole
    finish_reason: str | None = None  # stop, length, tool_calls
    stats: Stats | None = None

    def read(self, chunk: Chunk) -> list[Delta]:
        """Take in one chunk of this text."""
        if self.splitter.reasoning:
            self.reasoning_tokens += len(chunk.token_ids)
        deltas = self.splitter.feed(chunk.text)
        if chunk.finish_reason is not None:
            deltas += self.splitter.finish()
        for delta in deltas:
            if delta.call is not None:
                self.calls.append(delta.call)
            elif delta.kind == "reasoning":
                self.reasoning += delta.text
            else:
                self.content += delta.text
        if "prompt" in chunk.sources:
            self.echoed = len(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        if chunk.finish_reason is not None:
            self.stats = chunk.stats
            self.finish_reason = "tool_calls" if self.calls else chunk.finish_reason
        return deltas


@dataclass(frozen=True)
class Reading:
    """How the chunks of a reply are to be understood."""

    split: Callable[[], Splitter] = Splitter  # for each text
    asked: Asked = field(default_factory=Asked)
    per_prompt: int = 1  # texts that follow from each prompt
    prompt_tokens: int = 0  # of all prompts; 0 where they were not ids


class Watch(Protocol):
    """Who is told what happens."""

    def saw(self, chunk: Chunk, first: bool) -> None:
        """One pass; ``first``: it ended a prefill."""

    def ended(self, reply: Reply) -> None:
        """``reply`` is complete."""


class Reply:
    """Reads the events of a job. Leaving ``parts`` early cancels the job."""

    def __init__(self, worker: Worker, watch: Watch, reading: Reading) -> None:
        """Made on the event loop's thread; ``watch`` is told what happens."""
        self._worker, self._watch, self._reading = worker, watch, reading
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._job: Job | None = None
        self.choices: dict[int, Choice] = {}
        self.tally = Tally()

    def hear(self, event: Event) -> None:
        """Called on the worker's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def follow(self, job: Job) -> None:
        """From now on, ``parts`` are those of ``job``."""
        self._job = job

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt that came as ids, known before the first pass."""
        return self._reading.prompt_tokens

    @property
    def waited(self) -> float:
        """Seconds before its first pass."""
        job = self._job
        return 0.0 if job is None or not job.started else job.started - job.submitted

    def cancel(self) -> None:
        """Nobody wants the rest; idempotent."""
        if self._job is not None:
            self._worker.cancel(self._job)

    async def parts(self) -> AsyncIterator[Part]:
        """Every part. Raises ApiError where the job ends without being complete."""
        over = False
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    over = True
                    raise event
                choice = self.choices.get(event.index)
                if choice is None:
                    choice = self.choices[event.index] = Choice(self._reading.split())
                self._watch.saw(event, self.tally.add(event))
                yield Part(event, choice.read(event), choice)
            over = True
            self._watch.ended(self)
        finally:
            if not over:
                self.cancel()

    async def whole(self) -> list[Choice]:
        """All texts, complete, in order."""
        async for _ in self.parts():
            pass
        return [self.choices[index] for index in sorted(self.choices)]

    def usage(self) -> dict[str, Any]:
        """Tokens in the form of OpenAI's ``usage``; a prompt counts once, whatever n."""
        stats = {i: c.stats for i, c in self.choices.items() if c.stats is not None}
        made = sum(one.completion_tokens for one in stats.values())
        firsts = [one for index, one in stats.items() if index % self._reading.per_prompt == 0]
        prompt = sum(one.prompt_tokens for one in firsts)
        cached = sum(one.cached_tokens for one in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.reasoning_tokens for c in self.choices.values())
            },
        }

    def metrics(self) -> dict[str, Any]:
        """The ``metrics`` of the reply."""
        stats = [choice.stats for choice in self.choices.values() if choice.stats is not None]
        return self.tally.metrics(stats, self._reading.asked)
