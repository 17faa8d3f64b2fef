"""Write the golden file of EAGLE-3 with speculators' own model; see README.md for how to run this.

Runs where ``speculators`` is installed, and imports nothing of this project but the scripts beside
it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import script_eagle3 as script  # noqa: E402  # the path had to be set
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig  # noqa: E402


def logits(case: str) -> torch.Tensor:
    """``[STEPS, ROWS, Vd]``: what each row says when its chain is told the text's own tokens."""
    config = Eagle3SpeculatorConfig(**script.config(case))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("verifier_"):
                made = script.weight(case, name, tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(made))
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, out: said.append(out[0].clone()))
    text = torch.tensor(script.tokens())
    with torch.no_grad():
        model(
            hidden_states=torch.from_numpy(script.features())[None],
            input_ids=text[None, 1 : script.ROWS + 1],
            document_ids=torch.zeros(1, script.ROWS, dtype=torch.long),
            ttt_steps=script.STEPS,
        )
    return torch.stack(said)


def main() -> None:
    """All cases into ``golden/``."""
    torch.set_default_dtype(torch.float32)
    golden = HERE / "golden"
    save_file({case: logits(case) for case in script.CASES}, golden / "eagle3.safetensors")
    versions = {name: version(name) for name in ("speculators", "torch", "transformers")}
    (golden / "eagle3.json").write_text(json.dumps({"versions": versions}) + "\n")


if __name__ == "__main__":
    main()
