"""Export a DFlash2 draft as `dflash train` does, with what it computes: ``export_draft FOLDER``.

`load_export.py` loads it with the reference and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash.backends.torch.dflash2_session import SelectorRows
from dflash.backends.torch.draft_weights import load_weights
from dflash.backends.torch.propose import make_proposer
from dflash.core.types import Request
from dflash.drafts.spec import read_spec
from dflash.train.checkpoint import export
from tests.parity import script
from tests.parity.test_reference import draft_model, features

CASE, CONTEXT, ROWS, ANCHOR = "dflash2", 13, 8, 11


def main(folder: Path) -> None:
    """Write the draft, and the inputs and outputs of one block beside it."""
    export(folder, draft_model(CASE), script.config(CASE))
    spec = read_spec(folder)
    made, _ = load_weights(folder, spec, device=torch.device("cpu"), dtype=torch.float32)
    model: Any = made
    embed, head = (torch.from_numpy(table) for table in script.tables())
    noise = embed[[ANCHOR, *[spec.mask_token_id] * (ROWS - 1)]][None]
    tapped = features(model, 0, CONTEXT)[None]
    context = model.context_kv(model.fuse(tapped), torch.arange(CONTEXT))
    states = model.block(noise, CONTEXT + torch.arange(ROWS), context)
    hidden = states[0, 1:]
    rows = SelectorRows(model.candidate_selector, hidden, hidden @ head.T, torch.tensor([ANCHOR]))
    path, _ = make_proposer(Request([ANCHOR], 50))(rows, [ANCHOR])
    told = {"noise": noise, "tapped": tapped, "states": states, "head": head}
    told["path"] = torch.as_tensor(path)[None]
    save_file({name: value.contiguous() for name, value in told.items()}, folder / "told.st")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
