"""An engine that is being served: its worker, its limits, and the way from a request to a reply."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

from dflash.blocks import choose
from dflash.config import BlockSize, DraftTree
from dflash.engine import Engine
from dflash.errors import DFlashError
from dflash.generate_config import CONSTRAINTS
from dflash.results import Chunk
from dflash.serve.config import ServeConfig
from dflash.serve.errors import ApiError, as_api_error, log
from dflash.serve.metrics import Metrics
from dflash.serve.reply import Reading, Reply, Watch
from dflash.serve.schema.common import Speculative
from dflash.serve.splitter import Splitter
from dflash.serve.tally import Asked
from dflash.serve.worker import Job, Worker
from dflash.spelling import Spelling

MOST_HELD = 1 << 16  # characters of a schema, pattern or grammar


@dataclass(frozen=True)
class Order:
    """A request in the engine's words, whichever API it came by."""

    prompts: Sequence[str | list[int]]  # raw text, or ids
    options: dict[str, Any]  # keywords of Engine.stream
    speculative: Speculative | None = None
    seconds: float | None = None  # deadline
    split: Callable[[], Splitter] = Splitter
    default_tokens: int | None = None  # max_tokens where none is asked for; None = the context


@dataclass
class Server:
    """What all routes share. Make it, ``start`` it, and ``stop`` it; the engine stays open."""

    engine: Engine
    config: ServeConfig = field(default_factory=ServeConfig)
    no_draft: str | None = None  # why there is no draft although one was asked for

    def __post_init__(self) -> None:
        """Nothing runs yet. Raises ConfigError for blocks or trees that the pair cannot judge."""
        if self.no_draft is None:
            choose(self._block(None)[0], self.engine.pair, tree=self.config.draft_tree)
        self.worker = worker = Worker(self.config.most_running, self.config.most_waiting)
        self.spelling = Spelling(self.engine.pair.tokenizer)
        self.created = int(time.time())
        self.name = self.config.name or short_name(self.engine.pair.target_name)
        self.engine.keep(self.config.cache_sessions, self.config.cache_bytes)
        kept = self.engine.kept
        self.metrics = Metrics(
            self.name,
            {
                "num_requests_running": ("Requests that take turns", lambda: worker.running),
                "num_requests_waiting": ("Requests that wait", lambda: worker.waiting),
                "cache_texts": ("Texts kept to be gone on with", lambda: kept.parked),
                "cache_bytes": ("Bytes of keys and values", kept.bytes),
            },
        )
        # one thread: tokenizers and the compiler of grammars are not made for more
        self._preparing = ThreadPoolExecutor(1, "dflash-prepare")

    def start(self) -> None:
        """Start the worker."""
        self.worker.start()

    def stop(self) -> None:
        """End what still runs with an error, and the threads."""
        self.worker.stop()
        self._preparing.shutdown(cancel_futures=True)

    async def prepare(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """``make(*arguments)`` on the preparing thread: what may take long before the first pass.

        Raises ApiError for every fault in it.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._preparing, partial(make, *arguments))
        except RuntimeError as problem:
            if not self._is_shut():
                raise
            raise ApiError(503, "the server is shutting down", retry_after=5) from problem

    def _is_shut(self) -> bool:
        return not self.worker.accepting

    async def submit(self, make: Callable[[], Order]) -> Reply:
        """The reply to the request that ``make`` understands. Raises ApiError."""
        self.worker.check_room()  # before the work of understanding it
        order, asked, stream = await self.prepare(self._understand, make)
        watch = Aloud(self.metrics) if self.config.log_prompts else self.metrics
        tokens = sum(len(prompt) for prompt in order.prompts if isinstance(prompt, list))
        reading = Reading(order.split, asked, order.options.get("n", 1), tokens)
        reply = Reply(self.worker, watch, reading)
        seconds = order.seconds or self.config.most_seconds
        job = Job(stream, reply.hear, time.monotonic() + seconds)
        self.worker.submit(job)
        reply.follow(job)
        return reply

    def _understand(self, make: Callable[[], Order]) -> tuple[Order, Asked, Iterator[Chunk]]:
        try:
            order = make()
            if (order.seconds or 0) > self.config.most_seconds:
                most = f"this server allows {self.config.most_seconds:g} s"
                raise ApiError(400, f"deadline is {order.seconds:g}, and {most}", param="deadline")
            _check_held(order.options)
            if self.config.log_prompts:
                self._log_prompts(order)
            size, asked = self._block(order.speculative)
            streams = [
                self.engine.stream(
                    prompt,
                    chat_template=False,
                    progress=True,
                    **{**order.options, "max_tokens": self._tokens(order)},
                    block_size=size,
                    draft_tree=self._tree(size),
                )
                for prompt in order.prompts
            ]
        except (DFlashError, ApiError) as problem:
            raise as_api_error(problem) from problem
        return order, asked, _in_turn(streams, order.options.get("n", 1))

    def _log_prompts(self, order: Order) -> None:
        for prompt in order.prompts:
            ids = isinstance(prompt, list)
            log.info("prompt: %r", self.engine.pair.tokenizer.decode(prompt) if ids else prompt)

    def _tokens(self, order: Order) -> int:
        most = self.config.most_tokens or self.engine.pair.context_length
        asked: int | None = order.options.get("max_tokens")
        if asked is None:
            return most if order.default_tokens is None else min(most, order.default_tokens)
        if asked > most:
            raise ApiError(400, f"max_tokens is {asked}, and this server allows {most}")
        return asked

    def _block(self, wish: Speculative | None) -> tuple[BlockSize, Asked]:
        """A request's block size, clamped to the draft's native one, and what to say of it."""
        native = self.engine.pair.draft_block_size
        if native is None:
            return None, Asked(1, reason=self.no_draft or "this server has no draft")
        if wish is not None and not wish.enabled:
            return 1, Asked(1, reason="the request turned speculation off")
        size = (
            self.config.block_size if wish is None or wish.block_size is None else wish.block_size
        )
        if size is None:
            size = self.engine.pair.default_block_size
        if size is None or size == "auto":
            return "auto", Asked(None)
        kept = min(size, native)
        return kept, Asked(kept, None if kept == size else size)

    def _tree(self, size: BlockSize) -> DraftTree:
        """The server's, for a block that has room for one and is not fixed where time decides."""
        tree = self.config.draft_tree
        chains = size in (None, 1) or (tree == "auto" and size != "auto")
        return 0 if chains else tree


def _check_held(options: Mapping[str, Any]) -> None:
    """Refuse forms that would take the compiler of grammars very long. Raises ApiError."""
    for name in CONSTRAINTS:
        size = len(json.dumps(options[name])) if name in options else 0
        if size > MOST_HELD:
            raise ApiError(400, f"a {name} may have {MOST_HELD} characters, this one has {size}")


class Aloud:
    """Writes answers to the log, for a server that was told to."""

    def __init__(self, inner: Watch) -> None:
        """``inner`` watches, too."""
        self._inner = inner

    def saw(self, chunk: Chunk, first: bool) -> None:
        """One pass."""
        self._inner.saw(chunk, first)

    def ended(self, reply: Reply) -> None:
        """A complete reply."""
        self._inner.ended(reply)
        for choice in reply.choices.values():
            log.info("answer: %r", choice.reasoning + choice.content)


def short_name(name: str) -> str:
    """A model's name without folders: what clients see tells nothing of this machine's files."""
    return PurePath(name).name.removesuffix(".gguf") or name


def _in_turn(streams: Sequence[Iterator[Chunk]], n: int) -> Iterator[Chunk]:
    """Chunks of one stream after the other, each text with an index of its own."""
    for place, stream in enumerate(streams):
        with closing(stream):  # type: ignore[type-var]  # an engine's stream is a generator
            for chunk in stream:
                yield replace(chunk, index=place * n + chunk.index) if place else chunk
