"""Both laws for every kind of draft beside every family of target, greedy and sampled.

Targets are tiny random ones of each family (tests/backends/families.py); drafts are random ones of
each kind, and scripted ones. Heads inside a target are in tests/backends/test_mtp.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.kinds import KINDS
from dflash.backends.torch.load import LoadedTarget, wrap_target
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.target import TorchTargetSession
from dflash.backends.torch.wrap import wrap_pair
from dflash.backends.toy import ScriptedDraft
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Request, Sampling, Step
from dflash.drafts.spec import read_spec
from dflash.engine import Engine
from dflash.ngram_pair import NgramPair
from tests.backends.eagle_drafts import save_eagle
from tests.backends.families import FAMILIES, HYBRIDS, family
from tests.backends.tiny import VOCAB
from tests.conformance.backends import ALWAYS, SOMETIMES, Plain
from tests.core.toys import ticks, tokens_of
from tests.facades.drafts import config

pytestmark = pytest.mark.torch

PROMPT = [71, 103, 35, 290, 120, 33, 64, 8, 401]
TOKENS = 20
WAYS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_p=0.95, seed=3)}
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
        "is_causal": False,
    },
    "eagle3": {},
}


@cache
def target(name: str) -> LoadedTarget:
    return wrap_target(family(name))


@cache
def plain(name: str) -> Plain:
    model = target(name).model

    def logits(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            row = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
        return row.numpy()

    return Plain(logits)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random draft of each kind."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in CONFIGS}
    for kind, folder in made.items():
        save_eagle(folder) if kind == "eagle3" else save_random(folder, config(**CONFIGS[kind]))
    return made


def save_random(folder: Path, keys: dict[str, Any]) -> None:
    """Seeded random weights of whatever kind ``keys`` describe."""
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    spec = read_spec(keys)
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.empty_like(weight).normal_(
            float("norm" in name), weight.shape[-1] ** -0.5, generator=generator
        )
        for name, weight in KINDS.load(spec.kind).module(spec).named_parameters()
    }
    save_file(state, folder / "model.safetensors")


def run(pair: TorchPair, draft: Any, asked: Request, block: int, tree: int = 0) -> list[Step]:
    session = pair.open_target(128)
    try:
        return list(decode(asked, session, [draft], Fixed(block, tree), ticks()))
    finally:
        session.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_draft_changes_the_text_of_any_target(
    name: str, kind: str, way: str, folders: dict[str, Path]
) -> None:
    asked = Request(PROMPT, TOKENS, sampling=WAYS[way])
    pair = TorchPair(target(name), load_draft(str(folders[kind]), target(name), pack=False))
    (draft,) = pair.open_drafts(128)
    steps = run(pair, draft, asked, 5)
    assert tokens_of(steps) == plain(name).run(asked)[0]
    assert sum(step.rows for step in steps) > TOKENS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_perfect_draft_is_kept_whole_on_every_target(name: str, way: str) -> None:
    asked = Request(PROMPT, TOKENS, sampling=WAYS[way])
    pair, oracle = TorchPair(target(name)), plain(name)
    for script in (ALWAYS, SOMETIMES):
        steps = run(pair, ScriptedDraft(oracle.ahead, VOCAB, script, 7), asked, 6)
        assert tokens_of(steps) == oracle.run(asked)[0]
        rounds = [step for step in steps if step.rows]
        for place, step in enumerate(rounds):
            right = step.rows if script is None else script[place % len(script)]
            assert step.accepted == min(right, step.rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_target_that_judges_trees_keeps_both_laws_in_them(
    name: str, way: str, folders: dict[str, Path]
) -> None:
    """Those that cannot are never asked: `dflash.blocks.choose` refuses."""
    asked, oracle = Request(PROMPT, TOKENS, sampling=WAYS[way]), plain(name)
    bare = TorchPair(target(name))
    if bare.why_no_trees():
        assert name != "qwen3_moe"
        return
    for script in (ALWAYS, SOMETIMES):
        steps = run(bare, ScriptedDraft(oracle.ahead, VOCAB, script, 7), asked, 5, 18)
        assert tokens_of(steps) == oracle.run(asked)[0]
        for place, step in enumerate(step for step in steps if step.rows):
            right = 99 if script is None else script[place % len(script)]
            assert len(step.verdict.path) == min(right, step.plan.depth)
    for folder in folders.values():
        pair = TorchPair(target(name), load_draft(str(folder), target(name), pack=False))
        steps = run(pair, pair.open_drafts(128)[0], asked, 4, 12)
        assert tokens_of(steps) == oracle.run(asked)[0]
        assert any(step.rows > step.plan.depth for step in steps)


@pytest.mark.parametrize("kind", CONFIGS)
def test_texts_longer_than_draft_and_target_were_made_for_go_on(kind: str, tmp_path: Path) -> None:
    """Rotary positions have no end: acceptance may fall, the text stays plain decoding's."""
    short = {"max_position_embeddings": 16}
    if kind == "eagle3":
        save_eagle(tmp_path, **short)
    else:
        save_random(tmp_path, config(**CONFIGS[kind], **short))
    loaded = wrap_target(family("qwen3_5", max_position_embeddings=24))
    model = loaded.model
    truth = Plain(
        lambda tokens: (
            model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            .logits[0, -1]
            .detach()
            .numpy()
        )
    )
    asked = Request(PROMPT, 40)
    for window in (None, 8):
        draft = load_draft(str(tmp_path), loaded, pack=False, window=window)
        pair = TorchPair(loaded, draft)
        steps = run(pair, pair.open_drafts(128)[0], asked, 5)
        assert tokens_of(steps) == truth.run(asked)[0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_says_the_same_with_a_lookup_and_resumes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused: list[int] = []
    prefill = TorchTargetSession.prefill

    def counted(self: TorchTargetSession, asked: Request, reuse: int) -> Any:
        reused.append(reuse)
        return prefill(self, asked, reuse)

    monkeypatch.setattr(TorchTargetSession, "prefill", counted)
    pair = NgramPair(wrap_pair(target(name).model))
    prompt = PROMPT * 2  # something to look up
    asked = Request(prompt, TOKENS, pair.eos_ids)
    with Engine(pair) as engine:
        for _ in range(2):
            answer = engine.generate(prompt, max_tokens=TOKENS, block_size=4)
            assert list(answer.token_ids) == plain(name).run(asked)[0]
    assert reused == [0, len(prompt) - 1]
