"""R13: samples of real torch sessions, target and draft, follow the target's exact softmax."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.tables import Tables
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.accept import distribution
from dflash.core.decode import decode
from dflash.core.logits import process
from dflash.core.policy import Fixed
from dflash.core.types import Request, Sampling
from dflash.verify.sampling import DEPTH, audit

from .drafts import tiny_draft
from .tiny import tiny_target

pytestmark = pytest.mark.torch

VOCAB, SAMPLES = 16, 300  # test_rules.py has the large numbers; here everything is real but few
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WAYS: dict[str, dict[str, Any]] = {
    "rejection": {"rule": "rejection"},
    "block, penalties": {"rule": "block", "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "match, shared noise": {"rule": "match", "min_p": 0.02},
    "argmax proposals": {"rule": "rejection", "greedy_drafts": True},
}


@cache
def models() -> tuple[Any, Any]:
    return (
        tiny_target(vocab=VOCAB, layers=2, eos=None),
        tiny_draft(vocab_size=VOCAB, num_target_layers=2, nested={"target_layer_ids": [0, 1]}),
    )


def tables(target: Any) -> Tables:
    head = target.lm_head.weight.detach()
    return Tables(target.model.embed_tokens.weight.detach(), lambda hidden: hidden @ head.T)


def exact(sampling: Sampling) -> Callable[[tuple[int, ...]], Any]:
    target, request = models()[0], Request(PROMPT, 9, sampling=sampling)

    @cache
    def rows(output: tuple[int, ...]) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPT, *output]])
            logits = target(input_ids=ids, use_cache=False).logits[0, -1].numpy()
        return distribution(process(logits, request, output), sampling)

    return rows


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_samples_of_sessions_follow_the_targets_law(options: dict[str, Any]) -> None:
    target, draft = models()
    session = TorchTargetSession(target, (0, 1), 64)
    drafting = DFlashSession(draft, tables(target), 64)
    accepted = 0

    def sample(number: int) -> list[int]:
        nonlocal accepted
        request = Request(PROMPT, 5, sampling=Sampling(0.6, top_k=4, seed=number, **options))
        reuse = drafting.holds(PROMPT, session.holds(PROMPT, len(PROMPT) - 1))
        tokens: list[int] = []
        steps = decode(request, session, [drafting], Fixed(4), time.perf_counter_ns, reuse)
        for step in steps:
            tokens += step.tokens
            accepted += step.accepted
            if len(tokens) >= DEPTH:  # the rest is not judged
                break
        return tokens

    found = audit("sessions", sample, exact(Sampling(0.6, top_k=4, **options)), SAMPLES)
    assert found.passed, found
    assert found.positions[1].prefixes > 1
    assert accepted > 0
