"""The statistics of a run under llama-cpp-python's names, from ours.

All keys exist from the start. What cannot be told apart here is zero: the engine rolls back by
position, so checkpoints are never taken, and a decode call returns when it is done, so there is no
time of waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash.core.stats import Recorder, Stats
from dflash.core.types import Plan, Step, Verdict
from dflash.results import Chunk

CHECKPOINTS = (
    *("captures", "restores", "verification_reuses", "native_captures", "native_restores"),
    *("device_captures", "device_restores", "native_verification_rollbacks", "buffer_bytes"),
)
COUNTS = (
    *("drafted", "verified", "accepted", "begin_calls", "draft_calls", "process_calls"),
    *("accept_calls", "generated_drafts", "accepted_drafts", "accepted_draft_tokens"),
    *("verification_steps", "rollbacks", "native_rollbacks", "checkpoint_rollbacks"),
    *("generation_tokens", "sustained_tokens", "decode_tokens"),
    *(f"checkpoint_{name}" for name in CHECKPOINTS),
)
RATES = (
    *("draft_batch_acceptance_rate", "draft_token_acceptance_rate", "mean_accepted_length"),
    *("acceptance_rate", "begin_seconds", "draft_seconds", "target_decode_seconds"),
    *("target_sync_seconds", "process_seconds", "accept_seconds", "generation_seconds"),
    *("generation_tokens_per_second", "time_to_first_token_seconds", "sustained_seconds"),
    *("sustained_tokens_per_second", "decode_seconds", "decode_tokens_per_second"),
    *("checkpoint_capture_seconds", "checkpoint_restore_seconds"),
)


def empty() -> dict[str, Any]:
    """Every key with nothing in it."""
    return {
        **dict.fromkeys(COUNTS, 0),
        **dict.fromkeys(RATES, 0.0),
        "acceptance_rate_per_position": [],
    }


class Running:
    """The figures of one request while it runs; the loop's own once it has ended."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._kept: list[int] = []  # accepted drafts of every round that drafted
        self._counted, self._tokens = Recorder(0), 0
        self._whole: Stats | None = None

    def read(self, chunk: Chunk, seconds: float) -> None:
        """Count ``chunk``, which took ``seconds``."""
        if "prompt" in chunk.sources:
            return
        tokens, drafted = list(chunk.token_ids), chunk.drafted
        accepted = chunk.sources.count("draft")
        if drafted:
            self._kept.append(accepted)
        self._tokens += len(tokens)
        self._whole = chunk.stats
        verdict: Verdict[Any] = Verdict(tokens, range(accepted), drafted)
        plan = Plan(rows=drafted, depth=drafted)
        self._counted.add(Step(tokens, plan, drafted, verdict, int(seconds * 1e9)))

    def figures(self) -> dict[str, Any]:
        """What was done so far, under llama-cpp-python's names."""
        if not self._tokens:
            return empty()
        return llama_stats(self._whole or self._counted.stats(), self._kept)


def llama_stats(stats: Stats, kept: Sequence[int]) -> dict[str, Any]:
    """The same run; ``kept`` are the accepted drafts of every round that drafted."""
    found = empty()
    rounds, some = len(kept), sum(accepted > 0 for accepted in kept)
    seconds = _seconds(stats)
    rate = _ratio(stats.accepted, stats.drafted)
    found.update(
        drafted=stats.drafted,
        verified=stats.drafted,
        accepted=stats.accepted,
        begin_calls=1,
        draft_calls=rounds,
        process_calls=stats.rounds + 1,
        accept_calls=rounds,
        generated_drafts=rounds,
        accepted_drafts=some,
        draft_batch_acceptance_rate=_ratio(some, rounds),
        accepted_draft_tokens=stats.accepted,
        draft_token_acceptance_rate=rate,
        acceptance_rate=rate,
        mean_accepted_length=1 + _ratio(stats.accepted, rounds) if rounds else 0.0,
        acceptance_rate_per_position=list(stats.acceptance_by_position),
        verification_steps=rounds,
        rollbacks=stats.rollbacks,
        native_rollbacks=stats.rollbacks,
        draft_seconds=stats.draft_seconds or 0.0,
        target_decode_seconds=stats.verify_seconds or 0.0,
        time_to_first_token_seconds=stats.time_to_first_token,
        generation_tokens=stats.completion_tokens,
        generation_seconds=stats.time_to_first_token + seconds,
        generation_tokens_per_second=_ratio(
            stats.completion_tokens, stats.time_to_first_token + seconds
        ),
    )
    for name in ("sustained", "decode"):
        found[f"{name}_tokens"] = max(stats.completion_tokens - 1, 0)
        found[f"{name}_seconds"] = seconds
        found[f"{name}_tokens_per_second"] = stats.tokens_per_second
    return found


def _seconds(stats: Stats) -> float:
    """Of all rounds after the first token."""
    return _ratio(stats.mean_committed * stats.rounds, stats.tokens_per_second)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
