"""The state of one recurrent layer: convolution inputs and a running sum, nothing per token.

A transformers ``LinearAttentionLayer`` whose state can be taken out and put back. Where the parent
class writes into buffers of fixed address (for CUDA graphs), this one keeps what the model computed
last, so that a state taken out before a pass survives it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import cache_utils

State: TypeAlias = tuple[dict[int, Tensor | None], dict[int, Tensor | None]]
"""Convolution inputs ``[B, C, width]`` and recurrent state ``[B, ...]``, by index of the state."""

_Base: Any = getattr(cache_utils, "LinearAttentionLayer", object)  # not in old transformers


class StateLayer(_Base):  # type: ignore[misc]
    """Convolution and recurrent states of one layer; ``touched`` = a pass of many rows wrote it."""

    is_compileable = False

    def __init__(self, states: int = 1) -> None:
        """``states`` is how many pairs of states the layer keeps."""
        super().__init__(number_of_states=states)
        self.touched = False

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take in ``[B, C, n]``; returns all that the convolution of these n rows reads."""
        known = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        seen = conv_states if known is None else torch.cat([known, conv_states], dim=-1)
        if self.conv_kernel_size[state_idx] is None:
            self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
        width = self.conv_kernel_size[state_idx]
        tail = seen[..., -width:]
        self.conv_states[state_idx] = F.pad(tail, (width - tail.shape[-1], 0)).clone()
        self.has_previous_state[state_idx] = self.touched = True
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Any:
        """Keep ``[B, ...]`` as the newest state, and return it."""
        self.recurrent_states[state_idx] = recurrent_states
        self.has_previous_state[state_idx] = self.touched = True
        return recurrent_states

    def save(self) -> State:
        """The state as it is now; what comes after does not change it."""
        if not any(self.has_previous_state.values()):
            return {}, {}
        return _clones(self.conv_states), _clones(self.recurrent_states)

    def restore(self, state: State) -> None:
        """Go back to what `save` gave; it can be given again."""
        conv, recurrent = state
        for index in range(self.number_of_states):
            self.conv_states[index] = _clone(conv.get(index))
            self.recurrent_states[index] = _clone(recurrent.get(index))
            self.has_previous_state[index] = index in conv

    def reset(self) -> None:
        """Forget everything."""
        self.restore(({}, {}))

    def copy(self) -> StateLayer:
        """An independent layer with the same state."""
        twin = StateLayer(self.number_of_states)
        twin.conv_kernel_size = dict(self.conv_kernel_size)
        twin.restore(self.save())
        return twin

    def bytes(self) -> int:
        """Bytes of the state now."""
        held = [*self.conv_states.values(), *self.recurrent_states.values()]
        return sum(part.nbytes for part in held if part is not None)


def _clone(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.clone()


def _clones(parts: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
    return {index: _clone(part) for index, part in parts.items()}
