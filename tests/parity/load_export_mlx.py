"""Load converted drafts with the reference's MLX reader; runs only where that is installed.

``python load_export_mlx.py FOLDER``, FOLDER as `export_draft.py` wrote it. The hub is stood in for:
that reader takes no paths.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx

reference: Any = import_module("dflash.model_mlx")  # the reference wheel


def demand(folder: Path, told: dict[str, Any]) -> None:
    """Demand that it loads, which it does with every tensor or not at all, and the same states."""
    reference.snapshot_download = lambda *_, **__: str(folder)
    model = reference.load_draft("owner/draft")
    model.embed_tokens = lambda _: told["noise"]
    anchor = mx.zeros(told["noise"].shape[:2], mx.int32)
    states = model.hidden_states(anchor, told["tapped"], model.make_cache())
    difference = mx.abs(states - told["states"]).max().item()
    assert difference < 2e-5, difference


def main(folder: Path) -> None:
    """The draft as it comes back from a sidecar and from a speculators folder."""
    told: Any = mx.load(str(folder / "told.st"), format="safetensors")
    for name in ("gguf-mlx", "speculators-mlx"):
        demand(folder / name, told)
        print(f"the reference's MLX reader loads {name} and computes the same states")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
