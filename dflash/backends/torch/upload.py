"""Numbers of the host on the device, and back, without anybody waiting.

On CUDA an ordinary copy from the host waits for all work queued before it; one from pinned memory
is queued itself, and torch keeps that memory until it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Integers as int64 on ``device``; a tensor passes, from the host or from there."""
    if isinstance(numbers, Tensor):
        return send(numbers, device)
    return send(torch.tensor(numbers, dtype=torch.long), device)


def send(found: Tensor, device: torch.device) -> Tensor:
    """``found`` on ``device``."""
    if found.device.type != "cpu" or device.type not in ("cuda", "cpu"):
        return found.to(device)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def on_its_way(found: Tensor) -> Tensor:
    """``found`` in the host's memory, to be read when the device has passed this place."""
    if found.device.type != "cuda":
        return found
    return torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, non_blocking=True)
