"""Counters and histograms for Prometheus, under ``dflash:``, and again under vLLM's prefix.

The names after the prefix are vLLM's, so its dashboards and benchmarks read this server. Rates are
quotients of counters: acceptance = accepted / draft tokens; mean acceptance length = 1 + accepted /
drafts; at position i = accepted_per_pos[i] / drafts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from dflash.results import Chunk

if TYPE_CHECKING:
    from dflash.serve.reply import Choice, Reply

_PREFIX = re.compile(r"^(# (?:HELP|TYPE) )?dflash:", re.M)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
_LABELS = ("model_name", "engine")


Gauged = tuple[str, Callable[[], float]]
"""What a gauge is, in words, and whom it asks."""


class Metrics:
    """What one server has done since it started."""

    def __init__(self, model: str, gauges: Mapping[str, Gauged]) -> None:
        """``gauges``: what is asked when somebody reads, by name."""
        self._registry = CollectorRegistry()
        self._labels = (model, "0")
        ProcessCollector(namespace="dflash", registry=self._registry)
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds with a draft")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens proposed and judged")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens kept")
        self._by_position = Counter(
            "dflash:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens kept, by their place after the anchor",
            (*_LABELS, "position"),
            registry=self._registry,
        )
        self.rounds = self._counter("num_rounds", "Passes after the prefill")
        self.made = self._counter("generation_tokens", "Tokens generated")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self.cache_asked = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found run already")
        self._finished = self._by("request_success", "Texts finished", "finished_reason")
        self._refused = self._by("request_refused", "Requests without an answer", "status")
        self.first = self._histogram("time_to_first_token_seconds", "Waiting included", _SECONDS)
        self.gap = self._histogram("time_per_output_token_seconds", "Mean of a request", _GAPS)
        self.whole = self._histogram("e2e_request_latency_seconds", "Waiting included", _SECONDS)
        self.queue = self._histogram("request_queue_time_seconds", "Until the first pass", _SECONDS)
        self.block = self._histogram("block_size", "Rows of a pass, anchor included", _ROWS)
        for name, (words, ask) in gauges.items():
            gauge = Gauge(f"dflash:{name}", words, _LABELS, registry=self._registry)
            gauge.labels(*self._labels).set_function(ask)

    def saw(self, chunk: Chunk, first: bool) -> None:
        """One pass; ``first``: it ended a prefill."""
        made = len(chunk.token_ids) - chunk.sources.count("prompt")
        self.made.inc(made)
        if first or not made:
            return
        self.rounds.inc()
        self.block.observe(chunk.drafted + 1)
        if chunk.drafted:
            kept = chunk.sources.count("draft")
            self.drafts.inc()
            self.drafted.inc(chunk.drafted)
            self.accepted.inc(kept)
            for place in range(kept):
                self._by_position.labels(*self._labels, str(place)).inc()

    def ended(self, reply: Reply) -> None:
        """A reply is complete."""
        usage, tally = reply.usage(), reply.tally
        self.prompt.inc(usage["prompt_tokens"])
        self.cache_asked.inc(usage["prompt_tokens"])
        self.cache_hits.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self.whole.observe(time.monotonic() - tally.began)
        self.queue.observe(reply.waited)
        if tally.first is not None:
            self.first.observe(tally.first)
        if tally.tokens > 1:
            self.gap.observe((tally.last - (tally.first or 0.0)) / (tally.tokens - 1))
        for choice in reply.choices.values():
            self._finish(choice)

    def refused(self, status: int) -> None:
        """A request got no answer, or not all of it."""
        self._refused.labels(*self._labels, str(status)).inc()

    def text(self) -> str:
        """All of it in Prometheus' text format, and once more with vLLM's prefix."""
        own = generate_latest(self._registry).decode()
        families = "".join(line for line in own.splitlines(True) if _PREFIX.match(line))
        return own + _PREFIX.sub(lambda found: f"{found[1] or ''}vllm:", families)

    def _finish(self, choice: Choice) -> None:
        self._finished.labels(*self._labels, choice.finish_reason or "abort").inc()

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(f"dflash:{name}", words, _LABELS, registry=self._registry).labels(
            *self._labels
        )

    def _by(self, name: str, words: str, label: str) -> Counter:
        return Counter(f"dflash:{name}", words, (*_LABELS, label), registry=self._registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"dflash:{name}", words, _LABELS, registry=self._registry, buckets=buckets)
        return made.labels(*self._labels)
