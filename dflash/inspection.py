"""What a checkpoint is, from its config and headers: no weight is read, nothing is executed.

Folders, .gguf files and hub ids (of those only config.json and the safetensors headers are
fetched). The answer is a flat table; what could not be understood is in ``problem``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from dflash import env
from dflash.config import NGRAM, NO_DRAFT, path_name, split_draft
from dflash.drafts import ngram
from dflash.drafts.keys import read_config
from dflash.drafts.kinds import kind_of
from dflash.drafts.layers import build_target_layer_ids
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import CheckpointError
from dflash.gguf_file import DRAFTS, Header
from dflash.gguf_file import read_header as read_gguf
from dflash.hub import asking, hub_config, hub_file, is_hub_id
from dflash.tensor_files import read_header

__all__ = ["Inspection", "hub_config", "inspect"]

DRAFT_LAYERS = 5  # of the published drafts: what a new one for this target would tap


@dataclass(frozen=True, slots=True)
class Inspection:
    """The findings. ``facts`` differ by kind; ``dtypes`` counts parameters per stored type."""

    name: str
    kind: str  # target, draft
    format: str  # safetensors, GGUF, config only
    architecture: str
    parameters: int | None
    dtypes: Mapping[str, int]
    facts: Mapping[str, Any] = field(default_factory=dict)
    fits: str = ""
    problem: str | None = None
    block_size: int | None = None  # of a draft that has one, anchor included
    beside: str | None = None  # drafts together with it

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return asdict(self)


def inspect(name: str) -> Inspection:
    """Look at ``name``: a folder, a .gguf file, a config.json, a hub id, or "ngram".

    Raises CheckpointError (not there, damaged, no model), DownloadError, and MissingBackend when a
    hub id needs a package that is not installed.
    """
    name = path_name("name", name)
    model, look_up = split_draft(name)
    if name == "toy" or name.startswith("toy:"):
        return _toy(name)
    if look_up:
        return _ngram(name) if model == NO_DRAFT else replace(inspect(model), beside=NGRAM)
    place = Path(name).expanduser()
    if place.is_dir() and not (place / "config.json").is_file():
        place = _only_gguf(place)
    if place.is_file() and place.name != "config.json":
        return _gguf(name, place)
    if place.exists():
        folder = place if place.is_dir() else place.parent
        return _folder(name, read_config(place), _headers(folder))
    if not is_hub_id(name):
        raise CheckpointError(f"no such file or folder: {name} (a hub id is written owner/name)")
    return _hub(name)


def _ngram(name: str) -> Inspection:
    return Inspection(
        name=name,
        kind="draft",
        format="built in",
        architecture="suffix matching over prompt and output",
        parameters=None,
        dtypes={},
        facts={
            "method": NGRAM,
            "block size": _block(ngram.BLOCK_SIZE),
            "agreement": f"{ngram.SHORTEST} tokens at least, {ngram.LONGEST} compared",
        },
        fits="any target",
        block_size=ngram.BLOCK_SIZE,
    )


def _toy(name: str) -> Inspection:
    is_draft = name != "toy"
    return Inspection(
        name=name,
        kind="draft" if is_draft else "target",
        format="built in",
        architecture="a fake without weights: words that depend on all before them, for trials",
        parameters=None,
        dtypes={},
        facts={"script": name.removeprefix("toy:")} if is_draft else {},
        fits="the target toy" if is_draft else "toy:oracle, toy:random, toy:script:1,3,0 and ngram",
    )


def _block(size: int) -> str:
    return f"{size} (1 anchor + {size - 1} drafted)"


def _folder(name: str, config: Mapping[str, Any], dtypes: Counter[str]) -> Inspection:
    kind = kind_of(config)
    found = _target_facts(config) if kind == "target" else _draft_facts(config)
    return Inspection(
        name=name,
        kind="target" if kind == "target" else "draft",
        format="safetensors" if dtypes else "config only",
        architecture=", ".join(config.get("architectures") or [config.get("model_type", "?")]),
        parameters=sum(dtypes.values()) or None,
        dtypes=dict(dtypes),
        facts=found.facts if kind == "target" else {"method": kind, **found.facts},
        fits=found.fits,
        problem=found.problem,
        block_size=found.block_size,
    )


class _Found(NamedTuple):
    """What configs and headers say, as `Inspection` has it."""

    facts: dict[str, Any]
    fits: str = ""
    problem: str | None = None
    block_size: int | None = None


def _target_facts(config: Mapping[str, Any]) -> _Found:
    text = config.get("text_config", config)
    facts = {
        "layers": text.get("num_hidden_layers"),
        "hidden size": text.get("hidden_size"),
        "vocabulary": text.get("vocab_size"),
        "context": text.get("max_position_embeddings"),
    }
    return _with_fit(facts)


def _with_fit(facts: dict[str, Any]) -> _Found:
    layers = facts["layers"]
    if isinstance(layers, int) and layers > DRAFT_LAYERS:
        facts["default taps"] = build_target_layer_ids(layers, DRAFT_LAYERS)
    fits = (
        f"drafts trained for it: target width {facts['hidden size']}, taps below {layers}, "
        f"vocabulary {facts['vocabulary']}"
    )
    return _Found(facts, fits)


def _draft_facts(config: Mapping[str, Any]) -> _Found:
    try:
        spec = read_spec(config)
    except CheckpointError as problem:
        return _Found({}, problem=str(problem))
    facts = {
        "block size": _block(spec.block_size),
        "default block size": spec.default_block_size,
        "taps": list(spec.taps),
        "mask token id": None if spec.mask_token_id < 0 else spec.mask_token_id,
        "layers": spec.num_layers,
        "hidden size": spec.hidden_size,
        "attention": _attention(spec),
        "selector": _selector(spec),
        "draft vocabulary": spec.draft_vocab_size,
        "sees": _sees(spec),
        "trained for": spec.target_name,
    }
    depth = spec.num_target_layers
    return _Found(
        {name: value for name, value in facts.items() if value is not None},
        f"a target of width {spec.target_hidden_size}, "
        f"{f'{depth} layers' if depth else f'at least {max(spec.taps) + 1} layers'}, "
        f"vocabulary {spec.vocab_size}",
        block_size=spec.block_size,
    )


def _attention(spec: DraftSpec) -> str:
    counts = Counter(
        (kind.removesuffix("_attention"), "causal" if causal else "non-causal")
        for kind, causal in zip(spec.layer_types, spec.causal, strict=True)
    )
    parts = [f"{number} x {kind} {causal}" for (kind, causal), number in counts.items()]
    window = f", window {spec.sliding_window}" if spec.sliding_window else ""
    return " + ".join(parts) + window


def _selector(spec: DraftSpec) -> str | None:
    sizes = spec.dflash2
    return f"{sizes.selector_top_k} candidates, rank {sizes.selector_rank}" if sizes else None


def _sees(spec: DraftSpec) -> str:
    """How much of the text reaches the draft, unless loading is told otherwise."""
    if not spec.sliding_window or not all(k.startswith("sliding") for k in spec.layer_types):
        return "all of the text before the block"
    return f"the last {spec.sliding_window} tokens before the block"


# --- safetensors ---------------------------------------------------------------------------------


def _headers(folder: Path) -> Counter[str]:
    """Of the model's own files, and not of what else lies there (a training's state)."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(read_config(index).get("weight_map", {}).values())
        files = [file for file in files if file.name in named] or files
    return _count(entry for file in files for entry in read_header(file).entries.values())


