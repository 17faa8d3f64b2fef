"""Does the demo draft keep on MLX what it keeps on torch? Teacher-forced, the same ids for both.

    python -m bench.mlx_acceptance --rounds 1000

Torch writes texts once; then each backend's target reads prompt and text, and its draft proposes a
block at every place of the text, whatever it proposed before. Counted is how far it agrees with the
text, position by position. Needs the torch and mlx extras.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bench import sets
from dflash import demo
from dflash.backends.mlx import open_pair as open_mlx
from dflash.backends.torch import open_pair as open_torch
from dflash.backends.torch.gguf import convert
from dflash.config import LoadConfig
from dflash.core.types import Plan, Request, Verdict
from dflash.engine import Engine

TEXT = 64  # tokens of each text


def texts(pair: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """``(prompt, answer)`` ids, greedy, of the prompt sets in turn."""
    asked = [prompt.text for name in sets.ALL for prompt in sets.load(name)]
    short = [text for text in asked if len(text) < 200]
    short = [short[i * len(short) // count] for i in range(count)]
    engine = Engine(pair)
    found = []
    for text in short:
        ids = engine.encode(text)
        found.append((ids, list(engine.generate(ids, max_tokens=TEXT, temperature=0).token_ids)))
    return found


def agreement(pair: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """How many drafted tokens agree with ``answer``, at each of its places but the last few."""
    ids, start = [*prompt, *answer], len(prompt)
    target, draft = pair.open_target(len(ids) + 16), pair.open_drafts(len(ids) + 16)[0]
    parts = [v.features for v in target.prefill(Request(ids, 1), 0)]
    features = parts[0] if len(parts) == 1 else None
    assert features is not None, "a text of one chunk"
    most = pair.draft_block_size - 1
    draft.begin(Request(prompt, len(answer)), 0)
    draft.commit(Verdict([ids[start]], rows=start, features=features[:start]), start)
    found = []
    for place in range(start, len(ids) - most):
        proposal = draft.propose(Plan(0, most, most))
        said = [int(token) for token in proposal.tokens]
        pairs = zip(said, ids[place + 1 :], strict=False)
        found.append(next((i for i, (one, other) in enumerate(pairs) if one != other), most))
        row = features[place : place + 1]
        draft.commit(Verdict([ids[place + 1]], rows=1, features=row), 1)
    target.close()
    draft.close()
    return found


def main() -> None:
    """Both backends over the same texts; a table of survival by position."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    wanted = parser.parse_args().rounds
    folder, draft = str(convert(Path(demo.demo_target()))), str(demo.demo_draft())
    torch_pair = open_torch(LoadConfig(folder, draft, device="cpu", dtype="float32"))
    mlx_pair = open_mlx(LoadConfig(folder, draft, backend="mlx", dtype="float32"))
    kept: dict[str, list[int]] = {"torch": [], "mlx": []}
    for prompt, answer in texts(torch_pair, -(-wanted // (TEXT - 7)) + 4):
        if len(kept["torch"]) >= wanted:
            break
        kept["torch"] += agreement(torch_pair, prompt, answer)
        kept["mlx"] += agreement(mlx_pair, prompt, answer)
        print(len(kept["torch"]), np.mean(kept["torch"]), np.mean(kept["mlx"]), flush=True)
    places = range(1, torch_pair.draft_block_size or 1)
    table = {
        name: [round(float(np.mean(np.array(found) >= place)), 4) for place in places]
        for name, found in kept.items()
    }
    gap = max(abs(a - b) for a, b in zip(table["torch"], table["mlx"], strict=True))
    same = float(np.mean(np.array(kept["torch"]) == np.array(kept["mlx"])))
    print(json.dumps({**table, "rounds": len(kept["torch"]), "largest_gap": gap, "same": same}))


if __name__ == "__main__":
    main()
