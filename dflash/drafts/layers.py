"""Which target layers a draft listens to. Integers only.

A tap id names the *output* of that decoder layer, counted from zero; it is entry ``id + 1`` of
transformers' ``hidden_states``. GGUF files and the speculators format store ``id + 1``.
"""

from __future__ import annotations

from dflash.errors import ConfigError


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Evenly spread taps from the second to the third-to-last target layer.

    One tap sits in the middle. Several are rounded half to even, as the published drafts are.
    Raises ConfigError for counts the formula has no answer for. Source: DFlash paper, section 5.
    """
    if num_draft_layers < 1 or num_target_layers < 1:
        raise ConfigError(
            "taps need at least one target layer and one tap, got "
            f"{num_target_layers} target layers and {num_draft_layers} taps"
        )
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4  # from layer 1 to layer T - 3
    if span < 0:
        raise ConfigError(
            f"a target of {num_target_layers} layers is too shallow for the tap formula "
            f"({num_draft_layers} taps between layer 1 and layer {num_target_layers - 3}); "
            "name the layers yourself, for instance --taps 0,1"
        )
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]
