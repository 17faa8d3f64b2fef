"""Heads inside a target on MLX: the same drafts as on torch, the target's own text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("torch")

import mlx.core as mx
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM

import dflash
from dflash.backends.mlx import lm, open_pair
from dflash.backends.mlx.mtp_session import MtpSession
from dflash.backends.torch import open_pair as open_torch
from dflash.config import LoadConfig
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Plan, Proposal, Request, Sampling
from dflash.drafts.mtp import FINAL_NORM
from dflash.errors import CheckpointError
from dflash.registry import PROBES
from tests.backends.mtp_targets import check_commits, save_mtp_target
from tests.backends.tiny import LAYERS
from tests.conformance.backends import Plain
from tests.core.toys import ticks, tokens_of

pytestmark = [pytest.mark.mlx, pytest.mark.torch]

PROMPT = [71, 103, 35, 290, 120, 33, 64, 8, 401]
TOKENS = 24


@pytest.fixture(scope="module", params=["qwen3_5", "glm4_moe"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        # transformers knows where this family's heads are by the depths that were published
        names = [rf"model\.layers\.{LAYERS}.*"]
        patch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", names)
        yield save_mtp_target(tmp_path_factory.mktemp(request.param), request.param, count=1)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Any:
    return open_pair(LoadConfig(str(folder), "mtp", backend="mlx", dtype="float32"))


def run(pair: Any, request: Request, block: int) -> tuple[list[int], list[list[int]]]:
    """Committed tokens, and the drafted ones of every round."""
    target, (draft,) = pair.open_target(128), pair.open_drafts(128)
    drafted: list[list[int]] = []
    ask = draft.propose

    def asked(plan: Plan) -> Proposal[Any]:
        proposal: Proposal[Any] = ask(plan)
        drafted.append([int(token) for token in proposal.tokens])
        return proposal

    draft.propose = asked
    return tokens_of(list(decode(request, target, [draft], Fixed(block), ticks()))), drafted


def plain(model: Any) -> Plain:
    return Plain(lambda tokens: np.array(model(mx.array([list(tokens)]))[0, -1]))


def test_drafts_are_those_of_torch_and_the_text_is_the_targets(folder: Path, pair: Any) -> None:
    theirs = open_torch(LoadConfig(str(folder), "mtp", device="cpu", dtype="float32"))
    said = plain(pair.target.model)
    for sampling in (Sampling(), Sampling(0.8, seed=3)):
        request = Request(PROMPT, TOKENS, sampling=sampling)
        tokens, drafted = run(pair, request, 5)
        assert tokens == said.run(request)[0]
        assert (tokens, drafted) == run(theirs, request, 5)
        assert len(drafted) > 5


def test_a_head_that_knows_the_text_is_kept_whole(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, said = MtpSession._logits, plain(pair.target.model)
    for sampling in (Sampling(), Sampling(0.9, seed=5)):
        request = Request(PROMPT, 25, sampling=sampling)
        text = [*PROMPT, *said.run(request)[0]]

        def knowing(self: Any, hidden: Any, text: list[int] = text) -> Any:
            rows, place = logits(self, hidden), self._caches[0].rows.length + 1
            if place < len(text):
                rows[-1, text[place]] = 1e4
            return rows

        monkeypatch.setattr(MtpSession, "_logits", knowing)
        for size in (2, 7):
            sessions = pair.open_target(64), pair.open_drafts(64)
            steps = list(decode(request, *sessions, Fixed(size), ticks()))
            assert [*PROMPT, *tokens_of(steps)] == text
            assert all(step.accepted == step.rows for step in steps[1:])
            assert len(steps) == 1 + -(-24 // size)
        monkeypatch.undo()


def test_after_any_commits_a_head_says_what_a_fresh_session_says(pair: Any) -> None:
    check_commits(pair, mx.concatenate)


def test_the_state_behind_the_final_norm_is_tapped_and_the_norm_left_in_place(pair: Any) -> None:
    model = pair.target.model
    stack, ids = lm.stack_of(model), mx.array([PROMPT])
    norm = stack.norm
    with lm.tapped(model, (1, FINAL_NORM)) as taps:
        logits = model(ids)
    assert stack.norm is norm
    head = pair.target.head(taps[1].rows(0))
    np.testing.assert_allclose(np.array(head), np.array(logits[0]), atol=1e-4)


def test_heads_are_used_without_being_named_and_left_alone_when_told(folder: Path) -> None:
    options: Any = {"backend": "mlx", "dtype": "float32", "profile": False}
    with dflash.load(folder, **options) as engine:
        assert engine.pair.draft_name == "mtp"
        assert 0 < engine.pair.memory()["draft"] < engine.pair.memory()["target"]
    for asked in ({"mtp": False}, {"draft": "none"}):
        with dflash.load(folder, **{**options, **asked}) as engine:
            assert engine.pair.draft_name is None


@pytest.mark.parametrize("folder", ["qwen3_5"], indirect=True)
def test_heads_are_examined_and_quantised_as_other_drafts_are(folder: Path, pair: Any) -> None:
    probe = PROBES.load("mlx")(pair)
    assert probe.norms().keys() >= {"embed_norm", "state_norm", "norm"}
    request = Request(PROMPT, 6)
    twin = probe.variant(output_multiplier=1.0)
    assert run(twin, request, 3) == run(pair, request, 3)
    small = open_pair(LoadConfig(str(folder), "mtp", dtype="float32", draft_bits=8))
    assert small.memory()["draft"] < 0.5 * pair.memory()["draft"]
    assert run(small, request, 3)[0] == run(pair, request, 3)[0]


@pytest.mark.parametrize("damage", ["missing", "lacking", "several"])
def test_heads_that_cannot_be_read_are_a_note_unless_they_were_asked_for(
    tmp_path: Path, damage: str, recwarn: pytest.WarningsRecorder
) -> None:
    folder = save_mtp_target(tmp_path, heads=damage != "missing")
    if damage == "several":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 2}))
    if damage == "lacking":
        tensors = load_file(folder / "model.safetensors")
        del tensors["mtp.norm.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    says = {
        "missing": "no multi-token prediction heads",
        "lacking": r"missing, left over or misshapen: norm.weight. Use --no-mtp",
        "several": "it has several, and one is read here",
    }
    options: Any = {"backend": "mlx", "dtype": "float32", "profile": False}
    with dflash.load(folder, **options) as engine:
        assert engine.pair.draft_name is None
    notes = [str(one.message) for one in recwarn if "plain decoding" in str(one.message)]
    assert bool(notes) == (damage != "missing")
    with pytest.raises(CheckpointError, match=says[damage]):
        dflash.load(folder, "mtp", **options)
