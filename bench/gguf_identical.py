"""Whether the gguf backend's ids are those of llama.cpp's own greedy decoding.

    python -m bench.gguf_identical --prompts 100 --tokens 48

The reference is one decode call a token, with nothing of our sessions or loop in it. Compared are
plain steps, fixed blocks with the demo draft, and ``auto`` with draft and look-up together. At a
first difference the gap between the two logits of the reference is reported: below 1e-3 it is a
tie, anything wider means that this quantisation is not the same for one row and for several.
"""

from __future__ import annotations

import sys
import time
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


def short(engine: Engine, count: int, longest: int) -> list[tuple[sets.Prompt, list[int]]]:
    """The first ``count`` prompts of all sets that have at most ``longest`` tokens."""
    pairs = ((prompt, engine.encode(prompt.text)) for prompt in sets.mixed(480))
    return [(prompt, ids) for prompt, ids in pairs if len(ids) <= longest][:count]


def compare(kind: str, flags: Any) -> dict[str, Any]:
    """Every prompt and arm on one target; the differences."""
    load = LoadConfig(
        str(gguf_files.target(kind)), str(gguf_files.sidecar()), threads=flags.threads
    )
    pair = GgufPair.open(load)
    texts = dict.fromkeys(ARMS, 0)
    apart: list[dict[str, Any]] = []
    total, done, began = 0, 0, time.process_time()
    with Engine(NgramPair(pair)) as engine:  # type: ignore[arg-type]
        for prompt, ids in short(engine, flags.prompts, flags.longest)[flags.skip :]:
            if flags.seconds and time.process_time() - began > flags.seconds:
                break
            done += 1
            own = reference(pair, ids, flags.tokens)
            total += len(own)
            for name, size in ARMS.items():
                asked: Any = {"max_tokens": flags.tokens, "block_size": size, "reuse": False}
                found = engine.generate(ids, **asked).token_ids
                place = divergence(found, own)
                texts[name] += place is None
                if place is not None:
                    row = GgufProbe(pair).logits([*ids, *own[:place]])
                    gap = float(abs(row[own[place]] - row[found[place]]))
                    apart.append({"prompt": prompt.id, "arm": name, "place": place, "gap": gap})
                    print(f"  {kind} {apart[-1]}", flush=True)
            print(f"{kind}: {done} prompts, {total} tokens, the same: {texts}", flush=True)
    return {"prompts": done, "tokens": total, "same": texts, "differences": apart}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print as it goes, exit 1 on a difference that is no tie."""
    parser = record.parser(__doc__, tokens=48, prompts=0)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--skip", type=int, default=0, help="the first N, for a run in parts")
    parser.add_argument("--longest", type=int, default=80, help="prompt tokens at most")
    parser.add_argument("--seconds", type=float, default=0, help="of CPU time, for each kind")
    parser.add_argument("--kinds", default="q4_1,q8_0")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    found = {kind: compare(kind, flags) for kind in flags.kinds.split(",")}
    record.write(
        flags.out or Path("runs/gguf-identical.json"), {"conditions": before, "found": found}
    )
    wide = [one for r in found.values() for one in r["differences"] if one["gap"] >= 1e-3]
    sys.exit(bool(wide))


if __name__ == "__main__":
    main()
