"""Write golden files with the reference implementation; see README.md for how to run this.

Runs only where the reference wheel `dflash` is installed (its import name is this project's), so
it is a plain script: it imports `script.py` beside it and the reference, nothing of this project.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import script  # noqa: E402  # the path had to be set
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

from dflash.model import (  # noqa: E402  # the reference wheel
    DFlash2DraftModel,
    DFlashDraftModel,
    dflash_generate,
)


class ScriptedTarget(torch.nn.Module):
    """Looks like a causal LM; what it says is in `script.py`."""

    def __init__(self) -> None:
        super().__init__()
        embed, head = script.tables()
        self.embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(embed))
        self.lm_head = torch.nn.Linear(script.HIDDEN, script.VOCAB, bias=False)
        self.lm_head.weight.data = torch.from_numpy(head)
        self.config = Qwen3Config(
            num_hidden_layers=1, hidden_size=script.HIDDEN, vocab_size=script.VOCAB
        )
        self.device = torch.device("cpu")
        self.round = -1  # the prompt is round -1
        self.drafted: list[list[int]] = []

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> SimpleNamespace:
        ids = input_ids[0].tolist()
        blank = torch.zeros(1, 1, len(ids), 1)
        past_key_values.update(blank, blank, 0)
        if self.round < 0:
            own = [5] * len(ids)
        else:
            self.drafted.append(ids[1:])
            own, _ = script.answer(ids[1:], self.round)
        self.round += 1
        logits = torch.nn.functional.one_hot(torch.tensor(own), script.VOCAB)[None].float()
        start, stop = int(position_ids[0, 0]), int(position_ids[0, -1]) + 1
        hidden = [torch.zeros(1, stop - start, script.HIDDEN)] + [
            torch.from_numpy(script.states(layer, stop))[None, start:]
            for layer in range(script.LAYERS_OF_TARGET)
        ]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], hidden_states=hidden)


def make(case: str) -> Any:
    """The reference's draft of a case, with the script's weights."""
    torch.set_default_dtype(torch.float32)
    kind = DFlash2DraftModel if case in script.SECOND else DFlashDraftModel
    model = kind(Qwen3Config(**script.config(case))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = script.weight(case, name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(made))
    return model


@torch.no_grad()
def parts(case: str) -> dict[str, torch.Tensor]:
    """Convolutions, candidates, and walks at three temperatures with their distributions."""
    model = make(case)
    given = {name: torch.from_numpy(value) for name, value in script.parts().items()}
    found = {}
    for index, layer in enumerate(model.layers):
        for name in ("attention_conv", "mlp_conv"):
            before, dynamic = getattr(layer, name).prepare(given["x"])
            found[f"{name}/{index}/before"] = before
            found[f"{name}/{index}/behind"] = getattr(layer, name).finish(given["y"], dynamic)
    for temperature in (0.0, 0.7, 3.0):
        torch.manual_seed(1)
        path, ids, q = model.candidate_selector.select(
            given["hidden"], given["logits"], torch.tensor([11]), temperature
        )
        found[f"walk/{temperature}/path"] = path
        if q is not None:
            found[f"walk/{temperature}/ids"], found[f"walk/{temperature}/q"] = ids, q
    return {f"{case}/parts/{name}": value.clone() for name, value in found.items()}


def run(case: str, length: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One whole greedy run: ids, drafts and acceptances, and the draft's states of some rounds."""
    model = make(case)
    states: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _m, _i, out: states.append(out[0].clone()))
    target = ScriptedTarget()
    # return_stats needs CUDA, so the acceptances are read off the script
    ids = dflash_generate(
        model,
        target=target,
        input_ids=torch.tensor([script.prompt(length)]),
        max_new_tokens=script.max_tokens(length),
        stop_token_ids=None,
        temperature=0.0,
    )
    kept = {0, 1, 4, len(states) - 1}
    return (
        {"ids": ids[0].tolist(), "drafted": target.drafted},
        {f"{round_}": states[round_] for round_ in sorted(kept) if round_ < len(states)},
    )


def main() -> None:
    """All cases and prompts into ``golden/``."""
    told: dict[str, Any] = {
        "versions": {name: version(name) for name in ("dflash", "torch", "transformers")},
        "runs": {},
    }
    tensors: dict[str, torch.Tensor] = {}
    for case in script.CASES:
        for name, length in script.PROMPTS.items():
            told["runs"][f"{case}/{name}"], states = run(case, length)
            tensors |= {f"{case}/{name}/{key}": value for key, value in states.items()}
    for case in script.SECOND:
        tensors |= parts(case)
    golden = HERE / "golden"
    golden.mkdir(exist_ok=True)
    (golden / "runs.json").write_text(json.dumps(told, separators=(",", ":")) + "\n")
    save_file(tensors, golden / "states.safetensors")


if __name__ == "__main__":
    main()
