"""Export a DFlash2 draft as `dflash train` does, with what it computes: ``export_draft FOLDER``.

Beside it, the same draft as `dflash convert` makes it of a sidecar and of a speculators folder:
``gguf-hf``, ``gguf-mlx``, ``speculators-mlx``. `load_export.py` and `load_export_mlx.py` load them
with the reference and compare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file

from dflash import registry
from dflash.backends.torch.dflash import transform_logits
from dflash.backends.torch.dflash2_session import SelectorRows
from dflash.backends.torch.draft_weights import load_weights
from dflash.backends.torch.propose import make_proposer
from dflash.convert import convert
from dflash.core.types import Request
from dflash.drafts.spec import read_spec
from dflash.train.checkpoint import export
from tests.parity import script
from tests.parity.test_reference import draft_model, features

CASE, CONTEXT, ROWS, ANCHOR = "dflash2_window", 13, 8, 11


def main(folder: Path) -> None:
    """Write the draft, its conversions, and the inputs and outputs of one block beside them."""
    export(folder, draft_model(CASE), script.config(CASE))
    spec = read_spec(folder)
    made, _ = load_weights(folder, spec, device=torch.device("cpu"), dtype=torch.float32)
    model: Any = made
    embed, head = (torch.from_numpy(table) for table in script.tables())
    noise = embed[[ANCHOR, *[spec.mask_token_id] * (ROWS - 1)]] * spec.embedding_scale_for(None)
    tapped = features(model, 0, CONTEXT)
    runner = registry.DRAFT_RUNNERS.load("torch")
    states = torch.from_numpy(runner.hidden_states(folder, tapped.numpy(), noise.numpy()))
    hidden = states[1:]
    logits = transform_logits(hidden @ head.T, spec)
    rows = SelectorRows(model.candidate_selector, hidden, logits, torch.tensor([ANCHOR]))
    path, _ = make_proposer(Request([ANCHOR], 50))(rows, [ANCHOR])
    told = {"noise": noise[None], "tapped": tapped[None], "states": states[None], "head": head}
    told["path"] = torch.as_tensor(path)[None]
    save_file({name: value.contiguous() for name, value in told.items()}, folder / "told.st")
    convert_all(folder)


def convert_all(draft: Path) -> None:
    """Through each format that is no folder of upstream's, to each that is."""
    sidecar, target = draft / "draft.gguf", save_target(draft / "target")
    convert(draft, "gguf", sidecar, target=save_header(draft / "target.gguf"))
    for layout in ("hf", "mlx"):
        convert(sidecar, layout, draft / f"gguf-{layout}")
    convert(draft, "speculators", draft / "speculators", target=target)
    convert(draft / "speculators", "mlx", draft / "speculators-mlx", target=target)


def save_header(file: Path) -> Path:
    """What a sidecar needs of its target: sizes and tokens."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(script.LAYERS_OF_TARGET)
    writer.add_embedding_length(script.HIDDEN)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(script.VOCAB)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def save_target(folder: Path) -> Path:
    """What a speculators folder takes of its target: embedding and head."""
    folder.mkdir()
    sizes = {"hidden_size": script.HIDDEN, "num_hidden_layers": script.LAYERS_OF_TARGET}
    keys = {"architectures": ["LlamaForCausalLM"], **sizes}
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tables = dict(zip(names, map(torch.from_numpy, script.tables()), strict=True))
    save_file(tables, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
