"""Tapped hidden states: the output of chosen decoder layers, and no others.

``taps = (l, ...)`` names the output of decoder layer ``l``, counted from zero: Hugging Face's
``hidden_states[l + 1]``, and before the final norm for the last layer too (where Hugging Face's
list holds the normed state). Source: formats of published DFlash drafts, ``target_layer_ids``.

Hooks exist only while a forward runs, so a model handed in by the user is never left altered, and
they answer only the thread that asked, so sessions may share a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.upload import send
from dflash.drafts import mtp
from dflash.errors import CheckpointError, PairError


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers of a causal LM. Raises CheckpointError if there is none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise CheckpointError(
        f"{type(model).__name__} has no list of {count} decoder layers, so its hidden states "
        "cannot be tapped. Use it with --draft none, or another target"
    )


def _final_norm(model: Any) -> nn.Module:
    decoder = model.get_decoder()
    for name in ("norm", "final_layernorm", "norm_f"):
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise CheckpointError(f"{type(model).__name__} has no final norm that could be tapped")


FINAL_NORM = mtp.FINAL_NORM


@dataclass(frozen=True, slots=True)
class Tap:
    """Takes the output of any layer in a forward, and keeps those that are wanted."""

    layers: tuple[int, ...]
    rows: int  # the first ones, which are kept
    _states: dict[int, Tensor]

    def __call__(self, layer: int, state: Tensor) -> None:
        """``state [n, Ht]`` is the output of ``layer``."""
        if layer in self.layers:
            self._states[layer] = state if state.shape[0] == self.rows else state[: self.rows]


class Taps:
    """Captures the outputs of some layers during a forward."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """``layers`` are output-of-layer ids. Raises PairError if one is outside the target."""
        stack = decoder_layers(model) if layers else nn.ModuleList()
        for layer in layers:
            if layer != FINAL_NORM and not 0 <= layer < len(stack):
                raise PairError(
                    f"the draft taps layer {layer}, but the target has layers 0 to "
                    f"{len(stack) - 1}. This draft was made for another target"
                )
        self.layers = tuple(layers)
        self._modules = {
            layer: _final_norm(model) if layer == FINAL_NORM else stack[layer]
            for layer in self.layers
        }
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the tapped outputs of the forward run inside."""
        owner = get_ident()

        def hook(layer: int) -> Any:
            def keep(_module: nn.Module, _args: Any, output: Any) -> None:
                if get_ident() == owner:
                    self._states[layer] = output[0] if isinstance(output, tuple) else output

            return keep

        self._states.clear()
        handles = [m.register_forward_hook(hook(i)) for i, m in self._modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def tap(self, rows: int) -> Tap:
        """What takes the outputs, where layers run without hooks."""
        return Tap(self.layers, rows, self._states)

    def fill(self, features: Tensor) -> None:
        """Keep ``features [rows, M*Ht]``, as `take` hands them out: a copy, if they change."""
        for layer, state in zip(self.layers, features.chunk(len(self.layers), dim=-1), strict=True):
            self._states[layer] = state

    def twin(self) -> Taps:
        """The same layers, nothing kept yet."""
        other = copy(self)
        other._states = {}
        return other

    def states(self) -> list[Tensor]:
        """The tapped outputs of the last forward in list order, ``[B, T, Ht]`` each, or ``[T, Ht]``
        where layers ran without hooks."""
        states = [self._states[layer] for layer in self.layers]
        self._states.clear()
        return states

    def take(self) -> Tensor | None:
        """``[rows, M*Ht]`` of the last forward (batch 1), taps in list order; None without taps."""
        if not self.layers:
            return None
        states = [state if state.dim() == 2 else state[0] for state in self.states()]
        device = states[0].device
        return torch.cat([send(state, device) for state in states], dim=-1)
