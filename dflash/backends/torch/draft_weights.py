"""Tensors of a draft's safetensors files into its module: all of them, and nothing else.

Names are those of published DFlash files, with or without a ``model.`` prefix. Nothing is
executed: pickles are refused with the command that converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash.backends.torch.dflash import DFlashDraftModel, make_rotary
from dflash.backends.torch.kinds import KINDS
from dflash.checkpoint import PICKLES, count_weights, weight_files
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError, WeightsError

OWN_TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t")
_IGNORED = ("rotary_emb.", "t2d")
_RENAMED = (
    ("midlayer.", "layers.0."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
)
_CONVERT = (
    'convert it once if you trust it: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('{0}', weights_only=True), '{1}')\""
)


def load_weights(
    folder: Path, spec: DraftSpec, *, device: torch.device, dtype: torch.dtype
) -> tuple[DFlashDraftModel, dict[str, Tensor]]:
    """The module with every weight from ``folder``, and the tables the draft brought itself.

    The tables are those of ``OWN_TABLES`` that exist, and ``mask_embedding`` of a sidecar. Raises
    CheckpointError for files of another kind, WeightsError for tensors that are missing, left
    over, misshapen or not finite; one error lists them all.
    """
    _refuse_pickles(folder)
    if spec.raw.get("quantization_config"):
        raise CheckpointError(
            f"{folder} is a quantised draft, which is not supported yet; use the draft's bfloat16 "
            "weights"
        )
    with torch.device("meta"):
        model: DFlashDraftModel = KINDS.load(spec.kind).module(spec)
    tensors = dict(_tensors(folder, spec))
    tables = {name: tensors.pop(name) for name in OWN_TABLES if name in tensors}
    _check_names(folder, spec, model.state_dict(), tensors)
    _check_floats(folder, {name: t for name, t in {**tensors, **tables}.items() if name != "d2t"})
    state = {name: tensor.to(device, dtype, copy=True) for name, tensor in tensors.items()}
    model.load_state_dict(state, assign=True)
    model.rotary = make_rotary(spec).to(device)
    _check_finite(folder, {**state, **tables})
    return model.eval().requires_grad_(False), {**tables, **_mask_embedding(folder, spec)}


def _tensors(folder: Path, spec: DraftSpec) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under the name the module gives it."""
    count_weights(folder)  # complete files, before anything is read
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for stored in tensors.keys():  # noqa: SIM118  # the handle is no mapping
                    name = _rename(stored)
                    if not any(part in name for part in _IGNORED):
                        yield from _unfuse(name, tensors.get_tensor(stored), spec)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    for theirs, ours in _RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def _unfuse(name: str, tensor: Tensor, spec: DraftSpec) -> Iterator[tuple[str, Tensor]]:
    """A fused query, key and value projection as three; anything else as it is."""
    head, fused, tail = name.partition("self_attn.qkv_proj.")
    sizes = [heads * spec.head_dim for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
    if not fused or tensor.shape[0] != sum(sizes):
        yield name, tensor
        return
    parts = torch.split(tensor, sizes)
    for which, part in zip("qkv", parts, strict=True):
        yield f"{head}self_attn.{which}_proj.{tail}", part


def _check_names(
    folder: Path, spec: DraftSpec, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Raise WeightsError with everything that does not fit."""
    problems = []
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(found.keys() - wanted.keys())
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}")
    columns = len(spec.taps) * spec.target_hidden_size
    for name in sorted(wanted.keys() & found.keys()):
        shape, asked = tuple(found[name].shape), tuple(wanted[name].shape)
        if shape != asked and name == "fc.weight" and len(shape) == 2 and shape[1] != columns:
            problems.append(
                f"fc.weight has {shape[1]} columns, but {len(spec.taps)} taps of width "
                f"{spec.target_hidden_size} make {columns}"
            )
        elif shape != asked:
            problems.append(f"{name} is {list(shape)}, the config makes it {list(asked)}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise WeightsError(
            f"the tensors in {folder} are not those of the {spec.kind} draft its config.json "
            f"describes; nothing was loaded:\n{listed}"
        )


def _check_floats(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    whole = sorted(name for name, tensor in tensors.items() if not tensor.is_floating_point())
    if whole:
        raise WeightsError(
            f"{folder} has weights stored as {tensors[whole[0]].dtype}: {', '.join(whole)}. "
            "Quantised drafts are not supported yet; use the draft's bfloat16 weights"
        )


def _check_finite(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    bad = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]
    if bad:
        raise WeightsError(
            f"{folder} has weights that are NaN or infinite: {', '.join(sorted(bad))}. The file "
            "is damaged or was converted to too narrow a dtype; get it again"
        )


def _refuse_pickles(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        advice = _CONVERT.format(pickles[0], "model.safetensors")
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code and is not "
            f"opened; {advice}"
        )


def _mask_embedding(folder: Path, spec: DraftSpec) -> dict[str, Tensor]:
    """The sidecar that stands for the mask token's embedding row, if there is one."""
    file = folder / "mask_embedding.safetensors"
    if file.is_file():
        sidecar = load_file(file)
        row = sidecar.get("embedding")
        if row is None or row.numel() != spec.target_hidden_size:
            raise WeightsError(f"{file} must hold 'embedding' of {spec.target_hidden_size} numbers")
        return {"mask_embedding": row.flatten()}
    if (folder / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{folder} brings its mask token's embedding in mask_embedding.pt, a pickle, which can "
            "run code and is not opened. Make a folder without it: dflash convert "
            f"{folder} --to hf --out NEW"
        )
    return {}
