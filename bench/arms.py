"""What is compared: ways to continue a prompt greedily, each timed by the reader's clock.

The clock runs from the call to the first token (prefill) and from there to the end (decode), so
detokenising and streaming count, as they do for a person who waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.core.stats import Stats
from dflash.engine import Engine


@dataclass(frozen=True, slots=True)
class Run:
    """One continuation."""

    ids: tuple[int, ...]
    first: int  # tokens that came with the prefill
    prefill: float  # seconds
    decode: float  # seconds
    stats: Stats | None = None

    @property
    def rate(self) -> float:
        """Tokens a second after the prefill."""
        return (len(self.ids) - self.first) / self.decode if self.decode else 0.0


Arm = Callable[[Sequence[int], int], Run]


def engine_arm(engine: Engine, block_size: Any) -> Arm:
    """Our engine at one block size (1 = plain, "auto"), nothing reused between prompts."""

    def run(prompt: Sequence[int], tokens: int) -> Run:
        ids: list[int] = []
        first, stats = 0, None
        start = time.perf_counter()
        begun = start
        for chunk in engine.stream(
            list(prompt), max_tokens=tokens, block_size=block_size, reuse=False
        ):
            if not ids:
                begun, first = time.perf_counter(), len(chunk.token_ids)
            ids += chunk.token_ids
            stats = chunk.stats
        return Run(tuple(ids), first, begun - start, time.perf_counter() - begun, stats)

    return run


class _Ticks:
    """A transformers streamer that keeps the time of the first token."""

    def __init__(self) -> None:
        self.first = 0.0
        self._calls = 0

    def put(self, value: object) -> None:  # noqa: ARG002 - the streamer protocol
        self._calls += 1
        if self._calls == 2:  # the first call brings the prompt
            self.first = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def transformers_arm(model: Any, eos_ids: frozenset[int]) -> Arm:
    """transformers' own ``generate``, greedy, with its default cache."""
    import torch

    def run(prompt: Sequence[int], tokens: int) -> Run:
        ids = torch.tensor([list(prompt)], device=model.device)
        ticks = _Ticks()
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=sorted(eos_ids) or None,
                pad_token_id=min(eos_ids, default=0),
                streamer=ticks,
            )
        end = time.perf_counter()
        made = tuple(out[0, len(prompt) :].tolist())
        return Run(made, 1, ticks.first - start, end - ticks.first)

    return run


def plain_transformers(target: str) -> Any:
    """The same target as transformers runs it: float32, nothing swapped."""
    from dflash.backends.torch.load import load_target

    return load_target(target, dtype="float32", pack=False).model
