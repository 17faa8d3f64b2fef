"""What stands in for CUDA graphs on a CPU: operations taken down once, and done again.

As unforgiving as a real graph: the second time no line of Python runs, every number of the host is
the one of the first time, and every tensor that was there before is found at its old place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dflash.backends.torch.compiled import attend


class _Taking(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled passes run as they are, as they do while a GPU records."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.dflash.attend.default:
            with self:  # a recording holds the kernels inside
                return attend(*args)
        out = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, out))
        return out


class Tape:
    """A recorder (`graphs.Recorder`) that counts what it recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """``body`` runs once."""
        self.recorded += 1
        with _Taking() as taking:
            body()
        steps = taking.steps  # holds every tensor, so that no two have the same id

        def again() -> None:
            self.replayed += 1
            made: dict[int, Tensor] = {}
            with torch.inference_mode():
                for func, args, kwargs, out in steps:
                    now = tree_map_only(Tensor, lambda x: made.get(id(x), x), (args, kwargs))
                    found = func(*now[0], **now[1])
                    _pair(out, found, made)

        return again


def _pair(then: Any, now: Any, made: dict[int, Tensor]) -> None:
    """Remember what each tensor of then is now."""
    if isinstance(then, Tensor):
        made[id(then)] = now
    elif isinstance(then, list | tuple):
        for one, other in zip(then, now, strict=True):
            _pair(one, other, made)
