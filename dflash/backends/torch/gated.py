"""The gated half of a feed-forward: ``act(gate x) * (up x)``, from one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


class GatedLinear(nn.Linear):
    """``[.., in] -> [.., out]`` with weight ``[2 out, in]``: the gate's rows, then the others'."""

    def __init__(self, joint: nn.Linear, act: Activation) -> None:
        """Take over the weights of ``joint``, gate and up behind each other."""
        super().__init__(1, 1, bias=joint.bias is not None, device="meta")
        self.in_features, self.out_features = joint.in_features, joint.out_features
        self.weight, self.act = joint.weight, act
        if joint.bias is not None:
            self.bias = joint.bias

    def forward(self, x: Tensor) -> Tensor:
        """Both products as one, then what ties them."""
        return gate(super().forward(x), self.act)


def gate(both: Tensor, act: Activation) -> Tensor:
    """[.., 2 out] to [.., out]."""
    half = both.shape[-1] // 2
    opened: Tensor = act(both.narrow(-1, 0, half)).mul_(both.narrow(-1, half, half))
    return opened


def is_silu(act: Any) -> bool:
    """Whether ``act`` is x * sigmoid(x), under whatever name: tried out."""
    x = torch.linspace(-9, 9, 19)
    return bool(torch.allclose(act(x), x * torch.sigmoid(x), rtol=1e-6, atol=1e-6))
