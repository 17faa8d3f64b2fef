"""Load a draft that this package exported with the reference; runs only where that is installed.

``python load_export.py FOLDER``, FOLDER as `export_draft.py` wrote it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash.model import DFlash2DraftModel  # the reference wheel


@torch.no_grad()
def demand(folder: Path, told: dict[str, torch.Tensor]) -> None:
    """Demand that every tensor is found, and the same states and tokens."""
    model, found = DFlash2DraftModel.from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True
    )
    wrong = {name: value for name, value in found.items() if value}
    assert not wrong, wrong
    rows = told["tapped"].shape[1] + told["noise"].shape[1]
    states = model.eval()(
        position_ids=torch.arange(rows)[None],
        noise_embedding=told["noise"],
        target_hidden=told["tapped"],
    )
    torch.testing.assert_close(states, told["states"], rtol=0, atol=1e-5)
    hidden, anchor = states[:, 1:], torch.tensor([11])
    path, _, _ = model.propose(hidden, anchor, lambda x: x @ told["head"].T, 0.0)
    assert path.tolist() == told["path"].tolist()


def main(folder: Path) -> None:
    """The draft as it was exported, and as it comes back from a sidecar."""
    told = load_file(folder / "told.st")
    for one in (folder, folder / "gguf-hf"):
        demand(one, told)
        print(f"the reference loads {one.name} and drafts the same tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
