"""Acceptance by position on llama.cpp and on torch, teacher-forced on the same committed ids.

    python -m bench.gguf_acceptance --rounds 5000

The text is what the GGUF target says. At every anchor of it each backend drafts a block from the
features of its own target; a draft counts where it and all before it equal the text. The target is
the same file (torch dequantises it), the draft the same weights.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import gguf_files, record
from bench.gguf_identical import short
from dflash.backends.gguf.pair import GgufPair
from dflash.backends.torch import open_pair as open_torch
from dflash.config import LoadConfig
from dflash.core.types import Plan, Request, Verdict
from dflash.demo import demo_draft
from dflash.engine import Engine

BOUND = 0.02
LONGEST = 100  # prompt tokens


def walk(pair: Any, prompt: Sequence[int], text: Sequence[int], rows: int) -> list[int]:
    """Accepted drafts at every anchor of ``text`` that has ``rows`` tokens after it."""
    ids = [*prompt, *text]
    capacity = len(ids) + 2 * rows
    target, draft = pair.open_target(capacity), pair.open_drafts(capacity)[0]
    parts = [v.features for v in target.prefill(Request(ids, 1), 0)]
    features = parts[0] if len(parts) == 1 else np.concatenate(parts)
    draft.begin(Request(list(prompt), len(text)), 0)
    kept = []
    start = 0
    for place in range(len(text) - rows):
        anchor = len(prompt) + place  # its row is not known yet, all before are
        draft.commit(Verdict([ids[anchor]], features=features[start:anchor]), anchor - start)
        start = anchor
        drafted = [int(t) for t in draft.propose(Plan(0, rows, rows)).tokens]
        told = ids[anchor + 1 : anchor + 1 + rows]
        kept.append(next((i for i in range(rows) if drafted[i] != told[i]), rows))
    draft.close()
    target.close()
    return kept


def survival(kept: Sequence[int], rows: int) -> list[float]:
    """Share of rounds that kept draft 1, 2, ..."""
    return [sum(one >= place for one in kept) / len(kept) for place in range(1, rows + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk both, print the shares side by side, exit 1 beyond the bound."""
    parser = record.parser(__doc__, tokens=104, prompts=0)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=0, help="of CPU time")
    parser.add_argument("--skip", type=int, default=0, help="the first N prompts")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    target = str(gguf_files.target("q4_1"))
    ours: Any = GgufPair.open(LoadConfig(target, str(gguf_files.sidecar()), threads=flags.threads))
    load = LoadConfig(target, str(demo_draft()), dtype="float32", threads=flags.threads)
    theirs = open_torch(load)
    rows = (ours.draft_block_size or 1) - 1
    kept: dict[str, list[int]] = {"gguf": [], "torch": []}
    engine, began = Engine(ours), time.process_time()
    for _, ids in short(engine, 480, LONGEST)[flags.skip :]:
        text = engine.generate(ids, max_tokens=flags.tokens, block_size=1, reuse=False).token_ids
        for name, pair in (("gguf", ours), ("torch", theirs)):
            kept[name] += walk(pair, ids, text, rows)
        sums = ", ".join(f"{name} {sum(values)}" for name, values in kept.items())
        print(f"{len(kept['gguf'])} rounds, accepted drafts: {sums}", flush=True)
        late = flags.seconds and time.process_time() - began > flags.seconds
        if len(kept["gguf"]) >= flags.rounds or late:
            break
    found = {name: survival(values, rows) for name, values in kept.items()}
    apart = [abs(a - b) for a, b in zip(found["gguf"], found["torch"], strict=True)]
    print(f"{len(kept['gguf'])} rounds, draft by draft")
    for name, shares in found.items():
        print(f"{name:6}", " ".join(f"{share:.4f}" for share in shares))
    print("apart ", " ".join(f"{gap:.4f}" for gap in apart), f"(bound {BOUND})")
    result = {"conditions": before, "rounds": len(kept["gguf"]), "found": found, "apart": apart}
    record.write(flags.out or Path("runs/gguf-acceptance.json"), result)
    sys.exit(max(apart) > BOUND)


if __name__ == "__main__":
    main()
