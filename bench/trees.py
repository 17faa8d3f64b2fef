"""What trees of candidates bring on the same greedy texts: committed per pass by number of nodes.

    python -m bench.trees --texts runs/texts.json --nodes 0,8,12,16,24,32

The text at temperature 0 is the target's, whatever was drafted, so how far each tree would have
been followed can be read off a text that is there already (`bench.walks`, whose texts these are).
The drafts are those of the sessions that users run. No time is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import record, sets
from bench.walks import Texts, texts
from dflash.backends.torch.pair import TorchPair
from dflash.config import LoadConfig
from dflash.core.accept import follow
from dflash.core.types import Plan, Proposal, Request, Verdict
from dflash.demo import DRAFT_FOLDER, demo_target

ROOM = 1024  # tokens of a text and its prompt at most


class Text(NamedTuple):
    """Prompt and text, the place of the first token after the prompt, and features of all."""

    ids: Sequence[int]
    start: int
    features: torch.Tensor  # [T, M*Ht]


class Walked(NamedTuple):
    """Passes, and the tokens they commit."""

    passes: int
    committed: int
    kept: tuple[int, ...]  # [i]: passes that kept at least i + 1 drafts


def prepared(pair: TorchPair, found: Texts) -> dict[str, list[Text]]:
    """Features by one pass over each text."""
    made: dict[str, list[Text]] = {}
    for name, conversations in found.items():
        made[name] = []
        for one in conversations:
            session = pair.open_target(ROOM)
            parts = [verdict.features for verdict in session.prefill(Request(one.ids, 1), 0)]
            session.close()
            features = torch.cat([part for part in parts if part is not None])
            made[name].append(Text(one.ids, one.answer.index(True) - 1, features))
    return made


def walk(pair: TorchPair, text: Text, nodes: int, depth: int) -> Walked:
    """One text; ``nodes`` 0 is chains."""
    (draft,) = pair.open_drafts(ROOM)
    ids, at, passes, kept = text.ids, text.start, 0, [0] * depth
    draft.begin(Request(ids[:at], len(ids) - at), 0)
    draft.commit(Verdict([ids[at]], rows=at, features=text.features[:at]), at)
    while at < len(ids) - 1:
        levels = min(depth, len(ids) - 2 - at)
        path = []
        if levels:
            proposal = draft.propose(Plan(0, max(nodes, levels), levels))
            path = followed(proposal, ids[at + 1 :])
        for place in range(len(path)):
            kept[place] += 1
        count, passes = len(path) + 1, passes + 1
        rows = text.features[at : at + count]
        draft.commit(Verdict(list(ids[at + 1 : at + 1 + count]), rows=count, features=rows), count)
        at += count
    draft.close()
    return Walked(passes, len(ids) - 1 - text.start, tuple(kept))


def followed(proposal: Proposal[Any], ahead: Sequence[int]) -> list[int]:
    """Nodes that the text goes through."""
    tokens = torch.as_tensor(proposal.tokens).tolist()
    parents = list(range(-1, len(tokens) - 1))
    if proposal.parents is not None:
        parents = torch.as_tensor(proposal.parents).tolist()
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return follow(tokens, parents, lambda row: ahead[depths[row]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk every text with every number of nodes, and print."""
    parser = record.parser(__doc__, tokens=128, prompts=40)
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    parser.add_argument("--texts", type=Path, default=Path("runs/texts.json"))
    parser.add_argument("--nodes", default="0,8,12,16,24,32", help="0 = chains")
    parser.add_argument("--depth", type=int, default=None, help="left out: the draft's own")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    torch.set_num_threads(flags.threads)
    target = str(demo_target()) if flags.target == "demo" else flags.target
    load = LoadConfig(target, flags.draft or str(DRAFT_FOLDER), device="cpu", dtype="float32")
    pair = TorchPair.open(load)
    made = prepared(pair, texts(flags, pair.target))
    depth = flags.depth or (pair.draft_block_size or 1) - 1
    rows = {}
    for nodes in map(int, flags.nodes.split(",")):
        sums = {
            name: [walk(pair, text, nodes, depth) for text in part] for name, part in made.items()
        }
        rows[nodes] = {
            name: {
                "committed": sum(w.committed for w in part) / sum(w.passes for w in part),
                "kept": [
                    sum(column) / sum(w.passes for w in part)
                    for column in zip(*(w.kept for w in part), strict=True)
                ],
            }
            for name, part in sums.items()
        }
        show(nodes, rows[nodes])
    pair.close()
    record.write(flags.out or Path("runs/trees.json"), {"conditions": before, "trees": rows})


def show(nodes: int, scores: dict[str, Any]) -> None:
    """One line."""
    means = [score["committed"] for score in scores.values()]
    cells = " ".join(f"{name} {score['committed']:.3f}" for name, score in scores.items())
    print(f"{nodes or 'chain'}: {cells} average {sum(means) / len(means):.3f}", flush=True)


if __name__ == "__main__":
    main()