def _count(entries: Iterable[Mapping[str, Any]]) -> Counter[str]:
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[entry["dtype"]] += prod(entry["shape"])
    return dtypes


# --- GGUF ----------------------------------------------------------------------------------------


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        found = f"several .gguf files: name one of {[file.name for file in files]}"
        raise CheckpointError(
            f"{folder} has no config.json and {found if files else 'no .gguf file'}"
        )
    return files[0]


def _gguf(name: str, file: Path) -> Inspection:
    header = read_gguf(file)
    found = _gguf_facts(header)
    dtypes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        dtypes[tensor.kind_name] += prod(tensor.shape)
    return Inspection(
        name=name,
        kind="draft" if header.architecture in DRAFTS else "target",
        format="GGUF",
        architecture=header.architecture,
        parameters=sum(dtypes.values()),
        dtypes=dict(dtypes),
        facts=found.facts,
        fits=found.fits,
        problem=found.problem,
        block_size=found.block_size,
    )


def _gguf_facts(header: Header) -> _Found:
    if header.architecture in DRAFTS:
        return _sidecar_facts(header)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    facts: dict[str, Any] = {
        "layers": header.layers or None,
        "hidden size": header.own("embedding_length"),
        "vocabulary": None if tokens is None else len(tokens),
        "context": header.own("context_length"),
    }
    return _with_fit(facts)


def _sidecar_facts(header: Header) -> _Found:
    from dflash.convert.gguf import config_of

    try:
        config = config_of(header)
    except CheckpointError as problem:
        return _Found({}, problem=str(problem))
    found = _draft_facts(config)
    own = {"method": kind_of(config), "vocabulary": config.get("vocab_size")}
    return found._replace(facts={**own, **found.facts})


def _hub(name: str) -> Inspection:
    file = hub_file(name, "config.json")
    if env.offline():
        return _folder(name, read_config(file), _headers(file.parent))
    from huggingface_hub import get_safetensors_metadata

    with asking(name):
        counts = get_safetensors_metadata(name).parameter_count
    return _folder(name, read_config(file), Counter(counts))
