"""Checkpoints as files: what a folder holds, whether it is whole, and how the hub gives one.

Only safetensors count as weights. Nothing is read but headers, and nothing is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dflash import env
from dflash.drafts.kinds import kind_of
from dflash.errors import CheckpointError, DownloadError
from dflash.tensor_files import read_header

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
FILES += ["mask_embedding.pt"]  # a sidecar that is refused by name, not one that goes missing
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CONVERT = (
    "Only safetensors and GGUF are read. If you trust the files, convert them once: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


def fetch(name: str, *, code: bool = False, wanted: Sequence[str] = FILES) -> Path:
    """A hub repository as a local folder, from the cache when offline. Raises DownloadError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=[*wanted, *(["*.py"] if code else [])],
                local_files_only=env.offline(),
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a local path nor a hub id") from error
    except LocalEntryNotFoundError as error:
        why = (
            "HF_HUB_OFFLINE is set and it is not in the cache"
            if env.offline()
            else "the hub cannot be reached and it is not in the cache"
        )
        raise DownloadError(
            f"cannot fetch {name}: {why}. Give a local folder or a .gguf file, or go online once"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"cannot fetch {name} from the hub: {first}. Check the name and your access (gated "
            "models need `hf auth login`), or give a local folder or a .gguf file"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises CheckpointError if it is missing or not an object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no config.json, so it is not a model") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold one JSON object")
    return config


def require_target(config: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError if ``config`` describes a draft or an encoder-decoder model."""
    try:
        kind = kind_of(config)
    except CheckpointError:
        return  # an architecture we have no word for: transformers will know
    if kind != "target":
        raise CheckpointError(
            f"{name} is a draft ({kind}), not a target. A draft goes to --draft, and --model "
            "names the model it was trained for"
        )
    if config.get("is_encoder_decoder"):
        raise CheckpointError(f"{name} is an encoder-decoder model; a target is decoder-only")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present. Raises CheckpointError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not a shard index") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}. Download it again")
        return [folder / shard for shard in shards]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = [file.name for pattern in PICKLES for file in folder.glob(pattern)]
    if pickles:
        raise CheckpointError(f"{folder} has its weights in {pickles[0]}. {CONVERT}")
    raise CheckpointError(f"{folder} has a config.json but no model.safetensors")


def count_weights(folder: Path) -> int:
    """Numbers stored in the checkpoint, from the headers alone.

    Raises CheckpointError for files that are cut short or not safetensors.
    """
    return sum(
        prod(entry["shape"])
        for file in weight_files(folder)
        for entry in read_header(file).entries.values()
    )


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors stored in the checkpoint; raises as `count_weights`."""
    return {name for file in weight_files(folder) for name in read_header(file).entries}
