"""R50: a target whose head, or everything but its head, is held in int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.load import wrap_target
from dflash.backends.torch.pair import TorchPair
from dflash.core.decode import decode
from dflash.core.policy import Fixed, Off
from dflash.core.types import Request
from tests.core.toys import ticks, tokens_of
from tests.facades.drafts import save_draft

from .eagle_drafts import save_eagle
from .tiny import tiny_target


class Int8Linear(nn.Module):
    """A linear layer of another class, with no ``weight`` to take rows from."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("rows", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rows.to(x.dtype) * self.scale.to(x.dtype))


def quantise(model: Any, head: bool) -> Any:
    """``model`` with its head, or everything else, in int8."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and (name == "lm_head") == head:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Int8Linear(module))
    return model


@pytest.mark.parametrize("save", [save_draft, save_eagle], ids=["dflash", "eagle3"])
@pytest.mark.parametrize("head", [True, False], ids=["head", "all but the head"])
def test_a_target_with_int8_layers_runs_beside_any_draft(
    save: Any, head: bool, tmp_path: Path
) -> None:
    target = wrap_target(quantise(tiny_target("qwen3"), head).requires_grad_(False))
    pair = TorchPair(target, load_draft(str(save(tmp_path)), target, pack=False))
    texts = []
    for policy in (Off(), Fixed(5)):
        sessions = pair.open_target(64), pair.open_drafts(64)
        steps = list(decode(Request([3, 70, 200], 24), *sessions, policy, ticks()))
        texts.append(tokens_of(steps))
    assert texts[0] == texts[1]
