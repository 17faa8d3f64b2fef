"""Write golden/mlx.json with the reference's MLX generator; see README.md for how to run this.

Runs only where the reference wheel `dflash` and mlx-lm are installed, so it imports `script.py` and
`script_mlx.py` beside it and the reference, nothing of this project. What the reference asks of a
tokenizer and of the hub is stood in for; its loop, its drafts and its rollback are its own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import mlx.core as mx  # noqa: E402  # the path had to be set
import numpy as np  # noqa: E402
import script  # noqa: E402
import script_mlx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

reference: Any = import_module("dflash.model_mlx")  # the reference wheel


class Tokens:
    """In place of mlx-lm's tokenizer: ids have no text and none ends it."""

    bos_token = None
    eos_token_ids: frozenset[int] = frozenset()
    last_segment = ""

    @property
    def detokenizer(self) -> Tokens:
        """Itself."""
        return self

    def add_token(self, token: int) -> None:
        """Nothing."""

    def finalize(self) -> None:
        """Nothing."""


def target(kind: str) -> Any:
    """mlx-lm's model with the script's weights."""
    config = script_mlx.CONFIGS[kind]
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    names = tree_flatten(model.parameters())
    made = {n: script_mlx.target_weight(kind, n, tuple(w.shape)) for n, w in names}
    model.load_weights([(name, mx.array(value)) for name, value in made.items()])
    return model


def draft(case: str) -> Any:
    """The reference's draft of a case, read from a folder by the reference itself."""
    config = script.config(case)
    kind = reference.DFlash2DraftModel if case in script.SECOND else reference.DFlashDraftModel
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        reference.snapshot_download = lambda *_, **__: folder
        load = kind.load_weights

        def shaped(self: Any, _: Any) -> Any:
            names = tree_flatten(self.parameters())
            made = [(n, mx.array(script.weight(case, n, tuple(w.shape)))) for n, w in names]
            return load(self, made)

        empty = {
            f"candidate_selector.{n}_codebook": mx.zeros(1) for n in ("predecessor", "successor")
        }
        mx.save_safetensors(f"{folder}/model.safetensors", empty)
        kind.load_weights = shaped
        try:
            return reference.load_draft("owner/draft")
        finally:
            del kind.load_weights


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """The text, everything computed anew for every token."""
    said = list(prompt)
    for _ in range(script_mlx.TOKENS + 8):
        said.append(int(mx.argmax(model(mx.array([said]))[0, -1]).item()))
    return said[len(prompt) :]


def run(kind: str, case: str) -> dict[str, Any]:
    """One run: the tokens and the count of every response, the drafts of every round."""
    model, made, prompt = target(kind), draft(case), script.prompt(script_mlx.PROMPT)
    text, said, rounds = greedy(model, prompt), list[int](), list[Any]()
    logits = made.compute_logits

    def steered(hidden: Any) -> Any:
        rows = logits(hidden)
        push = script_mlx.steering(text[len(said) :], rows.shape[1], len(rounds))
        rounds.append(None)
        return rows + mx.array(push)[None]

    drafted, responses = list[list[int]](), list[Any]()
    made.compute_logits = steered

    class Watched(type(model)):  # type: ignore[misc]
        """Keeps what each round has it verify."""

        def __call__(self, ids: Any, *more: Any) -> Any:
            if said:
                drafted.append(ids[0, 1:].tolist())
            return super().__call__(ids, *more)

    model.__class__ = Watched
    answer = reference.stream_generate(model, made, Tokens(), prompt, max_tokens=script_mlx.TOKENS)
    for one in answer:
        said += one.tokens
        responses.append([one.tokens, one.accepted])
    assert said == text[: script_mlx.TOKENS], f"{kind}/{case}: not the target's own text"
    return {"responses": responses, "drafted": drafted}


def main() -> None:
    """All runs into ``golden/``."""
    reference.TokenizerWrapper = Tokens
    # a ring that took one row gives its rows in another order than the reference's window mask
    # counts them in; rows in order are what the mask, the torch reference and training mean
    ring: Any = reference.RotatingKVCache
    ring._update_in_place = ring._update_concat
    names = ("dflash", "mlx", "mlx-lm")
    told: dict[str, Any] = {
        "versions": {name: version(name) for name in names},
        "runs": {f"{kind}/{case}": run(kind, case) for kind, case in script_mlx.RUNS},
    }
    assert np.mean([len(t) for r in told["runs"].values() for t, _ in r["responses"]]) > 2
    text = json.dumps(told, separators=(",", ":"))
    (HERE / "golden" / "mlx.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
