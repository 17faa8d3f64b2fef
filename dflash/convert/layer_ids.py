"""What a list of layer numbers means, one function for each convention in use.

Inside this package a tap is the *output* of decoder layer ``l``, counted from zero, as in the
``target_layer_ids`` of Hugging Face drafts. Most other formats count the layer whose *input* is
tapped: the output of layer ``l`` is the input of layer ``l + 1``. Taking one for the other costs
acceptance and gives no message.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.errors import CheckpointError


def from_target_layer_ids(ids: Sequence[int]) -> list[int]:
    """DFlash on Hugging Face (and MLX): outputs already."""
    return list(ids)


def to_target_layer_ids(taps: Sequence[int]) -> list[int]:
    """The inverse of `from_target_layer_ids`."""
    return list(taps)


def from_speculators(ids: Sequence[int]) -> list[int]:
    """``aux_hidden_state_layer_ids`` of speculators: inputs."""
    return _from_inputs(ids, "aux_hidden_state_layer_ids")


def to_speculators(taps: Sequence[int]) -> list[int]:
    """The inverse of `from_speculators`."""
    return [tap + 1 for tap in taps]


def from_gguf(ids: Sequence[int]) -> list[int]:
    """``dflash.target_layers`` and ``eagle3.target_layers`` of GGUF files: inputs."""
    return _from_inputs(ids, "target_layers")


def to_gguf(taps: Sequence[int]) -> list[int]:
    """The inverse of `from_gguf`."""
    return [tap + 1 for tap in taps]


def from_eagle(ids: Sequence[int]) -> list[int]:
    """``eagle_aux_hidden_state_layer_ids`` on top of a config (EAGLE, vLLM): inputs."""
    return _from_inputs(ids, "eagle_aux_hidden_state_layer_ids")


def to_eagle(taps: Sequence[int]) -> list[int]:
    """The inverse of `from_eagle`."""
    return [tap + 1 for tap in taps]


def from_specforge(ids: Sequence[int]) -> list[int]:
    """``eagle_config.eagle_aux_hidden_state_layer_ids`` (SpecForge, SGLang): outputs."""
    return list(ids)


def to_specforge(taps: Sequence[int]) -> list[int]:
    """The inverse of `from_specforge`."""
    return list(taps)


def _from_inputs(ids: Sequence[int], name: str) -> list[int]:
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 1 for i in ids):
        raise CheckpointError(
            f"{name} {list(ids)} counts layers by their inputs, so the least is 1: the input of "
            "layer 0 is the embedding, which no draft here reads. If the list counts outputs, add "
            "1 to each"
        )
    return [i - 1 for i in ids]
