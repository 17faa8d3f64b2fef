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

from dflash.model import DFlashDraftModel, dflash_generate  # noqa: E402  # the reference wheel


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


def run(case: str, length: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One whole greedy run: ids, drafts and acceptances, and the draft's states of some rounds."""
    torch.set_default_dtype(torch.float32)
    model = DFlashDraftModel(Qwen3Config(**script.config(case))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = script.weight(case, name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(made))
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
    golden = HERE / "golden"
    golden.mkdir(exist_ok=True)
    (golden / "runs.json").write_text(json.dumps(told, separators=(",", ":")) + "\n")
    save_file(tensors, golden / "states.safetensors")


if __name__ == "__main__":
    main()
