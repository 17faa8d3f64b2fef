"""Checkpoints that resume exactly, and the draft folder that is served.

A step is a pure function of (weights, optimiser, step number, seed): order, anchors and dropout
need no saved random state. `state.safetensors` + `state.json` are replaced atomically, so a run
killed at any moment resumes from its last checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.errors import CheckpointError, ConfigError
from dflash.train.config import CHANGEABLE, leaves, option_of
from dflash.train.selector import served

STATE = "state"
SHARD_BYTES = 15 * 2**20


def save_state(
    folder: Path,
    model: DFlashDraftModel,
    optimizer: torch.optim.Optimizer,
    step: int,
    identity: Mapping[str, Any],
    history: Mapping[str, Any],
) -> None:
    """Write weights (float32), AdamW moments, the step and the run's identity."""
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    for index, slot in optimizer.state_dict()["state"].items():
        for key, value in slot.items():
            tensors[f"adam.{names[index]}.{key}"] = torch.as_tensor(value)
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    temporary = folder / f"{STATE}.safetensors.part"
    meta = {"step": step, "identity": dict(identity), "history": dict(history)}
    # step and identity travel inside the one file: two files could come from two steps
    save_file(tensors, temporary, metadata={"state": json.dumps(meta)})
    temporary.replace(folder / f"{STATE}.safetensors")


def load_state(
    folder: Path,
    model: DFlashDraftModel,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
) -> tuple[int, dict[str, Any]]:
    """Restore in place; returns the step and the history.

    Raises CheckpointError if there is nothing to resume, ConfigError if the run was another one
    (the message names the differing settings).
    """
    meta = _meta(folder)
    tensors = load_file(folder / f"{STATE}.safetensors")
    _refuse_changes(folder, leaves(meta["identity"]), leaves(identity))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[f"model.{name}"])
    slots = {index: adam_slot(tensors, name) for index, name in enumerate(own)}
    restored = optimizer.state_dict() | {"state": {i: slot for i, slot in slots.items() if slot}}
    optimizer.load_state_dict(restored)
    return int(meta["step"]), dict(meta["history"])


def _refuse_changes(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that differ and that both sides know."""
    told = [
        f"--{option_of(path).replace('_', '-')} was {then[path]!r} and is {value!r}"
        for path, value in now.items()
        if path in then and then[path] != value and path not in CHANGEABLE
    ]
    if told:
        raise ConfigError(
            f"the run in {folder} was started with other settings: {', '.join(told)}. Leave these "
            "flags out to go on, or choose another --out"
        )


def saved_run(folder: Path) -> tuple[int, dict[str, Any]]:
    """Step and config of the run in ``folder``, no tensor read. Errors as in ``load_state``."""
    meta = _meta(folder)
    return int(meta["step"]), dict(meta["identity"])


def _meta(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    file = folder / f"{STATE}.safetensors"
    if not file.is_file():
        raise CheckpointError(
            f"nothing to resume in {folder}: no {file.name}. Start without --resume"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            meta: dict[str, Any] = json.loads(opened.metadata()["state"])
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is damaged ({error}); start again without --resume"
        ) from error
    return meta


def adam_slot(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """One parameter's optimiser state."""
    keys = ("step", "exp_avg", "exp_avg_sq")
    return {k: tensors[f"adam.{name}.{k}"] for k in keys if f"adam.{name}.{k}" in tensors}


def export(
    folder: Path,
    model: DFlashDraftModel,
    config: Mapping[str, Any],
    card: str | None = None,
    maps: Mapping[str, Tensor] | None = None,
) -> None:
    """The draft folder: config.json, bfloat16 safetensors (sharded with an index), README.md.

    ``maps`` are tensors that are no weights and keep their dtype, see `vocabulary_maps`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).cpu() for name, value in served(model)}
    weights |= maps or {}
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        if shards[-1] and size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value.contiguous()
        size += value.nbytes
    written = write_shards(folder, shards)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in written:
            old.unlink()
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def vocabulary_maps(kept: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a draft that says only the tokens ``kept`` (ascending).

    d2t [n] holds target id minus draft id, as published files have it; t2d [V] marks what is kept.
    """
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[kept] = True
    return {"d2t": kept - torch.arange(kept.numel()), "t2d": marked}


def write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, readable by all: safetensors makes files for their owner alone."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


def write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> set[str]:
    """One file, or numbered ones and ``model.safetensors.index.json`` as transformers names them.

    Everything is written before anything is replaced, so a full disk leaves the former draft
    whole. Returns the names of the files that make the weights.
    """
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    index = "model.safetensors.index.json"
    for name, shard in zip(names, shards, strict=True):
        write_shard(folder / f"{name}.part", shard)
    if count > 1:
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(value.nbytes for shard in shards for value in shard.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        (folder / f"{index}.part").write_text(text + "\n", encoding="utf-8")
        names.append(index)
    for name in names:
        (folder / f"{name}.part").replace(folder / name)
    return set(names)
