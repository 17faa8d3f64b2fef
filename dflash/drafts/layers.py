"""Which target layers a draft listens to. Integers only.

A tap id names the *output* of that decoder layer, counted from zero; it is entry ``id + 1`` of
transformers' ``hidden_states``. GGUF files and the speculators format store ``id + 1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.errors import CheckpointError, ConfigError

ANY_DEPTH = 1000
"""Layers of a target that nobody knows, where no tap is really run: the same for whoever asks."""


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Evenly spread taps from the second to the third-to-last target layer.

    One tap sits in the middle. Several are rounded half to even, as the published drafts are.
    Raises ConfigError for counts the formula has no answer for. Source: DFlash paper, section 5.
    """
    counts = (num_target_layers, num_draft_layers)
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in counts):
        raise ConfigError(
            "taps need at least one target layer and one tap, got "
            f"{num_target_layers!r} target layers and {num_draft_layers!r} taps"
        )
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4  # from layer 1 to layer T - 3
    if span < 0:
        raise ConfigError(
            f"a target of {num_target_layers} layers is too shallow for the tap formula "
            f"({num_draft_layers} taps between layer 1 and layer {num_target_layers - 3}); "
            "name the layers yourself, for instance taps=0,1"
        )
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def eagle_layer_ids(config: Mapping[str, Any], num_target_layers: int | None) -> list[int]:
    """Taps of an EAGLE-3 draft, from whichever layout names them.

    A list on top of the config (EAGLE, vLLM, speculators) names the layers' *inputs*, one in
    ``eagle_config`` (SpecForge, SGLang) their outputs, as ours do. Without either, the inputs of
    layers 2, n // 2 and n - 3, which all layouts agree on. Raises CheckpointError if two lists
    name different layers, or the default needs a depth that is not known.
    """
    nested = config.get("eagle_config")
    outputs = nested.get(_EAGLE_KEY) if isinstance(nested, Mapping) else None
    inputs = config.get(_EAGLE_KEY)
    if inputs and outputs and [i - 1 for i in inputs] != list(outputs):
        raise CheckpointError(
            f"{_EAGLE_KEY} {inputs} and eagle_config.{_EAGLE_KEY} {outputs} name different layers "
            "(the former should be one higher); remove the wrong one from config.json"
        )
    if outputs:
        return list(outputs)
    if inputs:
        return [i - 1 for i in inputs]
    if num_target_layers is None:
        raise CheckpointError(
            "this EAGLE-3 draft names no layers, so it taps those before layers 2, n // 2 and "
            "n - 3 of its target: open it together with its target, or name them with --taps"
        )
    return [i - 1 for i in (2, num_target_layers // 2, num_target_layers - 3)]


_EAGLE_KEY = "eagle_aux_hidden_state_layer_ids"
