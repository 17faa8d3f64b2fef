"""Reading a config.json: typed look-ups and one spelling for all writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.errors import CheckpointError

Config = Mapping[str, Any]

# far beyond any draft there is: a larger number is a damaged config, not a large draft
MOST = {"block_size": 4096, "num_hidden_layers": 1024, "head_dim": 65536, "vocab_size": 2**31}


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder (or the file itself) as a dict. Raises CheckpointError."""
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no config.json in {folder}; is it a draft folder?") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(config).__name__}")
    return config


class Keys:
    """Typed look-ups: every DFlash key is searched in ``dflash_config`` first, then on top."""

    def __init__(self, config: Config) -> None:
        self.top = config
        nested = config.get("dflash_config")
        self.nested: Config = nested if isinstance(nested, Mapping) else {}

    def get(self, key: str, default: Any = None) -> Any:
        value = self.nested.get(key)
        value = self.top.get(key) if value is None else value
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"the draft's config.json has no {key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(f"{key} must be an integer of at least {least}, got {value!r}")
        if value > MOST.get(key, value):
            raise CheckpointError(f"{key} must be at most {MOST[key]}, got {value}")
        return value

    def maybe(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def factor(self, key: str, default: float = 1.0) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{key} must be a positive number, got {value!r}")
        return float(value)


def flatten_speculators(config: Config) -> Config:
    """A speculators-format config as the flat one; any other config unchanged.

    The stack's sizes sit in ``transformer_layer_config``, tap ids are stored one higher, and
    sliding layers are causal unless ``sliding_window_non_causal``, which DFlash2 drafts imply.
    """
    if "speculators_model_type" not in config:
        return config
    stack = config.get("transformer_layer_config")
    if not isinstance(stack, Mapping):
        raise CheckpointError("a speculators config needs transformer_layer_config")
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    flat = {**stack, **{k: v for k, v in config.items() if k != "transformer_layer_config"}}
    flat["block_size"] = config.get("block_size", 8)
    flat["model_type"] = stack.get("model_type")
    if config.get("sliding_window_non_causal", config["speculators_model_type"] == "dflash2"):
        flat["is_causal"] = False
    if isinstance(verifier, Mapping):
        flat["target_name"] = verifier.get("name_or_path")
    return flat
