"""Whether the gguf backend's ids are those of llama.cpp's own greedy decoding.

    python -m bench.gguf_identical --prompts 100 --tokens 48

The reference is one decode call a token, with nothing of our sessions or loop in it. Compared are
plain steps, fixed blocks with the demo draft, and ``auto`` with draft and look-up together. At a
first difference the gap between the two logits of the reference is reported: below 1e-3 it is a
tie, anything wider means that this quantisation is not the same for one row and for several.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import gguf_files, record, sets
from dflash.backends.gguf.pair import GgufPair
from dflash.backends.gguf.probe import GgufProbe
from dflash.comparison import divergence
from dflash.config import LoadConfig
from dflash.engine import Engine
from dflash.ngram_pair import NgramPair

ARMS: dict[str, Any] = {"plain": 1, "block 4": 4, "auto": "auto"}


def reference(pair: GgufPair, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy ids by single decode calls."""
    context, _ = pair.open_context(len(prompt) + tokens, taps=False)
    context.run(prompt, 0, 1)
    said = [int(context.logits(1)[0].argmax())]
    while len(said) < tokens and said[-1] not in pair.eos_ids:
        context.run(said[-1:], len(prompt) + len(said) - 1, 1)
        said.append(int(context.logits(1)[0].argmax()))
    context.close()
    return said


def compare(kind: str, flags: Any) -> dict[str, Any]:
    """Every prompt and arm on one target; the differences."""
    load = LoadConfig(
        str(gguf_files.target(kind)), str(gguf_files.sidecar()), threads=flags.threads
    )
    pair = GgufPair.open(load)
    texts = dict.fromkeys(ARMS, 0)
    apart: list[dict[str, Any]] = []
    total = 0
    with Engine(NgramPair(pair)) as engine:  # type: ignore[arg-type]
        for prompt in sets.mixed(flags.prompts):
            ids = engine.encode(prompt.text)
            own = reference(pair, ids, flags.tokens)
            total += len(own)
            for name, size in ARMS.items():
                found = engine.generate(ids, max_tokens=flags.tokens, block_size=size).token_ids
                place = divergence(found, own)
                texts[name] += place is None
                if place is not None:
                    row = GgufProbe(pair).logits([*ids, *own[:place]])
                    gap = float(abs(row[own[place]] - row[found[place]]))
                    apart.append({"prompt": prompt.id, "arm": name, "place": place, "gap": gap})
    return {"prompts": flags.prompts, "tokens": total, "same": texts, "differences": apart}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, exit 1 on a difference that is no tie."""
    parser = record.parser(__doc__, tokens=48, prompts=0)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--kinds", default="q4_1,q8_0")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    found = {kind: compare(kind, flags) for kind in flags.kinds.split(",")}
    for kind, result in found.items():
        print(f"{kind}: {result['tokens']} tokens, the same: {result['same']}")
        for one in result["differences"]:
            print(f"  {one}")
    record.write(
        flags.out or Path("runs/gguf-identical.json"), {"conditions": before, "found": found}
    )
    wide = [one for r in found.values() for one in r["differences"] if one["gap"] >= 1e-3]
    sys.exit(bool(wide))


if __name__ == "__main__":
    main()
