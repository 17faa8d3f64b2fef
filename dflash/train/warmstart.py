"""Starting weights: the target's own last layers, arranged so that the context fits them.

A draft layer reads context rows that are shared by all layers, so each layer's input norm is
folded into its projections (`W <- W diag(w)`, norm weight 1), and `fc` passes the last tap
through: the copied layers then see as context what they saw in the target. What cannot be
copied (another architecture, other widths) starts at random. Measured in docs/LOG.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.draft_weights import load_weights
from dflash.drafts.spec import read_spec
from dflash.errors import ConfigError


@torch.no_grad()
def random_start(model: DFlashDraftModel, generator: torch.Generator) -> None:
    """Normal(0, 0.02) matrices, norms of one."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        else:
            nn.init.ones_(parameter)


@torch.no_grad()
def warm_start(model: DFlashDraftModel, target: Any, samples: Sequence[Sequence[int]]) -> bool:
    """Copy what fits from ``target`` (a transformers causal LM); True if the layers were copied.

    ``samples`` are token sequences on which the size of queries and keys is measured: the draft
    norms them per head, many targets do not.
    """
    width = model.spec.hidden_size
    if model.spec.target_hidden_size == width:
        model.fc.weight[:, -width:] += torch.eye(width, device=model.fc.weight.device)
    layers = list(getattr(target.base_model, "layers", []))[-len(model.layers) :]
    if len(layers) < len(model.layers) or not all(map(fits, model.layers, layers)):
        return False
    scales = head_scales(target, layers, samples)
    for new, old, scale in zip(model.layers, layers, scales, strict=True):
        copy_layer(new, old, scale)
    final = getattr(target.base_model, "norm", None)
    if final is not None and final.weight.shape == model.norm.weight.shape:
        model.norm.weight.copy_(final.weight)
    return True


def fits(new: nn.Module, old: nn.Module) -> bool:
    """Whether an old layer has the same named projections of the same shapes, without biases."""
    theirs = dict(old.named_parameters())
    own = ("attention_conv.", "mlp_conv.")  # what no target has
    ours = {
        name: p.shape
        for name, p in new.named_parameters()
        if p.ndim > 1 and not name.startswith(own)
    }
    known = set(ours) | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    known |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    return set(theirs) <= known and all(
        name in theirs and theirs[name].shape == shape for name, shape in ours.items()
    )


def copy_layer(new: Any, old: Any, scale: tuple[float, float]) -> None:
    """Projections with the input norm folded in; the feed-forward as it is; head norms at scale."""
    new.self_attn.q_norm.weight.fill_(scale[0])
    new.self_attn.k_norm.weight.fill_(scale[1])
    fold: Tensor = old.input_layernorm.weight.float()
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(old.self_attn, name).weight.float() * fold
        getattr(new.self_attn, name).weight.copy_(weight)
    new.self_attn.o_proj.weight.copy_(old.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(new.mlp, name).weight.copy_(getattr(old.mlp, name).weight)
    new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight)


def head_scales(
    target: Any, layers: Sequence[Any], samples: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """Root mean square of queries and keys in the layers to be copied, before rotation."""
    found: dict[tuple[int, str], list[float]] = {}
    hooks = []
    for index, layer in enumerate(layers):
        for name in ("q_proj", "k_proj"):
            place = found.setdefault((index, name), [])

            def note(_m: Any, _i: Any, out: Tensor, place: list[float] = place) -> None:
                place.append(out.float().pow(2).mean().sqrt().item())

            hooks.append(getattr(layer.self_attn, name).register_forward_hook(note))
    for ids in samples:
        target.base_model(input_ids=torch.tensor([list(ids)], device=target.device))
    for hook in hooks:
        hook.remove()
    mean = {key: sum(values) / max(len(values), 1) or 1.0 for key, values in found.items()}
    return [(mean[index, "q_proj"], mean[index, "k_proj"]) for index in range(len(layers))]


@torch.no_grad()
def start_from(model: DFlashDraftModel, folder: Path) -> list[str]:
    """Take over the weights of the draft in ``folder``; returns the names that it did not have.

    A DFlash v1 draft can be the start of a DFlash2 one. Raises ConfigError for other shapes.
    """
    loaded, _ = load_weights(
        folder, read_spec(folder), device=model.norm.weight.device, dtype=torch.float32
    )
    found, own = loaded.state_dict(), model.state_dict()
    wrong = [n for n, value in found.items() if n not in own or own[n].shape != value.shape]
    if wrong or loaded.spec.taps != model.spec.taps:
        raise ConfigError(
            f"--start {folder} is a draft of another shape"
            + (f": {', '.join(wrong[:3])}" if wrong else f": taps {list(loaded.spec.taps)}")
        )
    model.load_state_dict(found, strict=False)
    if "candidate_selector.predecessor_codebook" in found:  # the rows are whole already
        for name in ("predecessor_map", "successor_map"):
            model.get_parameter(f"candidate_selector.{name}").zero_()
    return [name for name in own if name not in found]
