"""What a draft's folder has from its target: copies of embedding and head, and the target's depth.

A target is a folder with safetensors or a .gguf file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.convert.draft import Draft, target_ids
from dflash.convert.folder import read_files
from dflash.convert.gguf import tables_in
from dflash.convert.tensor import Tensor
from dflash.drafts.keys import read_config
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError, PairError
from dflash.gguf_file import is_gguf, read_header

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
DEPTH = "num_target_layers"
UPSTREAM = {"hf": "the upstream package", "mlx": "upstream's MLX reader"}


def fitted(draft: Draft, to: str, target: Path | None) -> Draft:
    """``draft`` as readers of the layout ``to`` take it, as far as its target matters.

    With the target's depth, which upstream's readers insist on, and where upstream knows no tables
    in a draft, without those that are the target's own. What was done is in its notes. Raises
    ConfigError where an MLX folder needs the target and none is named, PairError or CheckpointError
    for a ``target`` that is not the draft's.
    """
    tables = [name for name in (EMBED, HEAD) if name in draft.tensors]
    eagle = draft.kind == "eagle3"  # has tables by right, and upstream does not read it
    if target is None:
        asks = [] if eagle else [DEPTH] * (draft.keys.get(DEPTH) is None) + tables
        return _unfitted(draft, to, asks) if asks and to in UPSTREAM else draft
    depth = _depth_of(target, draft)
    if to in UPSTREAM and tables and _borrows(draft):
        draft = _without(draft, target)
    if depth is not None and draft.keys.get(DEPTH) is None and not eagle:
        draft = replace(draft, config={**draft.config, DEPTH: depth})
    return draft


def _borrows(draft: Draft) -> bool:
    """Whether its rows are as wide as its target's, so that tables of the target would do."""
    width = draft.keys.count("hidden_size")
    return draft.keys.count("target_hidden_size", width) == width


def _unfitted(draft: Draft, to: str, asks: list[str]) -> Draft:
    """What only the target could mend. ``hf`` is read here without it."""
    if to == "mlx":
        raise ConfigError(
            f"upstream's MLX reader refuses this draft as it is: {', '.join(_asked(asks))}. Name "
            "its target (target=FOLDER|GGUF)"
        )
    if DEPTH not in asks:
        return draft
    note = f"{UPSTREAM[to]} asks for {DEPTH}, which is said nowhere here: --target would tell"
    return replace(draft, notes=(*draft.notes, note))


def _asked(asks: list[str]) -> Iterator[str]:
    for name in asks:
        yield f"it has no {name}" if name == DEPTH else f"it brings {name}"


def _depth_of(target: Path, draft: Draft) -> int | None:
    """Decoder layers of ``target``; None where it does not say.

    Raises PairError for a target that is too narrow, wide or flat for ``draft``, CheckpointError
    for one that is not there.
    """
    if is_gguf(target.name):
        header = read_header(target)
        depth: int | None = header.layers
        width = header.own("embedding_length")
    else:
        config: Mapping[str, Any] = read_config(target)
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        depth, width = config.get("num_hidden_layers"), config.get("hidden_size")
    spec = read_spec(draft.config, num_target_layers=depth or ANY_DEPTH)
    wrong = width is not None and width != spec.target_hidden_size
    if wrong or (depth and max(spec.taps) >= depth):
        raise PairError(
            f"{target} is not the target of this draft: it is {width} wide with {depth} layers; "
            f"the draft reads {spec.target_hidden_size} and taps layer {max(spec.taps)}"
        )
    return depth or None


def tables_of(target: Path, draft: Draft) -> dict[str, Tensor]:
    """The target's embedding [V, H] and head [Vd, H], as ``draft`` would borrow them.

    Raises CheckpointError if ``target`` has no tables of the draft's width.
    """
    if is_gguf(target.name):
        embed, head = tables_in(read_header(target))
    elif target.is_dir():
        stored = {name: t for part in read_files(target).values() for name, t in part.items()}
        embed = stored.get(f"model.{EMBED}", stored.get(EMBED))
        head = stored.get(HEAD, embed)
    else:
        raise CheckpointError(f"{target} is no target folder with safetensors, and no .gguf file")
    width = draft.keys.count("hidden_size")
    if embed is None or head is None or embed.shape[1] != width:
        raise CheckpointError(
            f"{target} has no embedding of width {width}; is it the target of this draft?"
        )
    if "d2t" in draft.tensors:
        head = Tensor(head.dtype, head.values[target_ids(draft.tensors["d2t"])])
    return {EMBED: embed, HEAD: head}


def _without(draft: Draft, target: Path) -> Draft:
    """``draft`` without those of its tables that hold the target's numbers, one for one."""
    tables = tables_of(target, draft)
    mine = [name for name in tables if name in draft.tensors]
    copies = [name for name in mine if draft.tensors[name].same_numbers(tables[name])]
    notes = list(draft.notes)
    if copies:
        notes.append(f"left out, as they are the target's: {', '.join(copies)}")
    if others := [name for name in mine if name not in copies]:
        notes.append(f"kept, as the target at {target} has other numbers: {', '.join(others)}")
    kept = {name: tensor for name, tensor in draft.tensors.items() if name not in copies}
    return replace(draft, tensors=kept, notes=tuple(notes))
