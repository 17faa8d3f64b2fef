"""Acceptance of several drafts over the same greedy texts, without generating them for each.

    python -m bench.walks --drafts v1,v2 --paths walk,best,rows --texts runs/texts.json

The text at temperature 0 is the target's, whatever the draft, so where a draft would have been
right can be read off a text that is there already: each round starts where the last one ended, as
in generation. Texts are generated once and kept in ``--texts``. ``--vocab N`` lets a draft say only
the N tokens that are most frequent in ``--data`` (the vocabulary of `dflash train --draft-vocab`).
What comes after the first is compared with it, at equal block size: the averages over sets, and a
95 % interval by drawing texts anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
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
Walked = Mapping[str, Sequence[Score]]  # texts by set
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
    parser.add_argument(
        "--paths", default="walk", help="of DFlash2: walk, best, rows (no selector)"
    )
    parser.add_argument("--block-sizes", default="", help="default: each draft's own")
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
    result: dict[str, Walked] = {}
    first: dict[str, Walked] = {}  # by block size
    with TemporaryDirectory() as folder:
        for draft in flags.drafts.split(","):
            loaded = load_draft(draft, target, "float32", pack=False)
            materials = lay_out(loaded.spec.taps, target, found, Path(folder))
            paths = flags.paths if loaded.spec.dflash2 else "walk"  # others have one way
            for size, path, label in product(flags.block_sizes.split(","), paths.split(","), heads):
                if size:
                    loaded.model.spec = replace(loaded.spec, block_size=int(size))
                walked = {
                    s: score(loaded.model, materials, found, s, heads[label], path) for s in found
                }
                key = f"{draft} {path}{label}{size and f' block {size}'}"
                result[key] = walked
                show(key, walked, first.setdefault(size, walked))
    rows = {
        key: {
            name: asdict(total(texts)) | {"texts": [(t.committed, t.rounds) for t in texts]}
            for name, texts in walked.items()
        }
        for key, walked in result.items()
    }
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
) -> list[Score]:
    """Committed tokens per pass over each text of one set."""
    order = [key for key, part in found.items() for _ in part]
    chosen = [(i, c) for i, c in enumerate(materials.sequences) if order[i] == name]
    materials.mask_id = model.spec.mask_token_id
    return [walk(model, materials, [one], head, path=path) for one in chosen]


def total(texts: Sequence[Score]) -> Score:
    """Several texts as one; a text's places are all committed, so these weigh its rows."""
    committed = sum(text.committed for text in texts)
    rounds = sum(text.rounds for text in texts)
    rows = [
        sum(text.by_position[row] * text.committed for text in texts) / max(committed, 1)
        for row in range(len(texts[0].by_position) if texts else 0)
    ]
    return Score(committed / max(rounds, 1), rounds, committed, rows)


def average(walked: Walked, drawn: Sequence[tuple[str, int]]) -> float:
    """Mean over sets of committed tokens per pass, over ``drawn`` texts (set and place)."""
    means = []
    for name, texts in walked.items():
        found = [texts[place] for at, place in drawn if at == name]
        means += [total(found).mean_committed] if found else []
    return sum(means) / max(len(means), 1)


def show(label: str, walked: Walked, first: Walked) -> None:
    """One line; what is not the first is held against it."""
    cells = " ".join(f"{name} {total(t).mean_committed:.3f}" for name, t in walked.items())
    every = [(name, place) for name, texts in walked.items() for place in range(len(texts))]
    line = f"{label}: {cells} average {average(walked, every):.3f}"
    if walked is not first:

        def gain(drawn: Sequence[int]) -> float:
            texts = [every[place] for place in drawn]
            return 100 * (average(walked, texts) / average(first, texts) - 1)

        low, high = record.bootstrap(len(every), gain)
        line += f" ({gain(range(len(every))):+.1f} % [{low:+.1f}, {high:+.1f}])"
    print(line, flush=True)


if __name__ == "__main__":
    main()
