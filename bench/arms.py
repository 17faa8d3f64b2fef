"""Continuing a prompt with transformers' own ``generate``, beside the engine's arms."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dflash.bench.arms import Arm, Run, engine_arm

__all__ = ["Arm", "Run", "engine_arm", "plain_transformers", "transformers_arm"]


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
