"""A draft folder that says only the N most frequent tokens of a corpus, to measure what it gives.

    python -m bench.vocabulary --draft DRAFT --data text.jsonl --size 8192 --to FOLDER

The head of the copy has N rows of the target's, in bfloat16, and ``d2t`` says whose they are: the
layout of published drafts, so every backend reads it. Nothing is trained. ``--draft`` left out is
the demo's. Acceptance alone, without a folder: ``python -m bench.walks --vocab``.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import record
from bench.walks import SEEN
from dflash.backends.torch.load import load_target
from dflash.checkpoint import weight_files
from dflash.demo import demo_draft, demo_target
from dflash.tensor_files import read_header
from dflash.train.checkpoint import vocabulary_maps
from dflash.train.data import load_corpus
from dflash.train.losses import FrequentTokens

INDEX, OWN = "model.safetensors.index.json", "model-vocabulary.safetensors"


def reduced(flags: Namespace) -> dict[str, torch.Tensor]:
    """The head's rows and the distance of each from its target id."""
    name = str(demo_target()) if flags.target == "demo" else flags.target
    target = load_target(name, device="cpu", dtype="float32", pack=False)
    answers = load_corpus([flags.data], target.tokenizer, max_length=SEEN).answers()
    kept = FrequentTokens.count(answers, target.vocab_size, flags.size).kept
    weight: Any = target.head.weight
    rows = weight.detach()[kept].bfloat16().contiguous()
    return {"lm_head.weight": rows, "d2t": vocabulary_maps(kept, target.vocab_size)["d2t"]}


def write(folder: Path, out: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A copy of the draft in ``folder`` with ``tensors`` beside its own."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config["draft_vocab_size"] = tensors["d2t"].numel()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    places = {name: file.name for file in weight_files(out) for name in read_header(file).entries}
    save_file(tensors, out / OWN, metadata={"format": "pt"})
    places |= dict.fromkeys(tensors, OWN)
    size = sum(end - begin for begin, end in _stretches(out, set(places.values())))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _stretches(folder: Path, files: set[str]) -> list[tuple[int, int]]:
    every = [entry for file in files for entry in read_header(folder / file).entries.values()]
    return [tuple(entry["data_offsets"]) for entry in every]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folder."""
    parser = record.parser(__doc__, tokens=0, prompts=0)
    parser.add_argument("--data", type=Path, required=True, help="JSONL of conversations")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--to", type=Path, required=True, help="a folder that is not there yet")
    flags = parser.parse_args(arguments)
    folder = demo_draft() if flags.draft is None else Path(flags.draft)
    write(folder, flags.to, reduced(flags))
    print(f"{flags.to}: {flags.size} of the target's tokens")


if __name__ == "__main__":
    main()
