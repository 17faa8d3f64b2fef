"""One wait a round: what a round asks of the device is counted, call by call.

On a CPU nothing waits, so the calls that would are counted instead: those that hand a tensor's
numbers to Python, those whose result has as many rows as the numbers say, and those that put the
host's numbers on a device in a way that waits for the device (`upload.py` has the other way).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.load import take_target
from dflash.backends.torch.pair import TorchPair
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Request, Sampling
from tests.drafts.configs import CONV_AND_SELECTOR
from tests.facades.drafts import save_draft

from .tape import Tape
from .tiny import tiny_target

pytestmark = pytest.mark.torch

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
SIZED = ("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere")
MADE = (torch.tensor, torch.as_tensor)


class Waits(TorchFunctionMode):
    """Counts the calls that would make the host wait, were the tensors on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READS + SIZED and any(isinstance(x, torch.Tensor) for x in args[:1]):
            self.seen[name] += 1
        if func in MADE and kwargs.get("device") is not None:
            self.seen["made on the device"] += not isinstance(args[0], torch.Tensor)
        if name == "to" and len(args) > 1 and isinstance(args[1], torch.device | str):
            self.seen["moved"] += not kwargs.get("non_blocking", False)
        return func(*args, **kwargs)


KINDS: dict[str, dict[str, Any]] = {"dflash": {}, "dflash2": CONV_AND_SELECTOR}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchPair:
    target = take_target(tiny_target(), "tiny")
    folder = save_draft(tmp_path_factory.mktemp("draft"), **KINDS[request.param])
    return TorchPair(target, load_draft(str(folder), target))


def rounds(pair: TorchPair, policy: Any, sampling: Sampling, tape: Tape) -> list[Counter[str]]:
    """What each round of a text asked for, less those that recorded something."""
    target, drafts = pair.open_target(128), pair.open_drafts(128)
    asked = Request([5, 77, 130, 9, 42], 14, sampling=sampling)
    found, steps = list[Counter[str]](), decode(asked, target, drafts, policy, lambda: 0)
    next(steps)
    while True:
        before = tape.recorded
        with Waits() as waits:
            step = next(steps, None)
        if step is None:
            return found
        if tape.recorded == before:
            found.append(waits.seen)


WAYS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "seeded": Sampling(0.8, top_p=0.9, seed=3),
    "rejection": Sampling(0.8, seed=3, rule="rejection"),
    "penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.5),
    "biased": Sampling(logit_bias=((3, 2.0),), bad_words=((7,),), min_tokens=9),
    "logprobs": Sampling(logprobs=2),
}


@pytest.mark.parametrize(
    ("way", "graphs"), [*((way, False) for way in WAYS), ("greedy", True), ("rejection", True)]
)
def test_a_round_waits_once(way: str, graphs: bool, pair: TorchPair) -> None:
    tape = Tape()
    pair._graphs = Graphs(tape) if graphs else None
    for policy in (Fixed(4), Fixed(1)):
        found = rounds(pair, policy, WAYS[way], tape)
        assert len(found) > 5 and bool(tape.replayed) is graphs
        # rounds 1, 2, 4, 8 look at a flag that came with the block: no wait, as nothing is behind
        waited = [sum(seen.values()) - seen["__bool__"] for seen in found]
        assert set(waited) == {1}, found
        assert sum(seen["__bool__"] for seen in found) <= len(found).bit_length()


def test_that_a_wait_would_be_counted() -> None:
    numbers = torch.arange(3)
    with Waits() as waits:
        torch.tensor([1], device=numbers.device)
        torch.tensor([1])
        numbers.nonzero()
        numbers.to(torch.device("cpu"))
        numbers.to(torch.device("cpu"), non_blocking=True)
        numbers.to(torch.float32)
        assert bool(numbers[0] == 0) and numbers.tolist() and numbers[1].item()
    assert waits.seen == Counter(
        {"made on the device": 1, "nonzero": 1, "moved": 1, "__bool__": 1, "tolist": 1, "item": 1}
    )
