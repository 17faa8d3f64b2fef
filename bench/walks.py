"""Acceptance of several drafts over the same greedy texts, without generating them for each.

    python -m bench.walks --drafts v1,v2 --paths walk,best,rows --texts runs/texts.json

The text at temperature 0 is the target's, whatever the draft, so where a draft would have been
right can be read off a text that is there already: each round starts where the last one ended, as
in generation. Texts are generated once and kept in ``--texts``. ``--vocab N`` lets a draft say only
the N tokens that are most frequent in ``--data`` (the vocabulary of `dflash train --draft-vocab`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench import record, sets
from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.load import LoadedTarget, load_target
from dflash.demo import demo_target
from dflash.train.batches import Materials
from dflash.train.data import Conversation, load_corpus
from dflash.train.evaluate import Head, Score, walk
from dflash.train.features import FeatureStore
from dflash.train.losses import FrequentTokens

Texts = dict[str, list[Conversation]]
SEEN = 320  # tokens of a conversation that count towards a vocabulary


def texts(flags: Any, target: LoadedTarget) -> Texts:
    """Greedy texts of each set, those in circles left out; from ``--texts`` if they are there."""
    if not flags.texts.is_file():
        record.write(
            flags.texts,
            {
                name: plain(target, sets.load(name, flags.prompts_per_set), flags.tokens)
                for name in flags.sets.split(",")
            },
        )
    rows = json.loads(flags.texts.read_text(encoding="utf-8"))
    return {name: [conversation(**row) for row in found] for name, found in rows.items()}


def plain(
    target: LoadedTarget, prompts: Sequence[sets.Prompt], tokens: int
) -> list[dict[str, list[int]]]:
    """Texts by plain decoding, all prompts side by side: on a CPU ten times the engine's pace."""
    tokenizer: Any = target.tokenizer
    every = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for prompt in prompts
    ]
    width = max(map(len, every))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in every])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in every])
    with torch.inference_mode():
        out = target.model.generate(
            padded, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    made = []
    for ids, row in zip(every, out[:, width:].tolist(), strict=True):
        ends = [place for place, token in enumerate(row, 1) if token in target.eos_ids]
        text = row[: ends[0]] if ends else row
        if not record.in_circles(text):
            made.append({"prompt": ids, "text": text})
    return made


def conversation(prompt: Sequence[int], text: Sequence[int]) -> Conversation:
    """Prompt and text; what the prefill brought, the first token, is nobody's draft."""
    answer = [False] * (len(prompt) + 1) + [True] * (len(text) - 1)
    return Conversation((*prompt, *text), tuple(answer))


def head_of(target: LoadedTarget, vocabulary: torch.Tensor | None) -> Head:
    """The target's head, or the rows of a vocabulary."""
    weight: Any = target.head.weight
    whole = weight.detach()
    return Head(whole) if vocabulary is None else Head(whole[vocabulary], vocabulary)


def vocabularies(flags: Any, target: LoadedTarget) -> dict[str, torch.Tensor | None]:
    """Token ids by name; None for all of them."""
    found: dict[str, torch.Tensor | None] = {"": None}
    if flags.vocab:
        corpus = load_corpus([flags.data], target.tokenizer, max_length=SEEN)
        for size in map(int, flags.vocab.split(",")):
            kept = FrequentTokens.count(corpus.answers(), target.vocab_size, size).kept
            found[f" vocabulary {size}"] = kept
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk every draft over every set, and print."""
    parser = record.parser(__doc__, tokens=128, prompts=40)
    parser.add_argument("--drafts", required=True, help="folders, separated by commas")
    parser.add_argument("--paths", default="walk", help="walk, best, rows (no selector)")
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    parser.add_argument("--texts", type=Path, default=Path("runs/texts.json"))
    parser.add_argument("--data", type=Path, default=None, help="JSONL, for --vocab")
    parser.add_argument("--vocab", default="", help="sizes, separated by commas")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    torch.set_num_threads(flags.threads)
    name = str(demo_target()) if flags.target == "demo" else flags.target
    target = load_target(name, device="cpu", dtype="float32", pack=False)
    found = texts(flags, target)
    heads = {label: head_of(target, ids) for label, ids in vocabularies(flags, target).items()}
    result: dict[str, dict[str, Score]] = {}
    with TemporaryDirectory() as folder:
        for draft in flags.drafts.split(","):
            loaded = load_draft(draft, target, "float32", pack=False)
            materials = lay_out(loaded.spec.taps, target, found, Path(folder))
            for path in flags.paths.split(","):
                for label, head in heads.items():
                    scores = {
                        s: score(loaded.model, materials, found, s, head, path) for s in found
                    }
                    result[f"{draft} {path}{label}"] = scores
                    show(f"{draft} {path}{label}", scores)
    rows = {key: {s: asdict(v) for s, v in scores.items()} for key, scores in result.items()}
    record.write(flags.out or Path("runs/walks.json"), {"conditions": before, "walks": rows})


def lay_out(taps: Sequence[int], target: LoadedTarget, found: Texts, folder: Path) -> Materials:
    """Features of all texts, computed once for drafts with the same taps."""
    every = [one for part in found.values() for one in part]
    place = folder / f"features-{'-'.join(map(str, taps))}.bin"
    features = FeatureStore(target.model, [one.ids for one in every], taps, place)
    for _ in features.fill():
        pass
    nothing = FrequentTokens.count([0], target.vocab_size, 0)
    embedding = target.embedding.detach().float()
    return Materials(every, features, embedding, embedding[:0], nothing, 0)


def score(
    model: Any,
    materials: Materials,
    found: dict[str, list[Conversation]],
    name: str,
    head: Head,
    path: Any,
) -> Score:
    """Committed tokens per pass over the texts of one set."""
    order = [key for key, part in found.items() for _ in part]
    chosen = [(i, c) for i, c in enumerate(materials.sequences) if order[i] == name]
    materials.mask_id = model.spec.mask_token_id
    return walk(model, materials, chosen, head, path=path)


def show(label: str, scores: dict[str, Score]) -> None:
    """One line."""
    cells = " ".join(f"{name} {s.mean_committed:.3f}" for name, s in scores.items())
    average = sum(s.mean_committed for s in scores.values()) / len(scores)
    print(f"{label}: {cells} average {average:.3f}", flush=True)


if __name__ == "__main__":
    main()
