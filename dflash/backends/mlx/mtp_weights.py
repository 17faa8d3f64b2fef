"""The tensors of a target's multi-token prediction head, read from the files beside the target's.

The block is built like the target's last layer of full attention. What a family's files need before
they fit mlx-lm's modules (norms stored around zero, experts one by one), the model's own
``sanitize`` does: it is shown the checkpoint with the block's tensors in that layer's place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from dflash.backends.mlx import lm
from dflash.backends.mlx.cache import FULL
from dflash.backends.mlx.load import LoadedTarget
from dflash.backends.mlx.mtp import MtpModule
from dflash.checkpoint import tensor_names, weight_files
from dflash.drafts.mtp import count_heads, holds_heads, mtp_spec
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError

PARTS = {
    "fc": ("mtp.fc", "eh_proj"),
    "embed_norm": ("mtp.pre_fc_norm_embedding", "enorm"),
    "state_norm": ("mtp.pre_fc_norm_hidden", "hnorm"),
    "norm": ("mtp.norm", "shared_head.norm"),
}
"""Our names, and those of files: Qwen's under ``mtp.``, DeepSeek's as a layer behind the last."""
_LENT = ("shared_head.head.", "embed_tokens.")  # copies of the target's tables


def has_mtp(target: LoadedTarget) -> bool:
    """Whether the target's config speaks of heads and its checkpoint brings their tensors."""
    if target.folder is None or not count_heads(target.config.get):
        return False
    return holds_heads(tensor_names(target.folder), target.num_layers)


def read_mtp(target: LoadedTarget) -> MtpModule:
    """The head of ``target``. Raises CheckpointError where there is none that can be read."""
    if not has_mtp(target):
        raise CheckpointError(
            f"{target.name} has no multi-token prediction heads (its config names none, or its "
            "files lack their tensors, as those that mlx_lm.convert writes do); leave out "
            "--draft mtp"
        )
    if count_heads(target.config.get) > 1:
        raise _unreadable(target, "it has several, and one is read here")
    place, kind = _like(target)
    block, eps = deepcopy(lm.stack_of(target.model).layers[place]), target.config["rms_norm_eps"]
    model = MtpModule(_spec(target), block, kind, float(eps))
    try:
        found = _settled(target, _stored(target), place)
    except lm.LOAD_ERRORS as error:
        raise _unreadable(target, f"{type(error).__name__}: {error}") from error
    wanted = dict(tree_flatten(model.parameters()))
    wrong = {name for name in wanted.keys() & found if wanted[name].shape != found[name].shape}
    wrong |= wanted.keys() ^ found.keys()
    if wrong:
        raise _unreadable(target, f"missing, left over or misshapen: {', '.join(sorted(wrong))}")
    model.load_weights([(name, w.astype(target.dtype)) for name, w in found.items()])
    mx.eval(model.parameters())
    return model


def _spec(target: LoadedTarget) -> DraftSpec:
    config, width = target.config, target.hidden_size
    heads = int(config["num_attention_heads"])
    return mtp_spec(
        hidden_size=width,
        intermediate_size=int(config.get("intermediate_size") or 0),
        num_heads=heads,
        head_dim=int(config.get("head_dim") or width // heads),
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )


def _like(target: LoadedTarget) -> tuple[int, type]:
    """The last layer that sees everything, and its cache: what the block is built like."""
    caches = lm.new_caches(target.model)
    places = [place for place, cache in enumerate(caches) if type(cache).__name__ in FULL]
    if not places:
        raise _unreadable(target, "no layer of this target sees everything")
    if any(isinstance(part, nn.QuantizedLinear) for part in target.model.modules()):
        raise _unreadable(target, "the target is quantised and its head is not")
    return places[-1], type(caches[places[-1]])


def _stored(target: LoadedTarget) -> dict[str, Any]:
    """All tensors of the checkpoint, read when they are computed with."""
    assert target.folder is not None, "has_mtp looked"
    found: dict[str, Any] = {}
    for file in weight_files(target.folder):
        found |= mx.load(str(file))  # type: ignore[arg-type]
    return found


def _settled(target: LoadedTarget, stored: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The head's tensors by the module's names, as mlx-lm's modules want them."""
    depth = target.num_layers
    block = re.compile(rf"^(?:.*\.)?(?:mtp\.layers\.0|layers\.{depth})\.(.+)$")
    names = {part: ours for ours, parts in PARTS.items() for part in parts}
    found, shown = dict[str, Any](), dict[str, Any]()
    tables = (n for n in stored if n.endswith("embed_tokens.weight") and "mtp." not in n)
    root = next(tables, "").removesuffix("embed_tokens.weight")
    there = f"{root}layers.{place}."
    for name, tensor in stored.items():
        inside = block.match(name)
        rest = inside[1] if inside else name[name.find("mtp.") :] if "mtp." in name else None
        if rest is None:
            if not name.startswith(there):
                shown[name] = tensor
        elif (ours := names.get(rest.removesuffix(".weight"))) is not None:
            found[f"{ours}.weight"] = tensor
        elif not rest.startswith(_LENT):
            shown[there + rest] = tensor
    made, raw = target.model.sanitize(shown), stored[f"{root}norm.weight"]
    kept = next((t for n, t in made.items() if _is_final_norm(n)), raw)
    if bool((mx.abs(kept.astype(mx.float32) - raw.astype(mx.float32)) > 0.5).all().item()):
        found |= {n: t + 1.0 for n, t in found.items() if t.ndim == 1}  # stored around zero
    inner = re.compile(rf"^(?:.*\.)?layers\.{place}\.(.+)$")
    parts = ((inner.match(name), tensor) for name, tensor in made.items())
    return found | {f"block.{match[1]}": tensor for match, tensor in parts if match}


def _is_final_norm(name: str) -> bool:
    return name.endswith("norm.weight") and "layers." not in name


def _unreadable(target: LoadedTarget, why: str) -> CheckpointError:
    return CheckpointError(
        f"the multi-token prediction heads of {target.name} cannot be read on MLX: {why}. "
        "Use --no-mtp, or --backend torch"
    )
